r"""What a training datum does to predictions: the fit without it, from the fit with it.

The objective is ``sum_n l_n(f_n) + theta^T delta theta / 2`` with outputs f_n of datum n, slopes ``l'_n`` and Hessians ``H_n``
of its loss in them. At its minimum, where the posterior's precision is ``Lambda = sum_n J_n^T H_n J_n + delta``, one Newton
step without datum n goes to

    theta_-n = theta + (Lambda - J_n^T H_n J_n)^-1 J_n^T l'_n = theta + Lambda^-1 J_n^T a_n,
    a_n = (1 - H_n C_n)^-1 l'_n,        C_n = J_n Lambda^-1 J_n^T,

so that a scalar m of the outputs at x moves by ``m'^T J(x) Lambda^-1 J_n^T a_n``, and datum n itself is predicted without
having been seen by

    f_-n = f_n + C_n a_n,               C_-n = C_n (1 - H_n C_n)^-1.

For a linear model with Gaussian noise and a dense precision both are exact. Without the leverage ``H_n C_n`` (``a_n = l'_n``)
it is the influence function (Cook and Weisberg, 1982; Koh and Liang, 2017); from Kronecker factors and their eigenbasis it is
that of Grosse et al. (2023). Of draws the influence is a covariance: a posterior without the loss l_n has

    E_-n m - E m  ~  Cov(l_n, m)                                               (Giordano, Broderick and Jordan, 2018)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.curvature import per_sample
from bayesopt_chain.curvature._plan import parts
from bayesopt_chain.likelihoods import Outputs, Predictive
from bayesopt_chain.likelihoods._likelihood import slope
from bayesopt_chain.posterior._linearized import ROW_BYTES, linearized_by
from bayesopt_chain.posterior.fit import FITTED, FittedLaplace, at, heat_of
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.last_layer import with_gradients
from bayesopt_chain.posterior.model import asked
from bayesopt_chain.precision import flatten
from bayesopt_chain.tracing import is_transformed
from bayesopt_chain.trees import Tree, size

IN_ORDER = checks.DATA._replace(
    fits=lambda x: (
        checks.DATA.fits(x)
        and not any(
            isinstance(
                getattr(loader, "sampler", None),
                (
                    torch.utils.data.RandomSampler,
                    torch.utils.data.SubsetRandomSampler,
                    torch.utils.data.WeightedRandomSampler,
                ),
            )
            for loader in (x, getattr(x, "batch_sampler", None))
        )
    ),
    hint="of a DataLoader with shuffle=False (of some rows: of a Subset), since there is one answer a datum, in their order",
)


@checks.takes(fitted=FITTED, train=IN_ORDER, query=IN_ORDER, of=checks.FUNCTION.or_none(), leverage=checks.BOOL)
def influence(
    fitted: FittedLaplace,
    train: Any,
    query: Any,
    *,
    of: Callable[[Tensor, Any], Tensor] | None = None,
    leverage: bool = True,
) -> Tensor:
    """How much a scalar of each prediction would change if a training datum were left out and the model fitted again.

    Of several data left out together the changes add up, to first order.

    Args:
        fitted: of ``bc.fit_laplace``, in any structure; "kronecker" with ``basis=`` is EKFAC. Only the kept parameters move:
            with ``subset="last_layer"`` the features stay. Give it the prior that training had, as ``prior_precision`` with
            ``tune=None`` (the sum of losses, so N times a weight decay on their mean).
        train: the training data with targets, as for ``bc.fit_laplace``; read once.
        query: inputs, and targets where ``of`` needs them, as for ``fitted.predict``.
        of: ``of(outputs [Q, *event], targets) -> [Q]``, a differentiable scalar of each datum's prediction; a sum of several
            outputs will do. Default: the loss, in nats, with the noise in force.
        leverage: whether a datum's own share of the precision is taken out. Default True, a Newton step, exact for linear
            models with Gaussian noise and a dense precision; False is the influence function, which needs no ``C_n``.

    Returns:
        ``[Q, N]``, in units of ``of``. A positive change of the loss: the training datum helps. Held at once are the gradients
        of all queries, Q P numbers, and of up to 256 MiB of training data.

    Raises:
        ValueError: data without targets where they are needed; ``of`` that returns another shape; with ``leverage`` a datum
            that the precision holds less of than its own curvature, as approximations can have it.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [1.0], [4.0]])
        >>> noise = bc.likelihoods.gaussian(1.0)
        >>> module = torch.nn.Linear(1, 1).eval()
        >>> fitted = bc.fit_laplace(module, noise, [(x, y)], structure="dense", tune=None)
        >>> without = bc.fit_laplace(module, noise, [(x[:2], y[:2])], structure="dense", tune=None)
        >>> change = bc.influence(fitted, (x, y), torch.tensor([[3.0]]), of=lambda f, _: f[:, 0])
        >>> more = without.outputs(torch.tensor([[3.0]])).mean - fitted.outputs(torch.tensor([[3.0]])).mean
        >>> torch.allclose(change[:, 2], more[:, 0])
        True
    """
    scalar, posterior = of or fitted.likelihood.nll, _bayes(fitted)

    def move(some: Any) -> Tensor:
        return flatten(posterior.precision.solve(_seeded(fitted, posterior, some, scalar)), posterior.mean)

    along = torch.cat(_answers("influence", fitted, posterior, query, "query", move, targets=of is None))

    def change(some: Any) -> Tensor:
        pull = _without(fitted, posterior, some)[0] if leverage else _slopes(fitted, posterior, some)
        return along @ flatten(_rows(fitted, posterior, some, pull), posterior.mean).to(along).mT

    return torch.cat(_answers("influence", fitted, posterior, train, "train", change), 1).to(fitted.model.dtype)


@checks.takes(fitted=FITTED, train=IN_ORDER)
def leave_one_out(fitted: FittedLaplace, train: Any) -> Predictive:
    """Each training datum as the fit to all others predicts it; ``leave_one_out(fitted, train).log_prob(y).mean()`` is the
    leave-one-out estimate of the predictive density.

    Prior and noise are those in force; exact for a linear model with Gaussian noise and a dense precision.

    Args:
        fitted: of ``bc.fit_laplace``, in any structure.
        train: the training data with targets, as for ``bc.fit_laplace``.

    Returns:
        A :class:`bayesopt_chain.likelihoods.Predictive` of N data.

    Raises:
        ValueError: data without targets; a datum that the precision holds less of than its own curvature.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [1.0], [4.0]])
        >>> module = torch.nn.Linear(1, 1).eval()
        >>> fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(1.0), [(x, y)], structure="dense", tune=None)
        >>> bc.posterior.leave_one_out(fitted, (x, y)).mean
        tensor([[0.3333],
                [1.8182],
                [1.0000]])
    """
    posterior = _bayes(fitted)
    left_out = lambda some: _without(fitted, posterior, some)[1]  # noqa: E731
    parts = _answers("leave_one_out", fitted, posterior, train, "train", left_out)
    mean, covariance = (torch.cat(x).to(fitted.model.dtype) for x in zip(*parts))
    heat = heat_of(fitted.model, fitted.seen, fitted.covariance_scale)
    return Predictive(fitted.likelihood, Outputs(mean, covariance * heat))


@checks.takes(train_losses=checks.REALS, values=checks.REALS)
def influence_of_draws(train_losses: Tensor, values: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """The same from draws: how much the mean of each value would change without a training datum, to first order.

    Args:
        train_losses: ``[S, N]``: the loss of every training datum, in nats and not averaged, at S draws of the Bayesian
            posterior (temperature 1 / N of a mean loss).
        values: ``[S, Q]``: of every query at the same draws.
        log_weights: of the draws, ``[S]``. Default: all alike.

    Returns:
        ``[Q, N]``, in units of the values: the covariance over draws of value and loss.

    Raises:
        ValueError: tensors of other shapes, or fewer than two draws.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> loss, value = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [5.0]])
        >>> bc.posterior.influence_of_draws(loss, value)
        tensor([[2.]])
    """
    shapes = [tuple(x.shape) for x in (train_losses, values)]
    if any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][0] or shapes[0][0] < 2:
        raise ValueError(
            f"influence_of_draws: train_losses and values must be [S, N] and [S, Q] of the same draws, at least two, got "
            f"{shapes[0]} and {shapes[1]}"
        )
    equal = values.new_zeros(len(values)) if log_weights is None else log_weights
    if equal.shape != values.shape[:1]:
        raise ValueError(
            f"influence_of_draws: log_weights must be one for each of {len(values)} draws, got {equal.shape}"
        )
    weights = equal.to(values.dtype).softmax(0)[:, None]
    losses = train_losses.to(values.dtype)
    return (weights * (values - (weights * values).sum(0))).mT @ (losses - (weights * losses).sum(0))


def _bayes(fitted: FittedLaplace) -> Gaussian:
    """The posterior whose precision is the objective's Hessian, whatever temperature or budget the fit has, decomposed."""
    model = replace(fitted.model, how=fitted.model.how._replace(temperature=None))
    return at(model, fitted.seen, fitted.prior_precision, fitted.likelihood_scale).posterior.factorised()


def _answers(
    who: str,
    fitted: FittedLaplace,
    posterior: Gaussian,
    data: Any,
    name: str,
    answer: Callable[[Any], Any],
    *,
    targets: bool = True,
) -> list[Any]:
    """What ``answer`` says of as many data at a time as have gradients of :data:`ROW_BYTES`."""
    at_once = max(1, ROW_BYTES // (size(posterior.mean) * optree.tree_leaves(posterior.mean)[0].element_size()))

    def of_batch(batch: Any) -> list[Any]:
        if targets and batch[1] is None:
            raise ValueError(f"{name} has no targets: pass batches (inputs, targets)" + " or of=" * (name == "query"))
        return [answer(some) for some in parts(batch, at_once)]

    return [x for xs in asked(fitted.model, who, data, of_batch, name) for x in xs]


def _seeded(fitted: FittedLaplace, posterior: Gaussian, batch: Any, scalar: Callable[[Tensor, Any], Tensor]) -> Tree:
    """The gradient of every datum's scalar, leaves ``[Q, *leaf.shape]``."""
    outputs = _outputs(fitted, posterior, batch, "query")

    def total(f: Tensor) -> Tensor:
        try:
            found = scalar(f, batch[1])
        except TypeError as err:  # which would be put down to the model
            raise TypeError(
                f"influence: of cannot take outputs {tuple(f.shape)} and the query's targets ({err})"
            ) from err
        if not isinstance(found, Tensor) or found.shape != f.shape[:1]:
            raise ValueError(
                f"influence: of must return one number a datum, {tuple(f.shape[:1])}, got {checks.short(found)}"
            )
        if not (found.requires_grad or is_transformed()):
            raise ValueError(
                "influence: of must return what has a gradient in the outputs, such as a difference of logits"
            )
        return found.sum()

    return _rows(fitted, posterior, batch, slope(total, outputs))


def _outputs(fitted: FittedLaplace, posterior: Gaussian, batch: Any, name: str) -> Tensor:
    outputs = with_gradients(fitted.model.forward)(posterior.mean, batch)
    checks.finite_data(f"{name}: outputs of the model", outputs)
    return outputs


def _rows(fitted: FittedLaplace, posterior: Gaussian, batch: Any, pull: Tensor) -> Tree:
    """``J_n^T pull_n`` of every datum, leaves ``[B, *leaf.shape]``."""

    def along(params: Tree, pair: Any) -> Tensor:
        return (fitted.model.forward(params, pair[0]) * pair[1]).sum()

    return per_sample(torch.func.grad(along))(posterior.mean, (batch, pull))


def _slopes(fitted: FittedLaplace, posterior: Gaussian, batch: Any) -> Tensor:
    """``l'_n`` ``[B, *event]``, with the noise and the dispersion in force."""
    found = fitted.likelihood.gradient(_outputs(fitted, posterior, batch, "train"), batch[1])
    return found if fitted.likelihood.has_noise_scale else found * fitted.likelihood_scale.to(found)


def _without(fitted: FittedLaplace, posterior: Gaussian, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """``a_n`` ``[B, *event]``; outputs and their covariance, of each datum without itself.

    With a root ``H = S S^T`` the leverage is the symmetric ``R = S^T C S``, and ``(1 - H C)^-1 = 1 + S (1 - R)^-1 S^T C``.
    """
    mean, covariance = linearized_by(fitted.model.checks, fitted.model.forward, posterior, batch)
    covariance = covariance if covariance.ndim == 3 else torch.diag_embed(covariance)
    slopes = _slopes(fitted, posterior, batch).to(covariance)
    with torch.no_grad():
        s = fitted.likelihood.factors(mean, batch[1]).flatten(2).permute(1, 2, 0)  # [B, E, K]
        s = s if fitted.likelihood.has_noise_scale else s * fitted.likelihood_scale.to(s).sqrt()
        with_s = s.mT @ covariance
        rest = torch.eye(s.shape[2], dtype=s.dtype, device=s.device) - with_s @ s
        factor, failed = torch.linalg.cholesky_ex((rest + rest.mT) / 2)
        if bool(failed.any()):
            raise ValueError(
                f"{int((failed > 0).sum())} of {len(s)} data have a leverage of 1 or more, number {int(failed.nonzero()[0])} "
                "first: the precision holds less than their own curvature, as approximations and data that were not in the fit "
                "can have it: pass leverage=False, or fit with structure='dense'"
            )
        a = slopes.flatten(1) + (s @ torch.cholesky_solve(with_s @ slopes.flatten(1)[..., None], factor))[..., 0]
        left = covariance + with_s.mT @ torch.cholesky_solve(with_s, factor)
        moved = mean + (covariance @ a[..., None])[..., 0].reshape(mean.shape)
    return a.reshape(mean.shape), (moved, left)
