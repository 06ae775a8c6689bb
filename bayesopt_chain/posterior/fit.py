r"""A Laplace posterior of a trained model in one call: curvature, prior, noise and predictions.

    fitted = bc.fit_laplace(module, bc.likelihoods.categorical(), loader)
    probabilities = fitted.predict(test_loader)

It puts together what can also be had one by one: :func:`bayesopt_chain.make_functional`, an estimator of
:mod:`bayesopt_chain.curvature`, :func:`bayesopt_chain.laplace`, :mod:`bayesopt_chain.posterior.evidence` and
:mod:`bayesopt_chain.posterior`. Of a linear last layer the features are computed once, and where the likelihood is Gaussian too
the model is linear in what is kept: evidence and mode are then exact, in float64 (:mod:`bayesopt_chain.posterior.regression`),
and the posterior's mean is that mode. (MacKay, 1992; Daxberger et al., "Laplace redux", 2021.)

**Training by the marginal likelihood** (:func:`train_by_evidence`): epochs of the log joint, and now and then the prior and the
noise by the evidence.

    theta    epochs of any optimizer on    L(theta) = mean nll + sum_l delta_l |theta_l - mu_l|^2 / (2 N s)
    h        log Z(delta, s) at theta is maximised (``evidence.py``); log delta and log s move towards it by at most 1

for N data, a prior of mean mu (0 by default) with one precision delta for each parameter tensor or one for all, and Gaussian
noise of variance ``variance / s`` (s = 1 for other likelihoods). L is the negative log joint over N s, so that a learning rate
keeps its meaning as the noise is found. The bound on the step keeps a poor first fit from choosing a prior that it never
leaves. Kept are the parameters with the highest evidence (Immer et al., 2021, "Scalable marginal likelihood estimation for
model selection in deep learning", algorithm 1).
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.batches import each_once
from bayesopt_chain.curvature import STRUCTURES
from bayesopt_chain.curvature._plan import batch_size, part, parts
from bayesopt_chain.likelihoods import Likelihood, Outputs, Predictive
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
from bayesopt_chain.posterior._linearized import by_target, functional_samples
from bayesopt_chain.posterior.evidence import (
    OF_PRIOR,
    Kept,
    by_dispersion,
    by_network_noise,
    by_output,
    data_for,
    require_prior_structure,
    spectra,
    tuned,
    within_budget,
)
from bayesopt_chain.posterior.export import LinearizedHead
from bayesopt_chain.posterior.gaussian import Gaussian, log_prior, posterior_of, require_finite
from bayesopt_chain.posterior.last_layer import Features, unwrapped, with_gradients
from bayesopt_chain.posterior.model import (
    ESTIMATORS,
    MANY,
    How,
    Model,
    Pass,
    asked,
    batches_of,
    both,
    linearized,
    make_model,
    matrix_size,
    with_estimator,
)
from bayesopt_chain.posterior.regression import LEAST, TINY, Regression
from bayesopt_chain.precision import Kronecker
from bayesopt_chain.trees import Tree, paths, require_like, size, spread, wide

# of the estimators of the curvature
OPTIONS = {name for estimator in ESTIMATORS.values() for name in inspect.signature(estimator).parameters} - {
    *("forward", "likelihood", "structure")
}
CANDIDATES = tuple(10.0**k for k in range(-4, 5))  # prior precisions that validation tries
FEW_DATA, LEAST_DATA, SMALL_WORK = 64, 4, 2**26
SCALE = checks.POSITIVES
DRAWS = 32  # of functions that held-out data are scored by, where a datum has many outputs
WORSE = 0.05  # nats a target, beside as much as the network has itself up to half a nat, at which predictions are much worse


@dataclass(frozen=True, repr=False)
class FittedLaplace:
    """What :func:`fit_laplace` returns.

    Attributes:
        posterior: the Gaussian over the kept parameters.
        prior_precision: in force, a tree of 0-d tensors like the kept parameters, or what was given.
        likelihood_scale: in force, 0-d: Gaussian noise has ``variance / likelihood_scale``, of a linear last layer with several
            outputs ``[E]``, one for each; of other likelihoods it is one over the dispersion, and multiplies the curvature.
        log_evidence: 0-d, in nats; NaN for a prior precision of 0. Of a likelihood without a noise scale it is that of the
            likelihood to the power ``likelihood_scale``.
        model: the pieces it was made from.
        seen: the data so far.
        covariance_scale: what the budget of the default allows of the covariance, up to 1 (``posterior/evidence.py``).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> module = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).eval()
        >>> fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(), [(x, torch.sin(3 * x))])

        The distribution of new targets, and draws of whole functions:

        >>> fitted.predictive(x).interval(0.9)[0].shape, fitted.functional_samples(x, samples=3).shape
        (torch.Size([20, 1]), torch.Size([3, 20, 1]))

        The evidence is at its maximum; further data sharpen the posterior at this prior and noise:

        >>> bool(fitted.log_evidence_at(1.0) < fitted.log_evidence)
        True
        >>> more = fitted.refit([(x, torch.sin(3 * x))])
        >>> bool((more.outputs(x).covariance < fitted.outputs(x).covariance).all())
        True

        The state without the module goes into a file, and back into a fit of the same module:

        >>> again = fitted.load_state_dict(more.state_dict())
        >>> torch.equal(again.predict(x, method="linearized").mean, more.predictive(x).mean)
        True

        Three lines say what was fitted, of which parameters:

        >>> bc.fit_laplace(module, bc.likelihoods.gaussian(0.5), [(x, torch.sin(3 * x))], tune=None)
        Laplace posterior of 9 parameters (2.bias, 2.weight), dense structure, ggn
        gaussian likelihood, noise variance 0.5, prior precision 1
        20 data, log evidence -19.1 nats
    """

    posterior: Gaussian
    prior_precision: Any
    likelihood_scale: Tensor
    log_evidence: Tensor
    model: Model
    seen: Pass
    covariance_scale: float = 1.0

    def __repr__(self) -> str:
        names, how = paths(self.model.params), self.model.how
        some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        fixed = f"; behind them {', '.join(self.model.fixed)} stay as they are" if self.model.fixed else ""
        sampled = f" from {how.options['samples']} sampled labels a datum" if "samples" in how.options else ""
        if "diagonal_above" in how.options:
            sampled += f", the factor of more than {how.options['diagonal_above']} outputs diagonal"
        variance = self.likelihood.noise_variance
        noise = f", dispersion {_range(1 / self.likelihood_scale)}, covariance times {self.covariance_scale:.4g}"
        noise = noise if variance is None else f", noise variance {_range(variance)}"
        return (
            f"Laplace posterior of {size(self.model.params)} parameters ({some}{fixed}), {how.structure} structure, "
            f"{how.curvature}{sampled}\n"
            f"{self.likelihood.name} likelihood{noise}, prior precision {_range(self.prior_precision)}\n"
            f"{self.seen.precision.count:.0f} data, log evidence {float(self.log_evidence):.4g} nats"
        )

    @checks.takes(data=checks.DATA, method=checks.TEXT)
    def predict(
        self,
        data: Any,
        *,
        method: Literal["sobol", "probit", "quadrature", "linearized"] | None = None,
    ) -> Tensor | Predictive:
        """Predictions for new inputs.

        Args:
            data: a tensor of inputs; one batch, a tuple ``(inputs, targets)`` or a mapping such as a tokenizer gives, whose
                labels are left out; or an iterable of batches or inputs such as a ``DataLoader`` or a list.
            method: "sobol" (the default for classes), "probit" (classes), "quadrature" (the default for yes-or-no
                and classes in order) turn the linearised outputs into means of the targets without chance; "linearized", the
                default for all other likelihoods, gives the whole predictive distribution.

        Returns:
            Means of the targets: probabilities ``[N, *, C]`` of classes, ``[N, *event]`` otherwise; for "linearized" a
            :class:`bayesopt_chain.likelihoods.Predictive` with mean, variance, quantiles, intervals, densities, scores and
            draws of new targets.

        Raises:
            ValueError: a method that the likelihood has no use for, or a likelihood without a known mean ("linearized" always
                works); a module that is in training mode by now.
        """
        likelihood = self.likelihood
        how = method or likelihood.default_method
        if how == "linearized":
            return self.predictive(data)

        def answer(batch: Any) -> Tensor:
            return likelihood.expected_mean(*linearized(self.model, self.posterior, batch), how)

        return torch.cat(asked(self.model, "FittedLaplace.predict", data, answer))

    @property
    def likelihood(self) -> Likelihood:
        """Of targets given outputs, with the noise in force."""
        own = self.model.likelihood
        return own.scaled(self.likelihood_scale) if own.has_noise_scale else own

    @checks.takes(data=checks.DATA, joint=checks.BOOL, prior_precision=checks.ANY, likelihood_scale=SCALE.or_none())
    def outputs(
        self, data: Any, *, joint: bool = False, prior_precision: Any = None, likelihood_scale: Any = None
    ) -> Outputs:
        """The model's outputs under the linearised posterior, with gradients.

        Args:
            data: as for :meth:`predict`. Where its tensors ask for gradients, or inside ``torch.func``, mean and covariance
                have gradients in them; so they have for the next two arguments.
            joint: whether the covariance is that of all data together; then data must be one batch. Default False.
            prior_precision: another one than that in force, a number or a tree as for :meth:`log_evidence_at`.
            likelihood_scale: likewise.

        Returns:
            :class:`Outputs`: mean ``[N, *event]``, covariance ``[N, E, E]``, or ``[N E, N E]`` where it is joint; of more than
            1,000 outputs of a linear last layer that are independent the variances alone, ``[N, E]``.

        Raises:
            ValueError: no batches; several where the covariance is to be joint.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> _ = torch.manual_seed(0)
            >>> module = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).eval()
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(), [(x, torch.sin(3 * x))])
            >>> new = torch.tensor([[0.5], [2.0]], requires_grad=True)
            >>> outputs = fitted.outputs(new, joint=True)
            >>> outputs.covariance.shape, torch.autograd.grad(outputs.covariance[1, 1], new)[0].shape
            (torch.Size([2, 2]), torch.Size([2, 1]))
        """
        fitted = self
        if prior_precision is not None or likelihood_scale is not None:
            prior = self.prior_precision if prior_precision is None else prior_precision
            fitted = self._under(prior, self.likelihood_scale if likelihood_scale is None else likelihood_scale)
        answer = partial(linearized, self.model, fitted.posterior, joint=joint)
        mean, covariance = zip(*asked(self.model, "FittedLaplace.outputs", data, answer, is_one=joint))
        return Outputs(torch.cat(mean), torch.cat(covariance))

    @checks.takes(data=checks.DATA)
    def functional_samples(self, data: Any, *, samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draws of whole functions from the linearised posterior, at new inputs.

        Args:
            data: one batch, as for :meth:`predict`.
            samples: how many functions. Default 100.
            generator: source of randomness; one of the same seed gives the same functions at other inputs, as Thompson
                sampling needs. Default: torch's global generator.

        Returns:
            Outputs ``[samples, N, *event]``, with gradients in the inputs that ask for them.

        Raises:
            ValueError: fewer than one sample; several batches.
        """
        answer = partial(functional_samples, self.model.forward, self.posterior, samples=samples, generator=generator)
        (drawn,) = asked(self.model, "FittedLaplace.functional_samples", data, answer, is_one=True)
        return drawn.to(self.model.dtype)

    @checks.takes(data=checks.DATA, joint=checks.BOOL)
    def predictive(self, data: Any, *, joint: bool = False) -> Predictive:
        """The predictive distribution of new targets, for any likelihood: ``predict(data, method="linearized")``.

        Args:
            data: as for :meth:`predict`.
            joint: whether draws and covariances are those of all data together; then data must be one batch. Default False.

        Returns:
            A :class:`bayesopt_chain.likelihoods.Predictive`.

        Raises:
            ValueError: as :meth:`outputs`.
        """
        return Predictive(self.likelihood, self.outputs(data, joint=joint))

    def module(self) -> LinearizedHead:
        """The predictions as an ordinary module, for ``torch.export`` and ONNX.

        Returns:
            A module that is called with the network's inputs (tensors, not batches) and returns mean and variance of the
            targets, as :meth:`predictive` has them: ``[N, *positions]``, noise included; of classes probabilities
            ``[N, *positions, C]`` and their variances. It holds a copy of the network.

        Raises:
            ValueError: a posterior over more than a linear last layer, or over one whose covariance does not fit.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> _ = torch.manual_seed(0)
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> network = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).eval()
            >>> fitted = bc.fit_laplace(network, bc.likelihoods.gaussian(), [(x, torch.sin(3 * x))])
            >>> program = torch.export.export(fitted.module(), (x,))
            >>> mean, variance = program.module()(x)
            >>> torch.allclose(variance, fitted.predictive(x).variance, rtol=1e-4)
            True
        """
        if not isinstance(self.model.features_of, Features):
            raise ValueError(
                "module: the posterior is over other parameters than a linear last layer, whose Jacobian an exported program "
                "does not have: fit with subset='last_layer', or export draws (bc.Draws.from_trees, then Draws.module)"
            )
        head: Any = self.model.forward
        return LinearizedHead(self.model.features_of, head, self.posterior, self.likelihood, self.model.dtype)

    @checks.takes(prior_precision=checks.ANY, likelihood_scale=SCALE)
    def log_evidence_at(self, prior_precision: Any, likelihood_scale: Any = 1.0) -> Tensor:
        """The log evidence under another prior and noise, for a search or a prior of your own.

        Args:
            prior_precision: a positive number, a 0-d tensor or a tree of them like the kept parameters.
            likelihood_scale: Gaussian noise of ``variance / likelihood_scale``, of a linear last layer also ``[E]``; of other
                likelihoods one over the dispersion. Default 1.

        Returns:
            0-d, in nats, differentiable in both.

        Raises:
            ValueError: a prior or a scale that is not positive.
        """
        return self._under(prior_precision, likelihood_scale).log_evidence

    def _under(self, prior_precision: Any, likelihood_scale: Any) -> FittedLaplace:
        """The fit under another prior and noise."""
        scale = torch.as_tensor(likelihood_scale, dtype=torch.float64, device=self.seen.log_likelihood.device)
        return at(self.model, self.seen, prior_precision, scale, self.covariance_scale)

    def state_dict(self) -> dict[str, Any]:
        """What the fit learned, as a tree of tensors: for ``bc.save``, or ``torch.save``. The module is not in it.

        Returns:
            A dictionary, which :meth:`load_state_dict` of a fit of the same module takes. (A fit can be pickled too, module and
            all, where its likelihood and its functions can.)
        """
        seen, (leaves, structure) = self.seen, optree.tree_flatten(self.model.params)
        of = self.model.likelihood
        numbers = [  # of a weighted likelihood those of the one inside
            torch.as_tensor(x, device="cpu").tolist()
            for x in optree.tree_leaves(cast(Any, vars(getattr(of, "inner", of))))
            if isinstance(x, (int, float, Tensor))
        ]
        prior = spread(self.prior_precision, self.model.params, "prior_precision")
        return {
            "params": self.model.params,
            "precision": seen.precision,
            "rows": seen.rows,
            "log_likelihood": seen.log_likelihood,
            "squares": seen.squares,
            "entries": seen.entries,
            # one form whatever the tuning, so that every fit of a module is a template for the state of another
            "prior_precision": structure.unflatten([d.to(wide(p.dtype)) for d, p in zip(prior, leaves)]),
            "likelihood": torch.tensor(zlib.crc32(f"{of.name} {numbers}".encode()), device="cpu"),
            "likelihood_scale": self.likelihood_scale,
            "covariance_scale": torch.tensor(self.covariance_scale, dtype=torch.float64, device="cpu"),
        }

    @checks.takes(state=checks.MAPPING)
    def load_state_dict(self, state: Mapping[str, Any]) -> FittedLaplace:
        """The fit with this state; this one, which says the module, subset, structure and likelihood, stays as it is.

        Args:
            state: of :meth:`state_dict`. A file is read by ``bc.load(path, like=fitted.state_dict())`` of any fit of the same
                module, structure and subset, such as one of a single batch with ``tune=None``.

        Returns:
            A new fit.

        Raises:
            ValueError: a state that lacks an entry, or is of another structure or likelihood, or over other parameters.
        """
        own = self.state_dict()
        missing = sorted(own.keys() - state.keys())
        if missing:
            raise ValueError(f"load_state_dict: the state has no {', '.join(missing)}: pass what state_dict returned")
        require_like(state["params"], self.model.params, "state['params']")
        model = replace(self.model, params=state["params"])
        names = ("precision", "rows", "log_likelihood", "squares", "entries")
        given, wanted = ([x[name] for name in names] for x in (state, own))
        is_like = optree.tree_structure(cast(Any, given)) == optree.tree_structure(cast(Any, wanted))
        if not is_like or int(state["likelihood"]) != int(own["likelihood"]):
            raise ValueError(
                f"load_state_dict: the state, whose precision is {type(state['precision']).__name__}, is of another structure "
                f"or likelihood than {self!r}"
            )
        seen, share = Pass(*given), float(state["covariance_scale"])
        return at(model, seen, state["prior_precision"], state["likelihood_scale"], share)

    @checks.takes(loader=checks.DATA)
    def refit(self, loader: Iterable, *, progress: bool = False) -> FittedLaplace:
        """The posterior of the data so far and new data, at the same parameters, prior and noise (online Laplace).

        Args:
            loader: the new data.
            progress: show a progress bar (needs tqdm).

        Returns:
            A new fit; this one stays as it is.
        """
        _, every, total = peeked(loader, read=self.model.how.read)
        new = self.model.run_over(every, progress, total)
        seen = both(self.seen, new)
        return at(self.model, seen, self.prior_precision, self.likelihood_scale, self.covariance_scale)


FITTED = checks.instance(FittedLaplace, "what bc.fit_laplace returned")


@checks.takes(fitted=FITTED, data=checks.DATA, at_once=checks.WHOLE)
def outputs_by_target(fitted: FittedLaplace, data: Any, *, at_once: int = 16) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the outputs of each target alone, in memory that does not grow with the square of the targets.

    Args:
        fitted: of ``bc.fit_laplace``, in any structure.
        data: inputs, as for ``fitted.predict``; a datum is taken at a time.
        at_once: targets in a block. Held at once are, beside the result, the gradients of ``at_once C`` outputs in the
            activations of one datum; of a last layer alone what it sees (of a convolution its unfolded input) and the
            Jacobian of ``64 at_once`` targets. Default 16.

    Returns:
        ``(mean [N, *positions, C], covariance [N, *positions, C, C])``, classes last wherever the model has them (variances
        ``[N, *positions, C]`` where :func:`linearized` gives no more); what
        :func:`softmax_mean` and ``fitted.likelihood.predictive`` of flattened targets take.

    Raises:
        ValueError: no data.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> module = torch.nn.Conv2d(1, 3, 3, padding=1).eval()
        >>> x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6, 4, 4))
        >>> fitted = bc.fit_laplace(module, bc.likelihoods.categorical(axis=-3), [(x, y)], tune=None)
        >>> mean, covariance = bc.posterior.outputs_by_target(fitted, x[:2])
        >>> mean.shape, covariance.shape
        (torch.Size([2, 4, 4, 3]), torch.Size([2, 4, 4, 3, 3]))
        >>> bc.posterior.softmax_mean(mean, covariance).shape
        torch.Size([2, 4, 4, 3])
    """
    model, posterior = fitted.model, fitted.posterior.factorised()

    def of_batch(batch: Any) -> list[Tensor]:
        each = [by_target(model.forward, posterior, datum, model.likelihood, at_once) for datum in parts(batch, 1)]
        return [torch.cat(x).to(model.dtype) for x in zip(*each)]

    means, covariances = zip(*asked(model, "outputs_by_target", data, of_batch))
    return torch.cat(means), torch.cat(covariances)


def _range(numbers: Any) -> str:
    """The least and the largest of a tree of numbers, or the one that there is."""
    leaves = optree.tree_leaves(numbers)
    every = torch.cat([torch.as_tensor(x, dtype=torch.float64, device="cpu").reshape(-1) for x in leaves])
    low, high = (f"{float(x):.4g}" for x in every.aminmax())
    return low if low == high else f"{low} to {high}"


def at(model: Model, seen: Pass, prior_precision: Any, scale: Tensor, share: float = 1.0) -> FittedLaplace:
    """The posterior of a pass over the data under a prior and a noise, its covariance times ``share``.

    Posterior and evidence are differentiable in the prior and the noise. A temperature changes the posterior alone.
    """
    summed, data, factor = seen.precision, seen.decomposed, scale
    if scale.ndim:
        roots = optree.tree_map(lambda p: scale.sqrt().to(p).reshape(-1, *[1] * (p.ndim - 1)), model.params)
        summed = data = by_output(summed, roots)
        factor = torch.ones_like(seen.log_likelihood)
    posterior = posterior_of(data, model.params, prior_precision=prior_precision, likelihood_scale=factor)
    if isinstance(summed, Kronecker):
        posterior = posterior._replace(undecomposed=summed.scale(factor).add_diagonal(prior_precision))
    of_prior = log_prior(posterior.mean, prior_precision, model.how.prior_mean).to(torch.float64)
    evidence = posterior.log_evidence(seen.log_likelihood_at(model, scale) + of_prior)
    if seen.regression is not None:
        mean, evidence = solved(model, seen.regression, prior_precision, scale)
        posterior = posterior._replace(mean=mean)
    heat = heat_of(model, seen, share)
    if heat != 1:
        posterior = posterior._replace(precision=posterior.precision.scale(1 / heat), undecomposed=())
    return FittedLaplace(posterior, prior_precision, scale, evidence, model, seen, share)


def heat_of(model: Model, seen: Pass, share: float) -> float:
    """What the covariance of Bayes' posterior is multiplied by."""
    temperature = model.how.temperature
    return share if temperature is None else temperature * float(seen.precision.count)


def solved(model: Model, regression: Regression, prior_precision: Any, scale: Tensor) -> tuple[Tree, Tensor]:
    """The mode of a linear last layer with Gaussian noise under a prior and a noise, and the log evidence there."""
    layer: Any = model.forward
    evidence, weight, bias = regression.solved(*model.prior_of_layer(prior_precision), scale)
    move: Any = {layer.weight: weight} if layer.bias is None else {layer.weight: weight, layer.bias: bias}
    return optree.tree_map(lambda x, m, p: m + x.to(p), move, model.prior_means(), model.params), evidence


@checks.takes(
    module_or_forward=checks.ANY,
    likelihood=checks.instance(
        Likelihood,
        "one of bc.likelihoods, called, such as bc.likelihoods.categorical(), or bc.likelihoods.custom(...) of a loss",
    ),
    loader=checks.BATCHES,
    params=checks.TREE,
    structure=checks.one_of(*STRUCTURES).or_none(),
    subset=checks.Kind(
        lambda x: not isinstance(x, (type, Tensor)) and not hasattr(x, "__array__"),
        "'all', 'last_layer', a list of names, or a function of a name",
    ),
    tune=checks.one_of("evidence", "validation").or_none(),
    tune_noise=checks.Kind(
        lambda x: isinstance(x, bool) or (isinstance(x, str) and x == "evidence"), "a bool or 'evidence'"
    ),
    prior_precision=checks.ANY,
    prior_structure=OF_PRIOR,
    validation=checks.BATCHES,
    inputs=checks.INPUTS,
    outputs=checks.INPUTS,
    curvature=checks.one_of("default", *ESTIMATORS),
    prior_mean=checks.ANY,
)
def fit_laplace(
    module_or_forward: nn.Module | Callable[[Tree, Any], Tensor],
    likelihood: Likelihood,
    loader: Iterable,
    *,
    params: Tree | None = None,
    structure: str | None = None,
    subset: str | Sequence[str] | Callable[[str], bool] | Any = "last_layer",
    tune: Literal["evidence", "validation"] | None = "evidence",
    tune_noise: bool | Literal["evidence"] = True,
    prior_precision: Any = 1.0,
    prior_structure: Literal["scalar", "layerwise"] | None = None,
    validation: Iterable | None = None,
    inputs: str | Callable[[Any], Any] | None = None,
    outputs: str | Callable[[Any], Any] | None = None,
    curvature: Literal["default", "ggn", "fisher", "empirical_fisher"] = "default",
    prior_mean: Any = 0.0,
    temperature: float | None = None,
    progress: bool = False,
    **options: Any,
) -> FittedLaplace:
    """The Laplace posterior of a trained model, its prior and noise tuned, ready to predict.

    Args:
        module_or_forward: a trained ``nn.Module`` in ``eval`` mode, or ``forward(params, batch) -> outputs [B, *event]``.
        likelihood: of :mod:`bayesopt_chain.likelihoods`. With ``gaussian()``, its variance is a start; the evidence tunes it.
        loader: an iterable of batches ``(inputs, targets)``, or of mappings with ``"labels"`` such as a tokenizer's, read
            once; or one such batch. Labels of a causal language model, which its own loss moves to the next token, are moved
            too (:func:`bayesopt_chain.posterior.next_labels`).
        params: the trained parameters; needed for a forward function, for a module its own by default.
        structure: of the posterior: "kronecker", "dense", "root", "diagonal" or "low_rank". Default: "dense" for a
            linear last layer with Gaussian noise of at most 2,048 parameters, "kronecker" otherwise; where that cannot
            describe a parameter (an orthogonal parametrization) "dense" up to 2,048 parameters, "diagonal" beyond. A linear
            layer's mode and evidence under Gaussian noise are exact in every structure (``regression.py``); "kronecker"
            and "diagonal" leave the covariance of weights and biases out of the predictions' variance. Of more than
            1,000 classes the Kronecker factor of a layer of as many outputs is its diagonal, which the ``repr`` of the fit
            says; ``diagonal_above=`` sets another bound.
        subset: which parameters are uncertain; all others are taken for known, at their trained values. "last_layer" (default)
            is, of a module, the layer whose output reaches the module's output last: a head, or several heads together if
            their outputs are put together; for a forward function, whose layers cannot be seen, say another. "all" is every
            parameter. Names choose those of ``module.named_parameters()``: ``["2.weight"]`` that one, ``["head"]`` everything
            under ``head``, ``["*.bias"]`` what matches; so does a function from a name to a boolean, or a tree of booleans
            like the parameters (:func:`bayesopt_chain.curvature.subset`). A list is always one of names, so that ``["all"]``
            is a parameter that is called ``all``. The ``repr`` of the fit says which parameters it has.
        tune: "evidence" (default) maximises the evidence over the prior precision; "validation" takes what predicts
            ``validation`` best: of Gaussian noise the variance, with the prior by the evidence at each, of other likelihoods
            the prior precision of ``10^-4 ... 10^4``; ``None`` keeps ``prior_precision``.
        tune_noise: how sure the likelihood is of targets. True (default) takes the noise of a linear last layer with Gaussian
            noise from the residuals and degrees of freedom of the whole network, and the dispersion of other likelihoods by
            turns with the prior, with a budget for what averaging may change (:mod:`bayesopt_chain.posterior.evidence`: a good
            network stays good). "evidence" maximises the evidence over Gaussian noise too, in the kept parameters alone, and
            takes other likelihoods at their word; False takes all at their word. Where other layers than a linear last one are
            kept, True is "evidence" for Gaussian noise, which is only as good as the structure: on a network of 2,701
            parameters with noise of variance 4e-4 (three seeds) "root" over all layers found 3.1e-4 to 4.8e-4, but "kronecker"
            over all layers 2.0e-3 to 2.4e-3 and "diagonal" 3.
        prior_precision: of a zero-mean Gaussian prior, per parameter: a positive number, or a tree for ``tune=None``. Where
            tuning by the evidence starts.
        prior_structure: for ``tune="evidence"``: "scalar" has one precision for all kept parameters, "layerwise" one for each
            tensor. Default: "scalar" where "dense" or "root" is asked for, "layerwise" otherwise.
        validation: an iterable of batches, for ``tune="validation"``, read once.
        inputs: from a batch ``(inputs, targets)`` to what a module is called with, as for
            :func:`bayesopt_chain.make_functional`. Default: the inputs; of a mapping all but its labels.
        outputs: from what a module returns to the outputs that the likelihood takes, or its key. Default: a tensor itself, of
            anything else its ``logits``.
        curvature: "ggn" (exact), "fisher" (at labels drawn from the model) or "empirical_fisher" (at those observed, which is
            the Fisher information of a model that is right alone), estimators of :mod:`bayesopt_chain.curvature`. Default:
            "ggn", and "fisher" where a datum has more than 1,000 outputs, as a sequence of tokens has, unless all that is kept
            is a linear last layer with Kronecker factors or a diagonal, where "ggn" costs no more; the ``repr`` of the fit says
            which. Of "fisher", ``samples`` labels are drawn for a datum from torch's global generator (or
            ``generator=``). Default: one; of "dense" and "root" as many as make four rows for each parameter.
        prior_mean: of the Gaussian prior: a number, or a tree like the kept parameters. Default 0.
        temperature: per datum, as everywhere: the covariance times ``temperature * N``, prior included; below ``1 / N`` it is a
            cold posterior. The evidence is Bayes' all the same. Default: Bayes, ``1 / N``.
        progress: show a progress bar (needs tqdm).
        **options: of the estimator, such as ``rank``.

    Returns:
        A :class:`FittedLaplace`, with ``predict``, ``posterior``, ``log_evidence`` and ``refit``. Where its predictions of
        training data are much worse than the network's own (an overfitted network's curvature says little), it warns.

    Raises:
        ValueError: arguments out of range or at odds; a module in training mode with layers that it changes; no batches; NaN.
        TypeError: neither a module nor a function.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
        >>> data = torch.utils.data.TensorDataset(torch.randn(60, 2), torch.randint(0, 3, (60,)))
        >>> fitted = bc.fit_laplace(module, bc.likelihoods.categorical(), torch.utils.data.DataLoader(data, 20))
        >>> fitted.predict(torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    checks.recording("fit_laplace")
    if isinstance(module_or_forward, torch.nn.Module) and not (params is None or isinstance(params, Mapping)):
        raise TypeError(
            f"fit_laplace: params of a module must be a dictionary by its parameters' names, got {checks.short(params)}"
        )
    if (tune == "validation") != (validation is not None):
        raise ValueError("fit_laplace: tune='validation' and validation= (a loader) go together")
    if tune is not None:
        checks.POSITIVE("fit_laplace: prior_precision", prior_precision)
    of_prior = None if tune is None else require_prior_structure("fit_laplace", prior_structure, structure)
    if prior_structure is not None and tune != "evidence":
        raise ValueError(
            f"fit_laplace: prior_structure={prior_structure!r} is for tune='evidence': leave it out with tune={tune!r}"
        )
    _require_options("fit_laplace", options, "subset=")
    read = Reader(module_or_forward)
    first, every, total = peeked(loader, read=read)
    how = How(likelihood, subset, structure, options, inputs, outputs, curvature, prior_mean, temperature, read)
    with checks.blaming("fit_laplace", "loader"):
        model = make_model(module_or_forward, params, first, how)
    require_finite(model.params, "fit_laplace: a parameter")
    model = with_estimator(model, first, (total or 1) * batch_size(first))
    keep = Kept(data_for(model)) if tune == "evidence" and tune_noise is True else None
    seen = model.run_over(every, progress, total, None if keep is None else keep.take)
    if not any(bool(leaf.any()) for leaf in optree.tree_leaves(seen.precision.diag())):
        if not seen.entries.any():
            raise ValueError("fit_laplace: every target is left out, by its label or its weight: pass some that count")
        raise ValueError(
            f"fit_laplace: the outputs do not depend on the kept parameters ({', '.join(paths(model.params)[:4])}), whose "
            "curvature is zero: pass subset= parameters that the outputs are computed with"
        )
    _warn_of_low_rank(model, float(seen.precision.count))
    tunes_noise = likelihood.has_noise_scale and bool(tune_noise)
    scale, share = None if tunes_noise else torch.ones_like(seen.entries), 1.0
    if tune is None:
        return at(model, seen, prior_precision, torch.ones_like(seen.entries))
    if tune == "validation":
        return _validated(model, seen, scale, validation, of_prior)
    if tunes_noise and seen.precision.count <= 1 and float(seen.entries.max()) <= 1:
        raise ValueError(
            "fit_laplace: one target does not tell noise from what the parameters explain: pass more data, or give the noise "
            "(likelihoods.gaussian(variance), tune_noise=False)"
        )
    is_dispersed = not likelihood.has_noise_scale and model.how.curvature != "empirical_fisher" and temperature is None
    if keep is not None and seen.regression is not None:
        best = by_network_noise(model, seen, keep.batches, of_prior)
        _warn_of_least_noise(seen.regression, best[1])
    elif keep is not None and is_dispersed:
        best = by_dispersion(model, seen, keep.scatter, float(prior_precision), of_prior)
        share = within_budget(model, at(model, seen, *best).posterior, keep.batches, seen)
    else:
        best = tuned(model, seen, scale=scale, start=float(prior_precision), prior_structure=of_prior)
    fitted = at(model, seen, *best, share)
    _warn_where_worse(fitted, first)
    return fitted


def _warn_of_least_noise(regression: Regression, scale: Tensor) -> None:
    if bool((1 / scale < 2 * regression.least_noise()).any()):
        checks.warn(
            f"fit_laplace: the features of the last layer explain the targets but for {LEAST:g} of their variance, the least "
            "that is taken for noise: give the noise (likelihoods.gaussian(variance), tune_noise=False) if it is known"
        )


def _warn_of_low_rank(model: Model, data: float) -> None:
    parameters, samples = matrix_size(model), model.how.options.get("samples", 1)
    if model.how.curvature != "ggn" and data * samples < parameters:
        checks.warn(
            f"fit_laplace: {data:.0f} data and {samples} labels for each make a curvature of rank {data * samples:.0f} at "
            f"most, of {parameters} parameters: the posterior is as wide as the prior in all other directions. Pass "
            f"curvature='ggn', which is exact, 'fisher' with "
            f"samples={math.ceil(parameters / data)} or more, or structure='kronecker'"
        )


def _warn_where_worse(fitted: FittedLaplace, batch: Any) -> None:
    """Compare the predictive density of some training data with the network's own, where that costs little."""
    some = fitted.model.seen_by_head(part(batch, 0, FEW_DATA))
    with torch.no_grad():
        outputs = with_gradients(fitted.model.forward)(fitted.model.params, some)
        entries = outputs.shape[1:].numel()
        data = min(len(outputs), SMALL_WORK // (entries * size(fitted.model.params)))
        if data < LEAST_DATA or entries > FEW_DATA:
            return
        some = part(some, 0, data)
        under = fitted.predictive([some]).log_prob(some[1]).mean().item()
        own = fitted.likelihood.log_prob(outputs[:data], fitted.likelihood.labels(some[1])).mean().item()
    if own - under > WORSE + min(0.5, abs(own)):
        checks.warn(
            f"fit_laplace: on training data the predictive density has a negative log-likelihood of {-under:.2f} a target, "
            f"the network itself {-own:.2f}: the posterior is far wider than the data ask for, as for an overfitted network or "
            "few data. Tune by held-out data (tune='validation'), set the prior (tune=None), or sample the network "
            "(bc.posterior_ensemble)"
        )


def _log_density(fitted: FittedLaplace, batch: Any, targets: Any) -> Tensor:
    """Summed over held-out targets, 0-d; where a datum's outputs are too many for their covariance, by draws of functions."""
    model = fitted.model
    with torch.no_grad():
        if with_gradients(model.forward)(model.params, part(batch, 0, 1)).numel() <= MANY:
            return fitted.predictive([batch]).log_prob(targets).sum()
        generator = torch.Generator(optree.tree_leaves(model.params)[0].device).manual_seed(0)
        drawn = fitted.functional_samples([batch], samples=DRAWS, generator=generator)
        return fitted.likelihood.mixture(drawn).log_prob(targets).sum()


def _validated(
    model: Model, seen: Pass, scale: Tensor | None, validation: Any, prior_structure: str | None
) -> FittedLaplace:
    """By held-out predictive density: Gaussian noise, with the prior by the evidence at each, or the prior alone."""
    held_out = [(model.seen_by_head(batch), batch[1]) for batch in batches_of(validation, model.how.read)]
    if not held_out or any(targets is None for _, targets in held_out):
        raise ValueError("fit_laplace: validation= must be batches (inputs, targets), at least one, each with targets")
    one = torch.ones_like(seen.entries)
    of_noise = scale is None and spectra(seen.decomposed) is not None

    def fitted(candidate: Any) -> FittedLaplace:
        if not of_noise:
            return at(model, seen, candidate, one)
        return at(model, seen, *tuned(model, seen, scale=one * candidate, prior_structure=prior_structure))

    inverse = seen.entries / seen.squares.clamp_min(TINY)
    candidates = [inverse * 10.0 ** (k / 4) for k in range(-8, 17)] if of_noise else CANDIDATES
    best, lowest, why = None, math.inf, "their losses are not finite"
    for candidate in candidates:
        try:
            found = fitted(candidate)
            loss = -float(torch.stack([_log_density(found, *batch) for batch in held_out]).sum())
        except ValueError as error:
            why = str(error)
            continue
        if loss < lowest:
            best, lowest = found, loss
    if best is None:
        raise ValueError(
            f"fit_laplace: with none of {len(candidates)} candidates has validation= a finite loss ({why}): check the data, or "
            "set the prior (tune=None)"
        )
    return best


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _require_options(who: str, options: dict[str, Any], chooser: str) -> None:
    if unknown := options.keys() - OPTIONS:
        raise TypeError(
            f"{who}: {', '.join(sorted(unknown))} is no argument of it, nor of its estimator of the curvature, whose are "
            f"{', '.join(sorted(OPTIONS))}; which parameters are uncertain says {chooser}"
        )


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
            is returned in ``eval`` mode with the parameters of the highest evidence. Parameters that ask for no gradients
            (``requires_grad_(False)``) stay, and are certain.
        likelihood: of :mod:`bayesopt_chain.likelihoods`. With ``gaussian()``, its variance is a start.
        loader: an iterable of batches ``(inputs, targets)`` that can be read again and again; or one such batch.
        optimizer: from a list of parameters to any ``torch.optim`` optimizer, without weight decay. Default: Adam, lr 1e-3.
        epochs: how many. Default 300.
        every: epochs between estimates of the evidence. Default 5.
        burn_in: epochs before the first one. Default 0.
        structure: of the posterior, as for :func:`bayesopt_chain.fit_laplace`; not "low_rank".
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
    _require_options("train_by_evidence", options, "requires_grad_(False) of the others")
    of_prior = require_prior_structure("train_by_evidence", prior_structure, structure)
    prior_mean = optree.tree_map(lambda m: m.detach().clone() if isinstance(m, Tensor) else m, prior_mean)
    how = How(likelihood, "all", structure, options, prior_mean=prior_mean, read=Reader(module))
    with in_mode(module, training=False):
        model = make_model(module, None, peeked(loader, "train_by_evidence", how.read)[0], how)
    means: Any = model.prior_means()
    forward: Any = model.forward
    count = sum(batch_size(batch) for batch in map(how.read, each_once(loader)))
    own = dict(module.named_parameters())
    chosen = {name: own[name] for name in model.params}
    if any(p.dtype == torch.float16 for p in chosen.values()):
        raise ValueError(
            "train_by_evidence: parameters are float16, in which an eps of Adam such as 1e-8 is 0 and squares end at 65,504: "
            "train float32 ones, under autocast if need be"
        )
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
        losses.append(_epoch(module, model, chosen, loader, stepper, prior, scale, means, count))
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"train_by_evidence: the loss is {losses[-1]} after epoch {epoch}: lower the learning rate"
            )
        if epoch != epochs and (epoch <= burn_in or (epoch - burn_in) % every):
            continue
        now = replace(model, params={name: p.detach().clone() for name, p in chosen.items()})
        forward.held = {name: b.detach().clone() for name, b in module.named_buffers()}
        with in_mode(module, training=False):
            fitted = _estimated(now, loader, prior, scale, tune_noise, of_prior)
        prior, scale = fitted.prior_precision, fitted.likelihood_scale
        evidences.append(fitted.log_evidence.item())
        if best is None or fitted.log_evidence > best[0].log_evidence:
            best = fitted, forward.held
    assert best is not None, "the last epoch is always estimated"
    forward.held = best[1]
    module.eval()
    write_back(module, best[0].model.params, forward.held)
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
    total, parameters = 0.0, list(chosen.values())
    for batch in map(model.how.read, data):
        squares = torch.stack([d * (chosen[name] - means[name]).square().sum() for name, d in prior.items()]).sum()
        nll = model.likelihood.nll(_called(module, batch), batch[1]).mean()
        loss = nll + squares / (2 * count * scale.to(squares))
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
    seen = model.run_over(map(model.how.read, each_once(data)))
    fixed = None if tune_noise else torch.ones_like(seen.log_likelihood)
    best, noise = tuned(model, seen, scale=fixed, prior_structure=prior_structure)
    nearer = {name: moved(now, best[name]) for name, now in prior.items()}
    return at(model, seen, nearer, moved(scale, noise))


def moved(now: Tensor, best: Tensor) -> Tensor:
    """``now`` moved towards ``best`` by a factor of e at most."""
    return now * (best / now).clamp(math.exp(-1), math.e)
