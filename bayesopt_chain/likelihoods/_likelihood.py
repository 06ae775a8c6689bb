"""What a likelihood knows about a model's outputs; everything that depends on which one it is stands in its class.

For the outputs f of one datum with target y and ``loss = -log p(y | f)``, the output factors S, with a leading axis K,
satisfy

    exact         sum_k s_k s_k^T = E_{y ~ p(. | f)} [ d^2 loss / df^2 ]     the Fisher information; the Hessian itself
                                                                             for canonical links
    Monte Carlo   s_k = K^-1/2 d loss(f, y_k) / df,  y_k ~ p(. | f)          the same in expectation
    empirical     s_1 = d loss(f, y) / df at the observed target             K = 1

Outputs have the shape ``[B, *event]``. A target is one observed value: a datum may have several, such as the tokens of a
sequence or the outputs of a regression, and they are independent given f. Targets have the shape ``[B, *positions]``, and
each has ``width`` outputs of its own. A target of weight w counts w times: its loss, the square of its factors and its share
of the evidence are multiplied by w, and with w = 0 its value is never read.

A new target at Gaussian outputs ``f ~ N(m, S)`` has the density ``E_f p(y | f)``, a mixture over nodes of f
(``_quadrature.py``, ``_predictive.py``).

Roots of the output Hessian, made on demand: a likelihood over many classes has more factors than memory.

For b data with outputs ``[b, *event]`` a root S has K columns a datum, s_kb, and answers without holding them all

    part(k0, k1)   the columns s_k, k0 <= k < k1       ``[k1 - k0, b, *event]``
    combine(w)     sum_k w_kb s_kb                     ``[b, *event]`` for weights ``[b, K]``
    diagonal()     sum_k s_kb^2                        ``[b, *event]``
    gram()         sum_kbt s_kbt s_kbt^T               ``[C, C]``, over all positions t too, where it is known in closed form

of softmaxes ``diag(sum_bt p_bt) - sum_bt p_bt p_bt^T``.

    Elementwise    s_k = scale_k e_k                               K = E, the number of entries of an event
    Softmax        s_k = d_k (e_k - sum_{j > k} p_j e_j / q_k)     K = E (C - 1) / C: one softmax of C classes a position
    Explicit       columns that are held                           K of them

    Weights r^2 of the data and their positions multiply each column by r.

with ``q_k = sum_{j > k} p_j`` and ``d_k^2 = p_k q_k / (p_k + q_k)``: the Cholesky factor of ``diag(p) - p p^T``, whose rank is
C - 1. The C columns ``sqrt(p_k) (e_k - p)`` are a root as well, and cost one more backward pass.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesopt_chain import checks
from bayesopt_chain.likelihoods._predictive import Outputs, Predictive
from bayesopt_chain.likelihoods._quadrature import FEW, normal_nodes
from bayesopt_chain.tracing import is_hidden, is_readable, is_transformed
from bayesopt_chain.trees import as_tensor, wide


@dataclass(frozen=True)
class OutputRoot(ABC):
    """A root S of the Hessian of the loss in the outputs, ``sum_k s_k s_k^T``, for a batch of b data.

    A subclass has :meth:`part` or :meth:`combine`, from which the other one follows.

    Attributes:
        values: what its columns are made of.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> root = bc.likelihoods.categorical().root(torch.zeros(1, 2), torch.tensor([0]))
        >>> root.columns, root.diagonal()
        (1, tensor([[0.2500, 0.2500]]))
    """

    values: Tensor
    separates_positions = False
    """Whether every column is zero outside of one position, an index of all event axes but the last."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """K, the number of columns of a datum."""

    def part(self, start: int, stop: int) -> Tensor:
        """Make some of the columns.

        Args:
            start: the first.
            stop: one behind the last.

        Returns:
            ``[stop - start, b, *event]``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.likelihoods.gaussian(0.25).root(torch.zeros(1, 2), torch.zeros(1, 2)).part(1, 2)
            tensor([[[0., 2.]]])
        """
        units = torch.zeros(stop - start, self.columns, dtype=self.values.dtype, device=self.values.device)
        units.diagonal(start).fill_(1)  # weights of one column each, the same for all data
        return self.combine(units[:, None])

    def combine(self, weights: Tensor) -> Tensor:
        """Add up the columns with weights, ``sum_k w_kb s_kb``, in closed form without holding them where there is one.

        Args:
            weights: ``[b, K]``.

        Returns:
            ``[b, *event]``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> root = bc.likelihoods.gaussian(0.25).root(torch.zeros(1, 2), torch.zeros(1, 2))
            >>> root.combine(torch.tensor([[1.0, -1.0]]))
            tensor([[ 2., -2.]])
        """
        return torch.einsum("bk,kb...->b...", weights, self.part(0, self.columns))

    def diagonal(self) -> Tensor:
        """The diagonal of ``S S^T``.

        Returns:
            ``[b, *event]``.
        """
        return self.part(0, self.columns).square().sum(0)

    def gram(self) -> Tensor:
        """The sum of ``S S^T`` over data and positions, of all outputs of a position.

        It is in closed form where :attr:`separates_positions`.

        Returns:
            ``[C, C]`` for outputs ``[b, *, C]``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.likelihoods.categorical().root(torch.zeros(3, 2), torch.tensor([0, 1, 1])).gram()
            tensor([[ 0.7500, -0.7500],
                    [-0.7500,  0.7500]])
        """
        rows = self.part(0, self.columns).flatten(0, -2)
        return rows.mT @ rows

    def scaled(self, scale: Tensor) -> OutputRoot:
        """The root of a weighted Hessian: its columns multiplied.

        Args:
            scale: the square roots of the weights, ``[b, *event]``, constant over the entries of one target.

        Returns:
            A new root.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> root = bc.likelihoods.gaussian(0.25).root(torch.zeros(1, 2), torch.zeros(1, 2))
            >>> root.scaled(torch.full((1, 2), 3.0)).diagonal()
            tensor([[36., 36.]])
        """
        return Explicit(self.part(0, self.columns) * scale)


@dataclass(frozen=True)
class Elementwise(OutputRoot):
    """The k-th column is ``values``, ``[b, *event]``, at the event's k-th entry and 0 elsewhere: independent outputs."""

    separates_positions = True

    @property
    def columns(self) -> int:
        return self.values.shape[1:].numel()

    def combine(self, weights: Tensor) -> Tensor:
        return self.values * weights.reshape(*weights.shape[:-1], *self.values.shape[1:])

    def diagonal(self) -> Tensor:
        return self.values.square()

    def gram(self) -> Tensor:
        return torch.diag(self.values.square().flatten(0, -2).sum(0))

    def scaled(self, scale: Tensor) -> OutputRoot:
        return Elementwise(self.values * scale)


@dataclass(frozen=True)
class Softmax(OutputRoot):
    """The Cholesky factor of ``diag(p) - p p^T`` at every position, times ``scale`` where there is one.

    ``values`` are p, ``[b, *, C]``, probabilities of at least two classes, and ``scale`` is like them, the same for all classes
    of a position; the outputs have their classes on ``axis``, counted from the end.
    """

    axis: int = -1
    scale: Tensor | None = None

    @property
    def separates_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.axis == -1

    @property
    def columns(self) -> int:
        return self.values.shape[1:-1].numel() * (self.values.shape[-1] - 1)

    def combine(self, weights: Tensor) -> Tensor:
        left = self.values.flip(-1).cumsum(-1).flip(-1)  # from class k on
        q, with_k = left[..., 1:], left[..., :-1]
        d = (self.values[..., :-1] * (q / torch.where(with_k > 0, with_k, 1))).sqrt()  # 0 where no probability is left
        d = d if self.scale is None else d * self.scale[..., :-1]
        weights = weights.reshape(*weights.shape[:-1], *d.shape[1:])
        own = pad(weights, (0, 1)) * pad(d, (0, 1))
        before = (pad(weights, (1, 0)) * pad(d / torch.where(q > 0, q, 1), (1, 0))).cumsum(-1)
        return torch.addcmul(own, self.values, before, value=-1).movedim(-1, self.axis)

    def diagonal(self) -> Tensor:
        return self._times(self._times(self.values * (1 - self.values))).movedim(-1, self.axis)

    def gram(self) -> Tensor:
        rows = self._times(self.values)
        return torch.diag(self._times(rows).flatten(0, -2).sum(0)) - rows.flatten(0, -2).mT @ rows.flatten(0, -2)

    def scaled(self, scale: Tensor) -> OutputRoot:
        return Softmax(self.values, self.axis, self._times(scale.movedim(self.axis, -1)))

    def _times(self, values: Tensor) -> Tensor:
        return values if self.scale is None else values * self.scale


@dataclass(frozen=True)
class Explicit(OutputRoot):
    """Columns that are held: ``values``, ``[K, b, *event]``."""

    @property
    def columns(self) -> int:
        return self.values.shape[0]

    def part(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]


class Support(NamedTuple):
    """Where targets lie: between ``low`` and ``high``, at integers alone if ``is_discrete``."""

    low: float
    high: float
    is_discrete: bool


REAL = Support(float("-inf"), float("inf"), False)
COUNTS = Support(0.0, float("inf"), True)


def _unmixed(log_prob: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``log_prob`` of a likelihood that refuses what broadcasting has made more targets of than there are outputs."""

    @functools.wraps(log_prob)
    def checked(self: Any, outputs: Tensor, targets: Any) -> Tensor:
        found = log_prob(self, outputs, targets)
        if found.numel() > outputs.numel() and isinstance(targets, Tensor):
            raise ValueError(
                f"log_prob: targets {tuple(targets.shape)} would be compared with outputs {tuple(outputs.shape)} of other "
                "data: reshape the targets, such as targets[:, None]"
            )
        return found

    return checked


class Likelihood(ABC):
    """A likelihood of targets given a model's outputs, ``[B, *event]``.

    A likelihood of your own is a subclass with ``name`` and ``log_prob``, and for predictions ``mean``, ``variance``,
    ``draw`` and ``cdf``; or it is made from a loss or a ``torch.distributions.Distribution`` by
    :func:`bayesopt_chain.likelihoods.custom`.

    Attributes:
        name: for messages; nothing depends on it.
        support: where targets lie, ``None`` for values without an order. Default: the real line.
        default_method: how :meth:`bayesopt_chain.posterior.FittedLaplace.predict` averages over outputs if nobody says: one of
            ``methods``, or "linearized", which gives the whole predictive distribution.
        has_classes: whether targets are classes without an order, or yes and no, whose uncertainty is an entropy.
        noise_variance: of Gaussian noise, a number or ``[*event]``, in squared units of the target; ``None`` for other
            likelihoods.
        methods: by their names the rules by which :meth:`expected_mean` works, the first by default: functions of a target's
            Gaussian outputs, mean ``[*, C]`` and covariance ``[*, C, C]``, or ``None`` for the mean of the predictive.

    Example:
        A likelihood of waiting times with rate ``exp(-f)``:

        >>> import torch
        >>> from bayesopt_chain.likelihoods import Likelihood
        >>> class Exponential(Likelihood):
        ...     name = "exponential"
        ...     def log_prob(self, outputs, targets):
        ...         return -outputs - targets * (-outputs).exp()
        ...     def information(self, outputs):
        ...         return torch.ones_like(outputs)
        ...     def mean(self, outputs):
        ...         return outputs.exp()
        ...     def variance(self, outputs):
        ...         return (2 * outputs).exp()
        >>> Exponential().nll(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]))
        tensor([1., 2.])
        >>> Exponential().predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.25)).mean  # exp(1/8)
        tensor([[1.1331]])
    """

    name: str = "custom"
    support: Support | None = REAL
    methods: Mapping[str, Callable[[Tensor, Tensor], Tensor] | None] = {"quadrature": None}
    default_method: str = "linearized"
    has_classes: bool = False
    noise_variance: Any = None

    # What a subclass says.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check what the methods of a likelihood are called with, a user's own too."""
        super().__init_subclass__(**kwargs)
        for name in vars(cls).keys() & {
            "log_prob",
            "mean",
            "variance",
            "draw",
            "cdf",
            "mixture",
            "predictive",
            "expected_mean",
        }:
            if inspect.isfunction(vars(cls)[name]):
                setattr(cls, name, checks.takes()(vars(cls)[name]))
        if inspect.isfunction(vars(cls).get("log_prob")):
            cls.log_prob = _unmixed(vars(cls)["log_prob"])

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Any) -> Tensor:
        """The log density of every target, in nats.

        Args:
            outputs: ``[*lead, B, *event]``.
            targets: ``[B, *positions]``, valid ones.

        Returns:
            ``[*lead, B, *positions]``.

        Raises:
            ValueError: targets that would be compared with outputs of other data, as ``[B]`` with ``[B, 1]``.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().log_prob(torch.zeros(1), torch.ones(1))
            tensor([-0.6931])
        """

    def grouping(self, event: torch.Size) -> Grouping:
        """Which outputs each target has.

        Args:
            event: the shape of one datum's outputs.

        Returns:
            A :class:`Grouping`. Default: one output a target, in order.

        Raises:
            ValueError: outputs of a shape that the likelihood does not take.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.categorical().grouping(torch.Size([7, 3]))[:2]  # seven tokens of three classes
            ((7,), 3)
        """
        return Grouping(tuple(event), 1)

    def information(self, outputs: Tensor) -> Tensor:
        """The Fisher information of one target in its one output; a subclass needs it unless it has :meth:`exact_root`.

        Args:
            outputs: ``[B, *event]``.

        Returns:
            ``[B, *event]``, the expected second derivative of the loss.

        Raises:
            NotImplementedError: a likelihood that has not said it.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.poisson().information(torch.zeros(1, 1))  # the rate
            tensor([[1.]])
        """
        raise NotImplementedError(f"the {self.name} likelihood has no information(outputs)")

    def exact_root(self, outputs: Tensor, labels: Any) -> OutputRoot:
        """A root of the expected Hessian of unweighted losses in the outputs.

        Args:
            outputs: ``[B, *event]``.
            labels: of :meth:`labels`, ``[B, *positions]``, or ``None`` where the Hessian does not depend on them.

        Returns:
            An :class:`OutputRoot` over ``[B, *event]``. Default: the square root of :meth:`information`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.poisson().exact_root(torch.zeros(1, 1), None).diagonal()
            tensor([[1.]])
        """
        return Elementwise(self.information(outputs).sqrt())

    def mean(self, outputs: Tensor) -> Tensor:
        """The mean of a target given its outputs, ``E[y | f]``: the inverse link.

        Args:
            outputs: ``[*lead, B, *event]``.

        Returns:
            ``[*lead, B, *positions]``; for classes their probabilities, ``[*lead, B, *positions, C]``.

        Raises:
            ValueError: a likelihood whose mean is not known.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().mean(torch.zeros(1))
            tensor([0.5000])
        """
        raise self._lacks("known mean", "mean")

    def variance(self, outputs: Tensor) -> Tensor:
        """The variance of a target given its outputs, ``Var[y | f]``, in squared units of the target.

        Args:
            outputs: ``[*lead, B, *event]``.

        Returns:
            Shaped like :meth:`mean`.

        Raises:
            ValueError: a likelihood whose variance is not known.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().variance(torch.zeros(1))
            tensor([0.2500])
        """
        raise self._lacks("known variance", "variance")

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Any:
        """Draw targets from the model.

        Args:
            outputs: ``[B, *event]``.
            generator: source of randomness. Default: torch's global generator.

        Returns:
            ``[B, *positions]``.

        Raises:
            ValueError: a likelihood that cannot draw.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().draw(torch.tensor([-100.0, 100.0]))
            tensor([0., 1.])
        """
        raise self._lacks("draws of labels", "draw")

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        """The distribution function of a target given its outputs, ``P(y <= value | f)``.

        Args:
            outputs: ``[*lead, B, *event]``.
            values: in the targets' units, shaped to broadcast to ``[*lead, B, *positions]``.

        Returns:
            Probabilities, shaped like the values broadcast to the targets.

        Raises:
            ValueError: a likelihood whose distribution function is not known, or whose targets have no order.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.gaussian(1.0).cdf(torch.zeros(1, 1), torch.tensor([[1.96]]))
            tensor([[0.9750]])
        """
        raise self._lacks("distribution function", "cdf")

    def support_at(self, outputs: Tensor) -> Support | None:
        """Where targets lie that have these outputs, all of them together.

        Args:
            outputs: ``[*lead, B, *event]``.

        Returns:
            By default :attr:`support`, whatever the outputs.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.custom(distribution=lambda f: torch.distributions.Exponential(f.exp())).support_at(torch.zeros(2))
            Support(low=0.0, high=inf, is_discrete=False)
        """
        return self.support

    def require_values(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise for targets of a value that they cannot have; called where values can be read.

        Args:
            outputs: ``[*lead, B, *event]``, of which one set is enough at which the value is possible.
            targets: of :meth:`labels`, ``[B, *positions]``. By default they must lie in :attr:`support`.

        Raises:
            ValueError: a value that no target can have.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.poisson().require_values(torch.zeros(2), torch.tensor([0.0, 2.0]))
        """
        support = self.support
        if support is None or targets.dtype == torch.bool or not targets.numel():
            return
        # NaN where an entry is; this takes a tenth of the time of a look at every one
        low, high = map(float, targets.detach().aminmax())
        is_within = support.low <= low and high <= support.high and math.isfinite(high - low)
        if is_within and not (support.is_discrete and bool((targets != targets.round()).any())):
            return
        wrong = ~((targets >= support.low) & (targets <= support.high) & targets.isfinite())
        if support.is_discrete:
            wrong = wrong | (targets != targets.round())
        within = f"{'whole ' * support.is_discrete}numbers from {support.low:g} to {support.high:g}"
        self._refuse(wrong, targets, {REAL: "finite numbers", COUNTS: "counts from 0"}.get(support, within))

    def weights(self, targets: Any) -> Tensor | None:
        """The weight of every target.

        Args:
            targets: as for :meth:`nll`.

        Returns:
            Numbers or booleans ``[B, *positions]``; ``None``, the default, where each counts once.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.categorical().weights(torch.tensor([1, -100]))
            tensor([ True, False])
        """
        return None

    def labels(self, targets: Any) -> Any:
        """The targets without their weights.

        Args:
            targets: as for :meth:`nll`.

        Returns:
            ``[B, *positions]``, those of weight 0 replaced by values that targets may have.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.categorical().labels(torch.tensor([1, -100]))
            tensor([1, 0])
        """
        return targets

    @property
    def has_noise_scale(self) -> bool:
        """Whether it has Gaussian noise of known variance, which :meth:`scaled` changes."""
        return self.noise_variance is not None

    def scaled(self, scale: Tensor | float) -> Likelihood:
        """The same likelihood with Gaussian noise of ``variance / scale``.

        Args:
            scale: a positive number or a 0-d tensor.

        Returns:
            A new likelihood.

        Raises:
            ValueError: a likelihood without Gaussian noise of known variance; see :attr:`has_noise_scale`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.gaussian(1.0).scaled(4.0).variance(torch.zeros(1, 1))
            tensor([[0.2500]])
        """
        raise ValueError(f"a {self.name} likelihood has no noise to scale: leave likelihood_scale at 1")

    def whitened(self, outputs: Tensor, targets: Any) -> Tensor:
        """Residuals in units of the noise, ``sqrt(w) (y - f) / sd``.

        Args:
            outputs: ``[B, *event]``.
            targets: as for :meth:`nll`.

        Returns:
            Shaped like the targets.

        Raises:
            ValueError: a likelihood without :attr:`has_noise_scale`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.gaussian(0.25).whitened(torch.zeros(1, 1), torch.ones(1, 1))
            tensor([[2.]])
        """
        if not self.has_noise_scale:
            raise ValueError(f"a {self.name} likelihood has no residuals in units of Gaussian noise")
        self.require(outputs, targets)
        residuals = (self.labels(targets) - outputs) * like(self.noise_variance, outputs).rsqrt()
        return self.counted(residuals, targets, power=0.5)

    # What follows.

    def counted(self, values: Tensor, targets: Any, power: float = 1.0) -> Tensor:
        """Values of every target times its weight, 0 where that is 0, whatever the value.

        Args:
            values: ``[B, *positions]``.
            targets: as for :meth:`nll`.
            power: of the weights, 0.5 for what is squared later. Default 1.

        Returns:
            Like the values.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.categorical().counted(torch.tensor([2.0, float("nan")]), torch.tensor([1, -100]))
            tensor([2., 0.])
        """
        weights = self.weights(targets)
        return values if weights is None else torch.where(weights != 0, values * weights.to(values.dtype) ** power, 0)

    def require(self, outputs: Tensor, targets: Any, *, wait: bool = False, draws: Tensor | None = None) -> None:
        """Raise for targets that the outputs or the likelihood cannot have.

        Args:
            outputs: ``[B, *event]``.
            targets: as for :meth:`nll`.
            wait: whether to look at values on a device that has to be waited for. Default: False, values are checked on the
                CPU alone.
            draws: of the outputs, ``[S, B, *event]``: a value is refused that is possible at none of them. Default: at
                ``outputs``.

        Raises:
            ValueError: another shape, an empty batch, or values such as NaN, -1 for a yes-or-no target or 3.5 for a count.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.categorical().require(torch.zeros(2, 3), torch.tensor([0, 2]))
        """
        if outputs.ndim == 0 or outputs.shape[0] == 0:
            raise ValueError(f"the {self.name} likelihood got outputs {tuple(outputs.shape)}: the batch is empty")
        labels, weights = self.labels(targets), self.weights(targets)
        if not isinstance(labels, Tensor):
            raise TypeError(f"the {self.name} likelihood got targets that are no tensor: {checks.short(labels)}")
        if labels.dtype == torch.bool and self.support is not None and not self.support.is_discrete:
            raise TypeError(
                f"the {self.name} likelihood got targets that are torch.bool: convert them (targets.float()), or pass "
                "likelihoods.bernoulli()"
            )
        wanted = (outputs.shape[0], *self.grouping(outputs.shape[1:]).positions)
        for what, value in (("targets", labels), ("weights", weights)):
            if isinstance(value, Tensor) and tuple(value.shape) != wanted:
                raise ValueError(
                    f"the {self.name} likelihood got {what} {tuple(value.shape)}, but the outputs ask for {wanted}: "
                    f"reshape the {what} (broadcasting would mix data)"
                    f"{', or take argmax(-1) of one-hot rows' if self.has_classes else ''}"
                )
        if is_readable(labels) or (wait and not is_hidden(labels)):
            self.require_values(outputs if draws is None else draws, labels)

    @checks.takes()
    def losses(self, outputs: Tensor, targets: Any) -> Tensor:
        """The weighted loss of every target; :meth:`nll` is its sum over a datum.

        Args:
            outputs: ``[B, *event]``.
            targets: as for :meth:`nll`.

        Returns:
            ``[B, *positions]``, in nats.

        Raises:
            ValueError: as :meth:`require`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.categorical().losses(torch.zeros(1, 2, 2), torch.tensor([[1, -100]]))
            tensor([[0.6931, 0.0000]])
        """
        self.require(outputs, targets)
        return self.counted(-self.log_prob(outputs, self.labels(targets)), targets)

    def nll(self, outputs: Tensor, targets: Any) -> Tensor:
        """The negative log-likelihood of each datum, ``[B]``, in nats, normalised: the sum over its targets.

        Args:
            outputs: ``[B, *event]``.
            targets: ``[B, *positions]``; with weights as the likelihood says.

        Returns:
            ``[B]``.

        Raises:
            ValueError: as :meth:`require`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().nll(torch.zeros(2), torch.tensor([0.0, 1.0]))
            tensor([0.6931, 0.6931])
        """
        losses = self.losses(outputs, targets)
        return losses.reshape(losses.shape[0], -1).sum(1)

    def root(self, outputs: Tensor, targets: Any) -> OutputRoot:
        """A root of the expected Hessian of :meth:`nll` in the outputs, its columns made on demand.

        Args:
            outputs: ``[B, *event]``.
            targets: as for :meth:`nll`; their values matter for weights, and for the Hessian of a custom loss. ``None`` will do
                where neither is.

        Returns:
            An :class:`OutputRoot`.

        Raises:
            ValueError: as :meth:`require`; a Hessian that is not positive semidefinite.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.categorical().root(torch.zeros(1, 2), torch.tensor([0])).diagonal()
            tensor([[0.2500, 0.2500]])
        """
        if targets is None:
            return self.exact_root(outputs, None)
        self.require(outputs, targets)
        return self._counted(self.exact_root(outputs, self.labels(targets)), outputs, targets)

    def factors(self, outputs: Tensor, targets: Any) -> Tensor:
        """Return all exact output factors at once.

        Args:
            outputs: ``[B, *event]``.
            targets: as for :meth:`nll`.

        Returns:
            S, ``[K, B, *event]``, with ``sum_k s_k s_k^T`` the expected Hessian of one datum's :meth:`nll`.

        Raises:
            ValueError: as :meth:`root`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.gaussian(0.25).factors(torch.zeros(2, 1), torch.zeros(2, 1)).flatten()
            tensor([2., 2.])
        """
        root = self.root(outputs, targets)
        return root.part(0, root.columns)

    def gradient(self, outputs: Tensor, targets: Any) -> Tensor:
        """The gradient of :meth:`nll` in the outputs: the empirical Fisher's single factor.

        Args:
            outputs: ``[B, *event]``.
            targets: as for :meth:`nll`.

        Returns:
            ``[B, *event]``.

        Raises:
            ValueError: as :meth:`require`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().gradient(torch.zeros(2), torch.tensor([0.0, 1.0]))
            tensor([ 0.5000, -0.5000])
        """
        return slope(lambda f: self.nll(f, targets).sum(), outputs)

    def sampled_factors(
        self, outputs: Tensor, targets: Any, samples: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return Monte Carlo Fisher factors, gradients at labels drawn from the model.

        Args:
            outputs: ``[B, *event]``.
            targets: as for :meth:`nll`; their weights matter, their values do not.
            samples: how many draws.
            generator: source of the draws. Default: torch's global generator.

        Returns:
            ``[samples, B, *event]``.

        Raises:
            ValueError: a custom likelihood that cannot draw.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().sampled_factors(torch.zeros(4), torch.zeros(4), samples=1).abs()
            tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
        """

        def loss(f: Tensor) -> Tensor:
            return -self.log_prob(f, self.draw(outputs, generator)).sum()

        factors = torch.stack([slope(loss, outputs) for _ in range(samples)]) / samples**0.5
        return self._counted(Explicit(factors), outputs, targets).part(0, samples)

    @checks.takes()
    def predictive(self, mean: Tensor, covariance: Tensor) -> Predictive:
        """The distribution of new targets at Gaussian outputs, target by target.

        Args:
            mean: of the outputs, ``[N, *event]``.
            covariance: of one datum's E outputs, ``[N, E, E]``, or joint over data, ``[N E, N E]``; variances of independent
                outputs ``[N, E]``.

        Returns:
            A :class:`Predictive`.

        Raises:
            ValueError: a covariance of another shape, or with negative variances.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> predictive = likelihoods.gaussian(0.5).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5))
            >>> predictive.variance, predictive.quantile(0.975)
            (tensor([[1.]]), tensor([[1.9600]]))
        """
        n, entries = mean.shape[:1].numel(), mean.shape[1:].numel()
        if covariance.shape not in ((n, entries, entries), (n * entries, n * entries), (n, entries)):
            raise ValueError(
                f"predictive: covariance has shape {tuple(covariance.shape)}, for a mean {tuple(mean.shape)} pass one of "
                f"{(n, entries, entries)}, {(n * entries, n * entries)} or {(n, entries)}"
            )
        self.grouping(mean.shape[1:])
        variance = Outputs(mean, covariance).variance.detach()
        # by more than rounding
        if is_readable(variance) and variance.numel() and bool(variance.min() < -1e-4 * variance.max().abs()):
            raise ValueError(
                f"predictive: a variance is negative ({variance.min().item():.3g}): pass a positive semidefinite covariance"
            )
        return Predictive(self, Outputs(mean, covariance))

    @checks.takes(
        outputs=checks.Kind(
            lambda x: checks.REALS.fits(x) and x.ndim > 1 and len(x) > 0,
            "a tensor [draws, N, *event] of at least one draw",
            (Tensor,),
        )
    )
    def mixture(self, outputs: Tensor, log_weights: Tensor | None = None) -> Predictive:
        """The distribution of new targets as a mixture over outputs, such as those of the draws of a run.

        Args:
            outputs: ``[S, N, *event]``, as ``draws.predict(..., reduce="stack")`` returns them.
            log_weights: ``[S]``, of which only differences matter. Default: all alike.

        Returns:
            A :class:`Predictive`.

        Raises:
            ValueError: no outputs on axis 0, or of a shape that the likelihood does not take; weights that are NaN, or not
                one for each draw.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> outputs = torch.tensor([-1.0, 1.0])[:, None, None]
            >>> likelihoods.gaussian(0.5).mixture(outputs).variance
            tensor([[1.5000]])
        """
        self.grouping(outputs.shape[2:])
        if log_weights is None:
            log_weights = outputs.new_zeros(len(outputs), dtype=wide(outputs.dtype))
        if log_weights.shape != outputs.shape[:1]:
            raise ValueError(
                f"mixture: log_weights must hold one number for each of {len(outputs)} draws, got shape "
                f"{tuple(log_weights.shape)}"
            )
        found = log_weights.log_softmax(0)
        if is_readable(found) and bool(found.isnan().any()):
            raise ValueError(
                "mixture: log_weights are NaN, or no draw has a weight: look at what they were computed from"
            )
        return Predictive(self, outputs, found)

    @checks.takes(draws=checks.BATCHES)
    def pooled(self, draws: Iterable[Tensor]) -> Predictive:
        """:meth:`mixture` over draws that come one after another.

        Classes on an axis of the outputs are added up as they come, so that no draw is kept, however many there are: the
        answer is that of :meth:`mixture` for each target, and no covariance is known between targets.

        Args:
            draws: outputs ``[N, *event]`` each.

        Returns:
            A :class:`Predictive`.

        Raises:
            TypeError: draws that are no tensors.
            ValueError: no draws, or draws of different shapes.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> p = likelihoods.categorical().pooled(torch.randn(3, 7) for _ in range(100))
            >>> p.outputs.shape, p.epistemic.shape
            (torch.Size([1, 3, 7]), torch.Size([3]))
        """
        return self.mixture(torch.stack([*alike(draws)]))

    def mixed(self, outputs: Outputs, points: int = FEW) -> Predictive:
        """The nodes that a :class:`Predictive` of Gaussian outputs asks; a likelihood with closed forms adds what it knows.

        Args:
            outputs: Gaussian outputs of data apart.
            points: of the rule over one output, odd. Default 129.

        Returns:
            A mixture: of one output a target over a quadrature, of several over a rule of their own.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> nodes = likelihoods.bernoulli().mixed(likelihoods.Outputs(torch.ones(1, 1), torch.full((1, 1), 0.25)))
            >>> nodes.outputs.shape, torch.tensordot(nodes.log_weights.exp(), nodes.outputs, 1)
            (torch.Size([129, 1, 1]), tensor([[1.]]))
        """
        event = outputs.mean.shape[1:]
        grouping = self.grouping(event)
        nodes, log_weights = normal_nodes(grouping.split(outputs.mean), grouping.blocks(outputs.covariance), points)
        of_rule = points if len(log_weights) == points else 0
        return Predictive(self, grouping.join(nodes, event), log_weights, points=of_rule)

    def log_prob_at_nodes(self, outputs: Tensor, targets: Any) -> Tensor:
        """:meth:`log_prob` of a mixture's nodes, ``[S, N, *event]``: at once, where the likelihood takes leading axes.

        Args:
            outputs: ``[S, N, *event]``.
            targets: as for :meth:`log_prob`.

        Returns:
            ``[S, N, *positions]``.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().log_prob_at_nodes(torch.zeros(2, 1), torch.ones(1)).shape
            torch.Size([2, 1])
        """
        return self.log_prob(outputs, targets)

    def widened(self, outputs: Tensor, factor: float) -> tuple[Likelihood, Tensor]:
        """A likelihood and outputs whose predictions are wider (``factor`` above 1) or narrower: noise of ``factor`` times the
        variance, or logits divided by ``factor``.

        Args:
            outputs: ``[*lead, B, *event]``.
            factor: positive.

        Returns:
            The likelihood, and the outputs to give to it.

        Raises:
            ValueError: a likelihood whose width its mean determines, such as that of counts; see :attr:`has_width`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> wider, logits = likelihoods.categorical().widened(torch.tensor([[2.0, 0.0]]), 2.0)
            >>> logits
            tensor([[1., 0.]])
        """
        if self.has_classes:
            return self, outputs / factor
        raise ValueError(f"a {self.name} likelihood has no width to change")

    @property
    def has_width(self) -> bool:
        """Whether :meth:`widened` works: it has a noise, or logits."""
        return self.has_classes or type(self).widened is not Likelihood.widened

    @checks.takes()
    def expected_mean(self, mean: Tensor, covariance: Tensor, method: str | None = None) -> Tensor:
        """``E[y]`` at Gaussian outputs: probabilities of classes, the mean of any other target.

        Args:
            mean: ``[N, *event]``.
            covariance: ``[N, E, E]``.
            method: one of ``methods``. Default: the first.

        Returns:
            Shaped like :meth:`mean` of the outputs.

        Raises:
            ValueError: another method.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.bernoulli().expected_mean(torch.zeros(1, 1), torch.ones(1, 1, 1))
            tensor([[0.5000]])
        """
        if method not in (None, *self.methods):
            raise ValueError(
                f"method={method!r} has no meaning for a {self.name} likelihood: use one of "
                f"{', '.join(map(repr, self.methods))}; the whole distribution is predictive(...), 'linearized' of a fit"
            )
        rule = self.methods[next(iter(self.methods)) if method is None else method]
        if rule is None:
            return self.predictive(mean, covariance).mean
        grouping = self.grouping(mean.shape[1:])
        return rule(grouping.split(mean), grouping.blocks(covariance))

    def _counted(self, root: OutputRoot, outputs: Tensor, targets: Any) -> OutputRoot:
        """A root of unweighted losses, its columns times the square roots of the targets' weights."""
        weights = self.weights(targets)
        if weights is None:
            return root
        return root.scaled(
            self.grouping(outputs.shape[1:]).over_outputs(weights.to(outputs.dtype).sqrt(), outputs.shape)
        )

    def _lacks(self, what: str, hook: str) -> ValueError:
        return ValueError(
            f"the {self.name} likelihood has no {what}: give it the method {hook}, or make it with "
            "likelihoods.custom(distribution=...)"
        )

    def _refuse(self, wrong: Tensor, targets: Tensor, what: str) -> None:
        if bool(wrong.any()):
            raise ValueError(
                f"the {self.name} likelihood got {int(wrong.sum())} of {targets.numel()} targets that are not {what}, such as "
                f"{targets[wrong][0].item():g}: convert them, or give those that are missing the weight 0 "
                "(likelihoods.weighted)"
            )


class Grouping(NamedTuple):
    """``positions``: the shape of one datum's targets; ``width``: how many outputs each has; ``order``: the entry of the
    event, flattened, of every output of every target in turn, ``[targets width]``, ``None`` where they stand in order."""

    positions: tuple[int, ...]
    width: int
    order: Tensor | None = None

    def split(self, outputs: Tensor) -> Tensor:
        """Gather the outputs of each target.

        Args:
            outputs: ``[B, *event]``.

        Returns:
            ``[B, *positions, width]``.

        Example:
            >>> import torch
            >>> from bayesopt_chain.likelihoods import Grouping
            >>> Grouping((2,), 2).split(torch.arange(4)[None])
            tensor([[[0, 1],
                     [2, 3]]])
        """
        flat = outputs if self.order is None else outputs.flatten(1)[:, self.order.to(outputs.device)]
        return flat.reshape(outputs.shape[0], *self.positions, self.width)

    def blocks(self, covariance: Tensor) -> Tensor:
        """The covariance of each target's own outputs.

        Args:
            covariance: of all E outputs of a datum, ``[N, E, E]``, or their variances, ``[N, E]``.

        Returns:
            ``[N, *positions, width, width]``; of variances ``[N, *positions, width]``.

        Example:
            >>> import torch
            >>> from bayesopt_chain.likelihoods import Grouping
            >>> Grouping((2,), 1).blocks(torch.tensor([[[1.0, 0.5], [0.5, 2.0]]])).flatten()
            tensor([1., 2.])
        """
        if covariance.ndim == 2:
            return self.split(covariance)
        if self.order is None and not self.positions:  # one target has all outputs
            return covariance
        own = self.split(torch.arange(covariance.shape[1], device=covariance.device)[None])[0]
        return covariance[:, own[..., :, None], own[..., None, :]]

    def join(self, groups: Tensor, event: Sequence[int]) -> Tensor:
        """Undo :meth:`split`, for any leading axes.

        Args:
            groups: ``[*lead, *positions, width]``.
            event: the shape of one datum's outputs.

        Returns:
            ``[*lead, *event]``.

        Example:
            >>> import torch
            >>> from bayesopt_chain.likelihoods import Grouping
            >>> Grouping((2,), 2).join(torch.tensor([[[0, 1], [2, 3]]]), (4,))
            tensor([[0, 1, 2, 3]])
        """
        lead = groups.shape[: groups.ndim - 1 - len(self.positions)]
        flat = groups.flatten(len(lead))
        flat = flat if self.order is None else flat[..., self.order.argsort().to(flat.device)]
        return flat.reshape(*lead, *event)

    def over_outputs(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Repeat a number of each target at each of its outputs.

        Args:
            values: ``[B, *positions]``.
            shape: of the outputs, ``[B, *event]``.

        Returns:
            ``[B, *event]``.

        Example:
            >>> import torch
            >>> from bayesopt_chain.likelihoods import Grouping
            >>> Grouping((2,), 2).over_outputs(torch.tensor([[5, 6]]), torch.Size([1, 4]))
            tensor([[5, 5, 6, 6]])
        """
        return self.join(values[..., None].expand(*values.shape, self.width), shape[1:])


def like(value: Any, outputs: Tensor) -> Tensor:
    """A number or tensor in the dtype of outputs, on their device."""
    return as_tensor(value, outputs.dtype, outputs.device)


def slope(total: Any, outputs: Tensor) -> Tensor:
    """The gradient of a sum of losses in the outputs."""
    if is_transformed():
        return torch.func.grad(total)(outputs)
    with torch.enable_grad():
        f = outputs.detach().requires_grad_()
        return torch.autograd.grad(total(f), f, materialize_grads=True)[0]


def alike(draws: Iterable[Tensor]) -> Iterator[Tensor]:
    """Draws one after another, each of them checked.

    Raises:
        ValueError: no draws, or draws of different shapes.
    """
    shapes = set[torch.Size]()
    for draw in draws:
        checks.REALS("pooled: draws", draw)
        shapes.add(draw.shape)
        if len(shapes) > 1:
            raise ValueError(
                f"pooled: draws must be outputs of one shape, got {' and '.join(map(str, map(tuple, shapes)))}"
            )
        yield draw
    if not shapes:
        raise ValueError("pooled: draws must be outputs of at least one draw, got none")
