r"""Posteriors of this library as models of BoTorch, so that its acquisition functions optimise through them.

Needs the extra ``botorch``. BoTorch's torchvision tutorials are not needed, and torchvision is not installed.

A Gaussian over parameters is linearised. For q points X that are looked at jointly, with J the Jacobian at the posterior's mean
and Lambda its precision,

    f(X) ~ N( f(mean, X), K(X, X) ),    K(X, X') = J(X) Lambda^-1 J(X')^T.

Observations Y = f(X_c) + noise of covariance R condition these outputs exactly, whatever the structure of Lambda:

    K_c(X, X') = K(X, X') - K(X, X_c) (K(X_c, X_c) + R)^-1 K(X_c, X')
    f_c(X)     = f(X) + K(X, X_c) (K(X_c, X_c) + R)^-1 (Y - f(X_c)).

The linearisation stays where it was: with many observations, far from it, train and fit again.

As with every model of BoTorch, ``model.input_transform = Normalize(d)`` maps the inputs of all that is asked, and
``model.outcome_transform`` maps outcomes back to their units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from bayesopt_chain import checks

checks.installed("bayesopt_chain.botorch", "botorch", "botorch", "gpytorch")

import optree
import torch
from botorch.models.ensemble import EnsembleModel
from botorch.models.model import Model
from botorch.posteriors import GPyTorchPosterior, Posterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from bayesopt_chain.ensemble import Ensemble
from bayesopt_chain.posterior import FittedLaplace
from bayesopt_chain.posterior._linearized import jacobian
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.trees import Tree, flatten

__all__ = ["DrawsModel", "LinearizedModel"]

Forward = Callable[[Tree, Any], Tensor]


class LinearizedModel(Model):
    """A Gaussian posterior over a model's parameters as a model of BoTorch, by linearising the outputs.

    :meth:`of` makes one from :func:`bayesopt_chain.fit_laplace`; this constructor takes any Gaussian of the library, such as
    ``tx.posterior(state, params)`` of ``bc.vi``, ``bc.ekf``, ``bc.laplace`` or ``bc.swag``.

    Args:
        forward: ``forward(params, (x, None)) -> outputs [n, m]`` (or ``[n]``) for inputs ``[n, d]``; each datum's outputs
            depend on that datum alone.
        posterior: over its parameters.
        num_outputs: m. Default 1.
        noise: variance of Gaussian observation noise, in the targets' units squared: a number or ``[m]``. Default: ``None``,
            none that is known; then observations cannot be conditioned on or added.
        features: from inputs to the batch that ``forward`` takes. Default: ``(x, None)``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.botorch import LinearizedModel
        >>> _ = torch.manual_seed(0)
        >>> x = torch.rand(20, 2, dtype=torch.float64)
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double().eval()
        >>> fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(), [(x, x.sum(1, keepdim=True).sin())])
        >>> model = LinearizedModel.of(fitted)
        >>> model.posterior(torch.rand(5, 3, 2, dtype=torch.float64)).rsample(torch.Size([4])).shape
        torch.Size([4, 5, 3, 1])
    """

    outcome_transform: Any  # as BoTorch's models have it, where it was set

    def __init__(
        self,
        forward: Forward,
        posterior: Gaussian,
        *,
        num_outputs: int = 1,
        noise: float | Tensor | None = None,
        features: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        self._forward_of, self._gaussian, self._features = forward, posterior.factorised(), features
        self._noise = torch.tensor(noise, device="cpu") if isinstance(noise, (int, float)) else noise
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None  # inputs, targets and noise that it was conditioned on
        self._outputs = num_outputs

    @classmethod
    @checks.takes(
        fitted=checks.instance(FittedLaplace, "what bc.fit_laplace returned (of an ensemble call DrawsModel.of)")
    )
    def of(cls, fitted: FittedLaplace, *, num_outputs: int = 1) -> LinearizedModel:
        """The model of a fit, with the noise that it has.

        Args:
            fitted: from :func:`bayesopt_chain.fit_laplace`, of outputs ``[n, m]``. Of a likelihood that is not Gaussian the
                model is of the outputs, such as logits.
            num_outputs: m. Default 1.

        Returns:
            A :class:`LinearizedModel`.

        Raises:
            ValueError: a precision that is not positive definite.
        """

        def features(x: Tensor) -> Any:
            return fitted.model.seen_by_head((x.to(fitted.model.dtype), None))

        return cls(
            fitted.model.forward,
            fitted.posterior,
            num_outputs=num_outputs,
            noise=fitted.likelihood.noise_variance,
            features=features,
        )

    @property
    def batch_shape(self) -> torch.Size:
        """Of the observations that the model was conditioned on; empty before."""
        return torch.Size() if self._seen is None else self._seen[1].shape[:-2]

    @property
    def num_outputs(self) -> int:
        """m, as the model was told."""
        return self._outputs

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Posterior:
        """The joint Gaussian of the outputs at points that belong together.

        Args:
            X: ``[*b, q, d]``.
            output_indices: all m, which the posterior is of, or ``None``; others are refused.
            observation_noise: whether to add the noise; or its variances, ``[*, m]``.
            posterior_transform: of BoTorch, applied last.

        Returns:
            A ``GPyTorchPosterior`` over ``[*b, q, m]``, differentiable in X.

        Raises:
            ValueError: noise where none is known; ``output_indices`` that leave some out.

        Example:
            >>> import torch
            >>> from bayesopt_chain.botorch import LinearizedModel
            >>> from bayesopt_chain.posterior.gaussian import Gaussian
            >>> from bayesopt_chain.precision import Diagonal
            >>> posterior = Gaussian(torch.ones(2, 1), Diagonal(torch.full((2, 1), 4.0), torch.tensor(1.0)))
            >>> model = LinearizedModel(lambda w, batch: batch[0] @ w, posterior)
            >>> model.posterior(torch.eye(2)[None]).variance
            tensor([[[0.2500],
                     [0.2500]]])
        """
        if output_indices not in (None, [*range(self._outputs)]):  # all m are what BoTorch's ModelList asks for
            raise ValueError(
                "LinearizedModel: output_indices cannot be chosen: take mean[..., k] of the posterior, or pass "
                "posterior_transform=ScalarizedPosteriorTransform(weights)"
            )
        self.eval()
        mean, covariance = self._conditioned(self.transform_inputs(X))
        if isinstance(observation_noise, Tensor) or observation_noise:
            noise = self._noise_like(mean, observation_noise)
            covariance = covariance + torch.diag_embed(noise.flatten(-2))
        if mean.shape[-1] == 1:
            distribution = MultivariateNormal(mean[..., 0], _jittered(covariance))
        else:
            distribution = MultitaskMultivariateNormal(mean, _jittered(covariance))
        posterior: Any = GPyTorchPosterior(distribution)
        if hasattr(self, "outcome_transform"):
            posterior = self.outcome_transform.untransform_posterior(posterior, X=X)
        return posterior if posterior_transform is None else posterior_transform(posterior)

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any) -> Model:
        """The linearised model given new observations, exactly; this one stays as it is.

        Args:
            X: ``[*b, n, d]``, untransformed.
            Y: ``[*f, *b, n, m]``: further leading axes are fantasies. In their own units, where there is an outcome transform.
            noise: variances, like Y, in the units of the model's outputs. Default: the model's.
            **kwargs: those of other models of BoTorch, which mean nothing here.

        Returns:
            A new :class:`LinearizedModel` with the batch shape of Y.

        Raises:
            ValueError: a model without noise.

        Example:
            >>> import torch
            >>> from bayesopt_chain.botorch import LinearizedModel
            >>> from bayesopt_chain.posterior.gaussian import Gaussian
            >>> from bayesopt_chain.precision import Diagonal
            >>> prior = Gaussian(torch.zeros(1, 1), Diagonal(torch.ones(1, 1), torch.tensor(1.0)))
            >>> model = LinearizedModel(lambda w, batch: batch[0] @ w, prior, noise=1.0)
            >>> model.condition_on_observations(torch.ones(1, 1), torch.full((1, 1), 4.0)).posterior(torch.ones(1, 1)).mean
            tensor([[2.]])
        """
        self.eval()
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y, X=X)
        lead = torch.broadcast_shapes(Y.shape[:-2], X.shape[:-2])
        Y = Y.expand(*lead, *Y.shape[-2:])
        variances = self._noise_like(Y, noise)
        inputs = self.transform_inputs(X).expand(*lead, *X.shape[-2:])
        if self._seen is not None:
            old = [x.expand(*lead, *x.shape[-2:]) for x in self._seen]
            inputs, Y, variances = (torch.cat([a, b], -2) for a, b in zip(old, (inputs, Y, variances)))
        new = copy.copy(self)
        new._modules = copy.copy(self._modules)  # so that a transform of one is not the other's
        new._seen = inputs, Y, variances
        return new

    def fantasize(self, X: Tensor, sampler: Any, observation_noise: Tensor | None = None, **kwargs: Any) -> Model:
        """The model given observations that it draws itself, as knowledge-gradient acquisition functions ask for.

        Args:
            X: ``[*b, n, d]``.
            sampler: of BoTorch; draws the fantasies.
            observation_noise: variances of the noise. Default: the model's.
            **kwargs: as for :meth:`condition_on_observations`.

        Returns:
            A new :class:`LinearizedModel` of batch shape ``[*sampler.sample_shape, *b]``.

        Raises:
            ValueError: a model without noise.
        """
        noisy = self.posterior(X, observation_noise=True if observation_noise is None else observation_noise)
        return self.condition_on_observations(X, sampler(noisy), noise=observation_noise, **kwargs)

    def _conditioned(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[*b, q, m]`` and covariance ``[*b, q m, q m]``, given what was observed."""
        if self._seen is None:
            mean, rows, solved = self._rows(X)
            return mean, rows @ solved.mT
        inputs, targets, noise = self._seen
        lead = torch.broadcast_shapes(X.shape[:-2], inputs.shape[:-2])
        both = torch.cat([x.expand(*lead, *x.shape[-2:]) for x in (inputs, X)], -2)
        mean, rows, solved = self._rows(both)
        n, m = inputs.shape[-2], mean.shape[-1]
        covariance = rows @ solved.mT
        old, cross, new = (
            covariance[..., : n * m, : n * m],
            covariance[..., n * m :, : n * m],
            covariance[..., n * m :, n * m :],
        )
        lower = torch.linalg.cholesky(old + torch.diag_embed(noise.flatten(-2).expand(*lead, n * m)))
        white = torch.linalg.solve_triangular(lower, cross.mT, upper=False)  # [*, n m, q m]
        gap = (targets - mean[..., :n, :]).flatten(-2)[..., None]
        pulled = torch.linalg.solve_triangular(lower, gap, upper=False)
        shift = (white.mT @ pulled)[..., 0].reshape(mean[..., n:, :].shape)
        return mean[..., n:, :] + shift, new - white.mT @ white

    def _rows(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean ``[*b, q, m]``, rows J and ``J Lambda^-1``, ``[*b, q m, P]``."""
        params = self._gaussian.mean
        flat = X.reshape(-1, X.shape[-1])
        batch = (flat, None) if self._features is None else self._features(flat)
        mean = self._forward_of(params, batch).to(X)
        found = 1 if mean.ndim == 1 else mean.shape[-1]
        if found != self._outputs:
            raise ValueError(f"LinearizedModel: the model has {found} outputs: pass num_outputs={found}")
        rows = jacobian(self._forward_of, params, batch)
        left = flatten(rows, params).to(X)
        right = flatten(self._gaussian.precision.solve(rows), params).to(X)
        shape = (*X.shape[:-2], X.shape[-2] * self._outputs, left.shape[1])
        return mean.reshape(*X.shape[:-1], self._outputs), left.reshape(shape), right.reshape(shape)

    def _noise_like(self, like: Tensor, given: Tensor | bool | None) -> Tensor:
        """The variances that are given, else those of the model, of the shape of ``like``."""
        noise = given if isinstance(given, Tensor) else self._noise
        if noise is None:
            raise ValueError("LinearizedModel: no observation noise is known: pass noise= (a variance) to the model")
        return noise.to(like).expand_as(like)


class DrawsModel(EnsembleModel):
    """Draws of a model's parameters, or an ensemble of networks, as a model of BoTorch.

    Args:
        forward: ``forward(params, (x, None)) -> outputs [n, m]`` (or ``[n]``) for inputs ``[n, d]``.
        draws: a tree of leaves ``[S, *leaf.shape]``: a chain's draws, members of an ensemble, or
            ``posterior.sample((S,))`` of any Gaussian.
        num_outputs: m. Default 1.
        weights: of the draws, ``[S]``. Default: equal.

    Raises:
        TypeError: draws that are no tree of tensors.
        ValueError: leaves that disagree on S, or weights of another number.

    Example:
        >>> import torch
        >>> from bayesopt_chain.botorch import DrawsModel
        >>> model = DrawsModel(lambda w, batch: batch[0] @ w, torch.tensor([[[1.0]], [[3.0]]]))
        >>> model.posterior(torch.ones(2, 1)).mean.flatten(), model.posterior(torch.ones(2, 1)).variance.flatten()
        (tensor([2., 2.]), tensor([2., 2.]))
    """

    @checks.takes(draws=checks.TREE._replace(words="a tree of tensors [S, *leaf.shape] (of bc.Draws draws.params)"))
    def __init__(
        self,
        forward: Forward,
        draws: Tree,
        *,
        num_outputs: int = 1,
        weights: Tensor | None = None,
    ) -> None:
        super().__init__(weights)
        lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in optree.tree_leaves(draws)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"DrawsModel: the draws' first axes have lengths {sorted(lengths)}: pass leaves [S, *leaf.shape]"
            )
        self._forward_of, self._draws, self._size = forward, draws, lengths.pop()
        if weights is not None and tuple(weights.shape) != (self._size,):  # one weight would count for each draw
            raise ValueError(
                f"DrawsModel: weights has shape {tuple(weights.shape)} for {self._size} draws: pass one for each"
            )
        self._num_outputs = num_outputs

    @classmethod
    @checks.takes(
        ensemble=checks.instance(
            Ensemble, "what bc.posterior_ensemble returned (of bc.fit_laplace call LinearizedModel.of)"
        )
    )
    def of(cls, ensemble: Ensemble, *, num_outputs: int = 1) -> DrawsModel:
        """The model of what :func:`bayesopt_chain.posterior_ensemble` returned, its draws with their weights.

        Args:
            ensemble: the networks, or draws of them.
            num_outputs: m. Default 1.

        Returns:
            A :class:`DrawsModel` of the networks' outputs, without the noise: as every ``EnsembleModel`` of BoTorch it ignores
            ``observation_noise=True``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> from bayesopt_chain.botorch import DrawsModel
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> cheap = {"members": 2, "steps": 100, "lr": 0.05, "progress": False}
            >>> ensemble = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), bc.likelihoods.gaussian(), **cheap)
            >>> model = DrawsModel.of(ensemble)
            >>> torch.allclose(model.posterior(x).mean, ensemble.predict(x).mean)
            True
        """
        forward = ensemble.members.still
        kept = {"params": ensemble.params, "buffers": ensemble.buffers}
        draws: Any = {k: {n: x.flatten(0, 1) for n, x in tree.items()} for k, tree in kept.items() if tree}

        def outputs(member: Any, batch: Any) -> Tensor:
            return forward.with_buffers(member["params"], batch, member.get("buffers", {}))[0]

        return cls(outputs, draws, num_outputs=num_outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """Empty: one ensemble."""
        return torch.Size()

    def forward(self, X: Tensor) -> Tensor:
        """The members' outputs.

        Args:
            X: ``[*b, q, d]``.

        Returns:
            ``[*b, S, q, m]``, in the dtype of X; networks compute in theirs.

        Raises:
            ValueError: another number of outputs than the model was told.
        """
        flat = X.reshape(-1, X.shape[-1]).to(optree.tree_leaves(self._draws)[0].dtype)
        members = [optree.tree_map(lambda leaf, s=s: leaf[s], self._draws) for s in range(self._size)]
        values = torch.stack([self._forward_of(member, (flat, None)) for member in members])
        found = 1 if values.ndim == 2 else values.shape[-1]
        if found != self._num_outputs:
            raise ValueError(f"DrawsModel: the model has {found} outputs: pass num_outputs={found}")
        return values.to(X).reshape(self._size, *X.shape[:-1], found).movedim(0, -3)


def _jittered(covariance: Tensor) -> Any:
    """The covariance, symmetric, with a diagonal of its own rounding error where points meet; linear_operator decomposes it
    when it is asked to, and adds more where that does not suffice."""
    covariance = (covariance + covariance.mT) / 2
    variance = covariance.diagonal(dim1=-2, dim2=-1).detach()
    added = 100 * torch.finfo(covariance.dtype).eps * variance.amax(-1, keepdim=True).clamp_min(1e-30)
    return to_linear_operator(covariance + torch.diag_embed(added.expand_as(variance)))
