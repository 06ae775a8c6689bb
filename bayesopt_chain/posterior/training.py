"""Training by the marginal likelihood: epochs of the log joint, and now and then the prior and the noise by the evidence.

    theta    epochs of any optimizer on    L(theta) = mean nll + sum_l delta_l |theta_l - mu_l|^2 / (2 N s)
    h        log Z(delta, s) at theta is maximised (``evidence.py``); log delta and log s move towards it by at most 1

for N data, a prior of mean mu (0 by default) with one precision delta for each parameter tensor or one for all, and Gaussian
noise of variance ``variance / s`` (s = 1 for other likelihoods; of a linear layer alone with several outputs one for each, of
which L has the geometric mean and nll the ratios to it). L is the negative log joint over N s, so that a learning rate keeps
its meaning as the noise is found. The bound on the step keeps a poor first fit from choosing a prior that it never
leaves. Kept are the parameters with the highest evidence (Immer et al., 2021, "Scalable marginal likelihood estimation for
model selection in deep learning", algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.curvature import STRUCTURES
from bayesopt_chain.curvature._plan import batch_size
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.modules import (
    Reader,
    arguments_of,
    as_batches,
    batch_inputs,
    in_mode,
    logits_of,
    peeked,
    with_progress,
    write_back,
)
from bayesopt_chain.posterior.evidence import OF_PRIOR, require_prior_structure, tuned
from bayesopt_chain.posterior.fit import FittedLaplace, at
from bayesopt_chain.posterior.gaussian import require_finite
from bayesopt_chain.posterior.last_layer import unwrapped
from bayesopt_chain.posterior.model import How, Model, make_model

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class EvidenceTraining(NamedTuple):
    """What :func:`train_by_evidence` returns.

    Attributes:
        fitted: the :class:`FittedLaplace` with the highest evidence; the module holds its parameters.
        log_evidence: of every estimate, in nats.
        loss: of every epoch: the mean training loss.
    """

    fitted: FittedLaplace
    log_evidence: list[float]
    loss: list[float]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: Adam with a learning rate of 1e-3."""
    return torch.optim.Adam(parameters, lr=1e-3)


@checks.takes(
    module=checks.Kind(
        lambda x: isinstance(x, nn.Module),
        "a torch.nn.Module (with a forward function alternate your own loop with bc.fit_laplace, whose prior_precision and "
        "likelihood_scale go into the next loss)",
    ),
    loader=checks.Kind(
        lambda x: checks.BATCHES.fits(x) and (isinstance(x, (tuple, Mapping)) or iter(x) is not x),
        "batches that can be read again and again, such as a list or a DataLoader",
    ),
    optimizer=checks.Kind(callable, "a function from a list of parameters to an optimizer of torch.optim"),
    epochs=checks.WHOLE,
    every=checks.WHOLE,
    structure=checks.one_of(*(name for name in STRUCTURES if name != "low_rank")),
    prior_precision=checks.POSITIVE,
    prior_structure=OF_PRIOR,
    tune_noise=checks.BOOL,
)
def train_by_evidence(
    module: nn.Module,
    likelihood: Likelihood,
    loader: Iterable,
    *,
    optimizer: MakeOptimizer = adam,
    epochs: int = 300,
    every: int = 5,
    burn_in: int = 0,
    structure: str = "kronecker",
    subset: str | Sequence[str] | Callable[[str], bool] = "all",
    prior_precision: float = 1.0,
    prior_mean: Any = 0.0,
    prior_structure: Literal["scalar", "layerwise"] | None = None,
    tune_noise: bool = True,
    progress: bool = False,
    **options: Any,
) -> EvidenceTraining:
    """Train a module while the evidence chooses the prior's precision and the noise; no validation set.

    Args:
        module: trained in place, in the modes that its layers have (``module.train()`` before, for dropout and batch norm); it
            is returned in ``eval`` mode with the parameters of the highest evidence.
        likelihood: of :mod:`bayesopt_chain.likelihoods`. With ``gaussian()``, its variance is a start.
        loader: an iterable of batches ``(inputs, targets)`` that can be read again and again; or one such batch.
        optimizer: from a list of parameters to any ``torch.optim`` optimizer, without weight decay. Default: Adam, lr 1e-3.
        epochs: how many. Default 300.
        every: epochs between estimates of the evidence. Default 5.
        burn_in: epochs before the first one. Default 0.
        structure: of the posterior, as for :func:`bayesopt_chain.fit_laplace`; not "low_rank".
        subset: which parameters are trained and uncertain, as there. Default "all". With "last_layer" the features of a
            linear last layer are computed once, and the layer alone is trained.
        prior_precision: where it starts, positive. Default 1.
        prior_mean: of the Gaussian prior: a number, or a tree like the kept parameters, which is copied. Default 0. The initial
            weights, ``dict(module.named_parameters())``, are worth trying with a few dozen data: those of a wide layer,
            which so few data leave where they are, count as evidence for a wide prior around 0.
        prior_structure: "scalar" has one precision for all parameters, "layerwise" one for each parameter tensor. Default:
            "scalar" where the structure is "dense" or "root", which have no evidence for another, "layerwise" for the others.
        tune_noise: whether the evidence chooses Gaussian noise too. Default True; :func:`bayesopt_chain.fit_laplace` says
            which structures judge it well.
        progress: show a progress bar (needs tqdm).
        **options: of the estimator :func:`bayesopt_chain.curvature.ggn`.

    Returns:
        An :class:`EvidenceTraining`.

    Raises:
        ValueError: arguments out of range; a loader that can be read only once; weight decay; a loss that is not finite.
        TypeError: not a module.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.posterior import train_by_evidence
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(50, 1)
        >>> data = [(x, torch.sin(2 * x) + 0.1 * torch.randn(50, 1))]
        >>> module = torch.nn.Sequential(torch.nn.Linear(1, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
        >>> adam = lambda parameters: torch.optim.Adam(parameters, lr=0.02)
        >>> training = train_by_evidence(module, bc.likelihoods.gaussian(), data, optimizer=adam, epochs=100)
        >>> training.log_evidence[-1] > training.log_evidence[0]
        True
    """
    loader, module = as_batches(loader), unwrapped(module)
    of_prior = require_prior_structure("train_by_evidence", prior_structure, structure)
    prior_mean = optree.tree_map(lambda m: m.detach().clone() if isinstance(m, Tensor) else m, prior_mean)
    how = How(likelihood, subset, structure, options, prior_mean=prior_mean, read=Reader(module))
    with in_mode(module, training=False):
        model = make_model(module, None, peeked(loader, "train_by_evidence", how.read).first, how)
        data = loader if model.features_of is None else [model.seen_by_head(batch) for batch in map(how.read, loader)]
    means: Any = model.prior_means()
    count = sum(batch_size(batch) for batch in map(model.how.read, data))
    own = dict(module.named_parameters())
    chosen = {name: own[name] for name in model.params}
    stepper = optimizer(list(chosen.values()))
    if not isinstance(stepper, torch.optim.Optimizer):
        raise TypeError(
            f"train_by_evidence: optimizer returned {type(stepper).__name__}, not an optimizer of torch.optim"
        )
    if any(group.get("weight_decay", 0) for group in stepper.param_groups):
        raise ValueError(
            "train_by_evidence: the optimizer has weight decay: leave it at 0, the evidence chooses the prior"
        )

    prior = {name: torch.full_like(p.detach().sum(), float(prior_precision)) for name, p in chosen.items()}
    scale = torch.ones((), dtype=torch.float64, device=next(iter(chosen.values())).device)
    best: tuple[FittedLaplace, dict[str, Tensor]] | None = None
    evidences: list[float] = []
    losses: list[float] = []
    for epoch in with_progress(range(1, epochs + 1), progress, epochs, "epoch"):
        losses.append(_epoch(module, model, chosen, data, stepper, prior, scale, means, count))
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"train_by_evidence: the loss is {losses[-1]} after epoch {epoch}: lower the learning rate"
            )
        if epoch != epochs and (epoch <= burn_in or (epoch - burn_in) % every):
            continue
        held = {name: p.detach().to(model.params[name].dtype, copy=True) for name, p in chosen.items()}
        now = replace(model, params=held)
        with in_mode(module, training=False):
            fitted = _estimated(now, data, prior, scale, tune_noise, of_prior)
        prior, scale = fitted.prior_precision, fitted.likelihood_scale
        evidences.append(fitted.log_evidence.item())
        if best is None or fitted.log_evidence > best[0].log_evidence:
            best = fitted, {name: b.detach().clone() for name, b in module.named_buffers()}
    assert best is not None, "the last epoch is always estimated"
    module.eval()
    write_back(module, best[0].model.params, best[1] if model.features_of is None else None)
    return EvidenceTraining(best[0], evidences, losses)


def _epoch(
    module: nn.Module,
    model: Model,
    chosen: dict[str, nn.Parameter],
    data: Iterable,
    stepper: torch.optim.Optimizer,
    prior: dict[str, Tensor],
    scale: Tensor,
    means: dict[str, Tensor],
    count: int,
) -> float:
    """One pass of the optimizer over the data; returns the mean loss per datum."""
    total, parameters, likelihood = 0.0, list(chosen.values()), model.likelihood
    mean_scale = scale.log().mean().exp()
    if scale.ndim:  # outputs with noises of their own
        likelihood = likelihood.scaled(scale / mean_scale)
    for batch in map(model.how.read, data):
        outputs = _called(module, batch) if model.features_of is None else model.forward(chosen, batch)
        squares = torch.stack([d * (chosen[name] - means[name]).square().sum() for name, d in prior.items()]).sum()
        nll = likelihood.nll(outputs, batch[1]).mean()
        loss = nll + squares / (2 * count * mean_scale.to(squares))
        for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters, materialize_grads=True)):
            parameter.grad = slope
        stepper.step()
        total += loss.item() * batch_size(batch)
    stepper.zero_grad()
    return total / count


def _called(module: nn.Module, batch: Any) -> Tensor:
    """The module's outputs in the modes that its layers have, buffers and all."""
    arguments, keywords = arguments_of(module, batch_inputs(batch))
    return logits_of(module(*arguments, **keywords))


def _estimated(
    model: Model,
    data: Iterable,
    prior: dict[str, Tensor],
    scale: Tensor,
    tune_noise: bool,
    prior_structure: str | None,
) -> FittedLaplace:
    """The fit at the parameters, its prior and noise moved towards the best."""
    seen = model.run_over(map(model.how.read, data))
    require_finite(seen.precision.diag(), "train_by_evidence: the curvature")
    fixed = None if tune_noise else torch.ones_like(seen.log_likelihood)
    best, noise = tuned(model, seen, scale=fixed, prior_structure=prior_structure)
    nearer = {name: moved(now, best[name]) for name, now in prior.items()}
    return at(model, seen, nearer, moved(scale, noise))


def moved(now: Tensor, best: Tensor) -> Tensor:
    """``now`` moved towards ``best`` by a factor of e at most."""
    return now * (best / now).clamp(math.exp(-1), math.e)
