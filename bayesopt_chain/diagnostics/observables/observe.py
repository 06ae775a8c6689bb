r"""``observe``: means and covariances of functions of the parameters along chains near a point, without keeping parameters.

    target           exp(-(L + s |theta - theta*|^2 / 2) / T),   T = 1 / (n beta)
    llc              (E[L] - L(theta*)) / T, the local learning coefficient (Lau et al., 2024)
    bif              dE[a_i] / dw_j = -beta Cov(a_i, l_j), the Bayesian influence of datum j with loss l_j (Kreer et al.,
                     2025)
    susceptibility   Cov_part(phi, L - l_x) + E_part[phi] (E_part - E_full)[L - l_x],  phi = L - L(theta*) (Baker et al.,
                     2025)

What a run says of itself, whether it is ground for an answer (``verdict``):

    beyond the limit      lr k / (2 (1 + mu)) >= 1 where a chain was seen
    too hot               the virial, or that of the stiffest directions, above its value by more than 5 % (10 %) and 3 errors;
                          or the virial by half, whatever its error, which chains that are thrown far have as large
    not spread            the virial, or that of a leaf, below its value by more than 5 % and 3 errors: flat directions are
                          still on their way
    drift                 the loss of the last third against the first, in errors of the difference: 4.5 or more
    disagreement          chains that differ by more than their own errors allow

The virial is necessary and not sufficient: it is right in one of several wells too. By leaf and by stiff directions it sees
what cancels in the sum.

**Local learning coefficient**: how fast the volume of parameters with almost the loss of ``theta*`` shrinks. With ``V(eps)``
the volume near ``theta*`` where ``L - L(theta*) < eps``, ``V ~ eps^lambda`` (Watanabe, 2009; locally: Lau et al., 2024), and

    lambda = (E[L] - L(theta*)) / T    under    exp(-(L + strength |theta - theta*|^2 / 2) / T).

A quadratic of curvatures ``k`` gives ``1/2 sum k / (k + strength)``: half the number of directions that are stiff against
the spring. ``|x|^p`` gives ``1/p`` for each dimension without a spring. A singular model has less than half its parameters.

What is measured, and what of it has to hold: :mod:`bayesopt_chain.diagnostics.observables.target`; the errors:
:mod:`bayesopt_chain.diagnostics.observables.sums`; the rate: :mod:`bayesopt_chain.diagnostics.observables.target`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.diagnostics.findings import Row, judged
from bayesopt_chain.diagnostics.gradient_noise import initialised_devices, require_mean
from bayesopt_chain.diagnostics.observables.sums import Estimate, Record, merged
from bayesopt_chain.diagnostics.observables.target import (
    Measured,
    Target,
    chosen,
    data_of,
    heat_of_noise,
    relaxation,
    restrict,
    steepest,
)
from bayesopt_chain.loop.capture.build import capture as record_step
from bayesopt_chain.loop.step import Step, make_step
from bayesopt_chain.modules import as_it_is
from bayesopt_chain.runs import files
from bayesopt_chain.runs.inference_data import inference_data
from bayesopt_chain.runs.run import Iteration, describe, difference
from bayesopt_chain.runs.sample import sample
from bayesopt_chain.trees import copied, paths

ALONE = 50_000  # free entries from which on a CPU runs one chain after the other, in its caches
LOOK = 10  # products of the Hessian in a look at the curvature on the way
DRIFT = 4.5  # errors
HELD = 2**25  # numbers of a chain's draws that are kept for covariances
RESERVED = ("loss", "virial", "virial by leaf", "virial of stiff", "virial of spring", "noise")


class Watch:
    """The callback that measures: its sums go into every checkpoint of the run.

    Args:
        measured: what is measured.
        record: the sums.
        burn_in, thinning: numbers of steps.
        batch: where the curvature is looked at.
        of: the observables, for their description.
    """

    def __init__(
        self, measured: Measured, record: Record, burn_in: int, thinning: int, batch: Any, of: Mapping[str, Any]
    ) -> None:
        self.measured, self.record, self.batch = measured, record, batch
        self.burn_in, self.thinning, self.step = burn_in, thinning, 0
        self.curvature, self.spent = 0.0, 0
        self.of = {
            name: {"of": describe(f), "shape": list(record.shapes[name]), "kept": name in record.traces}
            for name, f in of.items()
        }

    @property
    def is_due(self) -> bool:
        """Whether the next step starts from a draw."""
        behind = self.step - self.burn_in
        return behind >= 0 and behind % self.thinning == 0

    def seen(self, params: Any, grads: Any, batch: Any) -> dict[str, Tensor]:
        """What a step that starts from a draw sees."""
        draw = (self.step - self.burn_in) // self.thinning
        return self.measured(params, grads, batch, draw) if self.is_due else {}

    def __call__(self, it: Iteration) -> None:
        """Add what the step has seen; look at the curvature after 1, 4, 16, ... steps of measuring."""
        chains = self.measured.chains
        self.spent += chains
        if it.info.observed:
            self.record.add(self.measured.with_loss(it.info.observed, it.info.aux))
            self.spent += chains if self.measured.target.in_batches else 0
        self.step = it.step
        behind = it.step - self.burn_in
        if behind > 0 and behind.bit_count() == 1 and behind.bit_length() % 2:
            self.curvature = max(self.curvature, steepest(self.measured.stacked, it.params, self.batch, LOOK))
            self.spent += 2 * LOOK * chains

    def state_dict(self) -> dict[str, Any]:
        """Sums, and the number of the last step."""
        return {
            "step": self.step,
            "curvature": self.curvature,
            "spent": self.spent,
            "of": self.of,
            "record": self.record.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            ValueError: it is of other observables.
        """
        self.record.load_state_dict(state["record"])
        if wrong := difference(state["of"], self.of, "observable"):
            raise ValueError(
                f"observe: this path holds a run with another {wrong}; its sums cannot go on with it: give another path"
            )
        self.step, self.spent, self.curvature = state["step"], state["spent"], state["curvature"]


@dataclass(frozen=True)
class Interleaved(Step):
    """A step that is measured by ``watch`` where it starts from a draw; the other steps run as ``program``."""

    watch: Any = field(default=None, compare=False)
    program: Any = field(default=None, compare=False)

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Make the step, as ``Step`` does."""
        return (super().__call__ if self.watch.is_due else self.program)(params, state, batch)


@dataclass
class Observed:
    """What :func:`observe` returns.

    Attributes:
        temperature, strength: of the target, in units of the mean loss.
        n: the number of data; ``None`` where it is not known.
        free: the number of free entries, which is what the virial should be.
        chains: the number of chains.
        lr, momentum: of the chains.
        limit: the share of the stability limit that it is, at the steepest point where a chain was seen.
        reference: the loss at the start, over all data, each once.
        fall: by how much a step down the gradient from there lowers the loss at least, over ``temperature``.
        gradients: of one chain that were spent at most, pilots and looks at the curvature included.
        relaxation: steps in which a flat direction forgets where it was; infinite without a spring.
        heat: what independent batches with the noise that was seen on the way add to the learning coefficient, with its error.
        burn_in, thinning: numbers of steps.
        complete: whether the run reached its last step; ``why`` it did not.
        why: as said.
        record: the sums.
        leaves: the number of free entries of each parameter.
        stiff: the number of stiff directions whose virial is measured.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (w**2).sum() / 2
        >>> run = bc.observe(
        ...     loss, torch.zeros(4), None, {"w": lambda w: w}, temperature=0.1, strength=0.1, steps=400, burn_in=50
        ... )
        >>> run.mean("w").value.shape, run.covariance("w", "w").error.shape, run.traces["w"].shape
        (torch.Size([4]), torch.Size([4, 4]), torch.Size([8, 44, 4]))
        >>> run.bif("w", "w", n=10).value.shape
        torch.Size([4, 4])
        >>> run.llc(), run.to_arviz()  # doctest: +SKIP
    """

    temperature: float
    strength: float
    n: int | None
    free: int
    chains: int
    lr: float
    momentum: float
    limit: float
    reference: float
    fall: float
    gradients: int
    relaxation: float
    heat: Estimate
    burn_in: int
    thinning: int
    complete: bool
    why: str
    record: Record
    leaves: dict[str, int]
    stiff: int

    def mean(self, name: str) -> Estimate:
        """The mean of an observable.

        Args:
            name: one of those observed, or ``"loss"``, the mean loss, or ``"virial"``.

        Returns:
            An estimate of the observable's shape.
        """
        return self.record.mean(name)

    def covariance(self, a: str, b: str) -> Estimate:
        """The covariance of two observables over the target.

        Args:
            a, b: names of observables of which draws are kept, as of those in ``covariances``.

        Returns:
            An estimate of shape ``[*shape of a, *shape of b]``.
        """
        return self.record.covariance(a, b)

    @property
    def traces(self) -> dict[str, Tensor]:
        """The draws of the observables of which they are kept, by name: ``[chains, draws, *shape]``."""
        kept = {name: self.record.trace(name) for name in self.record.traces}
        return {name: x.reshape(*x.shape[:2], *self.record.shapes[name]) for name, x in kept.items()}

    def to_arviz(self) -> Any:
        """The traces for ArviZ (needs the extra ``diagnostics``).

        Returns:
            ``arviz.InferenceData``, or an ``xarray.DataTree`` since ArviZ 1, with dimensions chain and draw.
        """
        checks.installed("to_arviz", "diagnostics", "arviz", "xarray")
        return inference_data({name: x.transpose(0, 1) for name, x in self.traces.items()}, {}, None, self.chains)

    @checks.takes(n=checks.WHOLE)
    def bif(self, a: str, b: str, *, n: int | None = None) -> Estimate:
        """The Bayesian influence of training data: the change of the mean of ``a`` with the weight of each datum.

        Args:
            a: an observable, such as the losses of probes.
            b: an observable of the losses of training data, each by itself.
            n: the number of training data, of which ``beta = 1 / (n temperature)`` follows. Default: that of the batches.

        Returns:
            ``dE[a_i] / dw_j = -beta Cov(a_i, b_j)``: minus it is what leaving a datum out changes, to first order.

        Raises:
            ValueError: the number of data is not known.
        """
        n = self.n if n is None else n
        if n is None:
            raise ValueError("bif: the number of training data is not known from the batches; give n=")
        return self.covariance(a, b).scaled(-1 / (n * self.temperature))

    def llc(self) -> Estimate:
        """The local learning coefficient, ``(E[L] - L(start)) / T``, less the heat of the batches.

        Returns:
            An estimate of one number. Its error holds what may be missing because flat directions have not spread, and half
            of the share ``1 - 2 / p`` of the heat by which it is less where the loss is of degree ``p``, which the ratio of
            virial and loss tells. Check ``verdict`` beside it.

        Raises:
            ValueError: the run is no ground for an answer; the message says why, and what to change.
        """
        refused = [text for text in self.findings if text.startswith("refused")]
        if refused:
            raise ValueError("local learning coefficient: " + "; ".join(refused) + f" (lr={self.lr:.3g})")
        heat, heat_error, _ = map(float, self.heat)
        found = self.mean("loss").scaled(1 / self.temperature, -self.reference / self.temperature - heat)
        found = Estimate(*[x.reshape(()) for x in found])
        value = float(found.value)
        pull = float(self.mean("virial").value - self.mean("virial of spring").value)  # p times the loss
        less = min(1.0, abs(1 - 2 * value / pull)) / 2 if pull > 0 else 0.5
        error = math.hypot(float(found.error), self._spread(), less * heat, heat_error)
        found = found._replace(error=torch.full_like(found.error, error))
        if self.fall > 0.05 * abs(value) + 2 * error:
            refused.append(
                f"the start is no minimum: a step down its gradient lowers the loss by {self.fall:.3g} temperatures or more"
            )
        if value < -3 * error:
            refused.append(f"it comes out as {found}: the loss is lower where the chains went than at the start")
        if refused:
            raise ValueError("local learning coefficient: " + "; ".join(refused) + "; start where training has ended")
        return found

    def _spread(self) -> float:
        """How much of the learning coefficient may be missing, or too much, because chains have not spread yet.

        With ``f_t = exp(-2 t / relaxation)``, by which a direction that only the spring holds is short of its variance, the
        loss is ``a - A f_t``; ``A`` is that of least squares over block means of the loss, and ``A mean(f)`` is missing, or its
        error if that is larger. It counts as far as the virial is short of the number of free entries, in full from a tenth.
        """
        x = self.record.blocks("loss")[..., 0]  # [B, C]
        if len(x) < 4 or math.isinf(self.relaxation):
            return 0.0
        length = self.record.count * self.thinning / len(x)
        ends = self.burn_in + length * torch.arange(len(x) + 1, dtype=x.dtype, device=x.device)
        f = -(-2 * ends / self.relaxation).exp().diff() * self.relaxation / (2 * length)
        shape, error = f - f.mean(), float(self.mean("loss").error)
        slope = float(shape @ x.mean(1) / shape.square().sum())
        missing = float(f.mean()) * max(abs(slope), error / float(shape.square().mean().sqrt()))
        virial = self.mean("virial")
        short = max(0.0, 1 - float(virial.value) / self.free) + float(virial.error) / self.free
        return min(1.0, short / 0.1) * missing / self.temperature

    @property
    def findings(self) -> list[str]:
        """What is wrong or doubtful, in words; those that begin with ``"refused"`` leave no answer."""
        is_broken = not self.complete and "interrupted" not in self.why
        ended = [] if self.complete else ["refused: " * is_broken + f"the run has not ended: {self.why}"]
        if self.record.count < 2:
            return [*ended, "refused: there are no draws"]
        virial, stiff, leaves = (self.mean(name) for name in ("virial", "virial of stiff", "virial by leaf"))
        (ratio, error), (top, top_error) = (
            (float(x.value) / n, float(x.error) / n) for x, n in ((virial, self.free), (stiff, self.stiff))
        )
        if math.isnan(error) and math.isfinite(ratio):
            return [
                *ended,
                f"refused: {self.record.count} draws of one chain are too few to tell an error; run longer, or more chains, or "
                "take a smaller thinning",
            ]
        each = zip(self.leaves.items(), leaves.value.tolist(), leaves.error.tolist())
        m = SimpleNamespace(
            limit=self.limit, lower=0.1 * self.lr / max(self.limit, 1e-30), virial=virial, free=self.free, ratio=ratio,
            error=error, stiff=self.stiff, top=top, top_error=top_error, top_errors=2 * top_error,
            flat=next(((name, x, count) for (name, count), x, e in each if x < 0.9 * count - 4 * e), None),
            longer="it has no spring" if math.isinf(self.relaxation) else "a flat direction relaxes in "
            f"{_round(self.relaxation)} steps: run {_round(3 * self.relaxation)} or more, or take a stronger spring",
            drift=self.record.drift("loss"), agree=bool(self.mean("loss").agree),
        )  # fmt: skip
        return [*ended, *(found.says for found in judged(FINDINGS, m, set()))]

    @property
    def verdict(self) -> str:
        """What is wrong or doubtful, in words; ``"no objection"`` where nothing is."""
        return "; ".join(self.findings) or "no objection"

    def __str__(self) -> str:
        return (
            f"{self.chains} chains of {self.record.count} draws, {self.free} free entries, T={self.temperature:.3g}, "
            f"strength={self.strength:.3g}, lr={self.lr:.3g}: {self.verdict}"
        )


_FOUND = checks.Kind(
    lambda x: isinstance(x, Tensor) and not x.is_complex() and checks.is_finite(x),
    "a tensor of finite numbers",
    (Tensor,),
)


@checks.takes(
    batches=checks.BATCH_OR_BATCHES,
    of=checks.Kind(
        lambda x: isinstance(x, Mapping) and all(isinstance(name, str) and callable(f) for name, f in x.items()),
        "a dictionary of functions of the parameters, by names",
    ).or_none(),
    covariances=checks.Kind(
        lambda x: checks.SEQUENCE.fits(x) and all(isinstance(p, (tuple, list)) and len(p) == 2 for p in x),
        "a list of pairs of names",
    ),
    strength=checks.number("[0, inf)").or_none(),
    lr=checks.POSITIVE.or_none(),
    momentum=checks.number("[0, 1)").or_none(),
    kept=checks.SEQUENCE,
    path=checks.FOLDER.or_none(),
    at_once=checks.WHOLE.or_none(),
    capture=checks.BOOL,
)
def observe(
    loss: Callable[..., Any],
    params: Any,
    batches: Any,
    of: Mapping[str, Callable[[Any], Tensor]] | None = None,
    *,
    temperature: float | None = None,
    strength: float | None = None,
    covariances: Sequence[tuple[str, str]] = (),
    kept: Sequence[str] = (),
    where: Mapping[str, Tensor | None] | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    chains: int = 8,
    steps: int = 4000,
    burn_in: int = 1000,
    thinning: int = 8,
    at_once: int | None = None,
    capture: bool = False,
    seed: int = 0,
    path: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
) -> Observed:
    """Run chains held near ``params`` by a spring, and measure functions of the parameters along them.

    Args:
        loss: ``loss(params, batch)``, a mean over the batch, or ``(mean, aux)``. A prior in it counts as loss, in the
            learning coefficient too.
        params: a tree of tensors, where the spring is fixed. They are not changed, nor is any random state of torch.
        batches: all data as one batch; or ``bc.epochs(data, batch_size)``, whose rows each chain draws anew, independently, in
            whatever order they are given.
        of: functions of all parameters that return a tensor of any shape: the losses of probes, ``[m]``, those of tokens,
            ``[m, length]``. Default: none; ``"loss"`` and ``"virial"`` are always measured.
        temperature: ``1 / (n beta)`` for ``n`` data, in units of the mean loss. Default: Watanabe's ``log(n) / n``.
        strength: of the spring, ``s`` in ``s |theta - params|^2 / 2``, in units of the mean loss. Default:
            ``temperature``, by which the spring alone would allow each entry a standard deviation of 1. It never depends
            on ``params``.
        covariances: pairs of names of which the covariance is wanted, so that all draws of the two are kept.
        kept: names of further observables of which all draws are kept, as of all that have at most 16 entries.
        where: the free entries, as for :func:`bayesopt_chain.restrict`. Default: all.
        lr: learning rate. Default: a tenth of the stability limit where pilots go, or what the noise of the batches allows.
        momentum: of the chains. Default: .9, and up to .99 where the spring's directions would not spread in an eighth of
            the run otherwise; .9 with ``lr`` and minibatches.
        chains: their number.
        steps: of each chain, burn-in included.
        burn_in: first steps of which nothing is measured.
        thinning: steps from one draw to the next. Successive steps of a momentum chain know little that eight apart do not
            (2 % of the error at momentum .9); observables cost a forward pass each, and with minibatches a draw one gradient.
        at_once: how many chains run at once, by ``vmap``, a divisor of ``chains``. Default: all, and one after the other where
            a CPU is given more than 50,000 free entries.
        capture: compile the steps between draws (:func:`bayesopt_chain.capture`), once for all chains: on a CPU that takes half
            a minute or more, and a step then takes half to five sixths of its time. Rounding differs. Default: False.
        seed: of noise and batches.
        path: a directory, from which the run goes on bit for bit if it was interrupted, and with more ``steps`` is made
            longer. Another run there is refused.
        checkpoint_seconds: how often sums and chains are written.

    Returns:
        :class:`Observed`.

    Raises:
        TypeError: batches that come in one order only, such as a list or a DataLoader.
        ValueError: arguments that make no run; a loss or an observable that is NaN or infinite at ``params``; one that
            ``vmap`` refuses, unless ``at_once`` is 1; a rate beyond the stability limit; an observable called like one that is
            always measured, or a pair of unknown names; a path that holds another run.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(60, 2), torch.randn(60)
        >>> def losses(w, data):
        ...     return (data[0] @ w - data[1]).square() / 2
        >>> w = torch.linalg.lstsq(x, y).solution
        >>> run = bc.observe(
        ...     lambda w, data: losses(w, data).mean(), w, (x, y), {"train": lambda w: losses(w, (x, y))},
        ...     covariances=[("train", "train")], temperature=1 / 60, strength=0.0, steps=600, burn_in=100,
        ... )
        >>> run.bif("train", "train").value.shape, run.n, run.verdict
        (torch.Size([60, 60]), 60, 'no objection')
        >>> abs(run.llc().value - 2 / 2) < 0.2                 # half the number of parameters
        tensor(True)

        A spring of the strength .25 leaves ``1 / (1 + .25)`` of each of the fifty parameters that count:

        >>> def loss(w, batch):
        ...     return (w[:50] ** 2).sum() / 2
        >>> run = bc.observe(loss, torch.zeros(80), None, temperature=0.1, strength=0.25, steps=600, burn_in=200, chains=4)
        >>> abs(run.llc().value - 50 / (2 * 1.25)) < 2
        tensor(True)
    """
    of = dict(of or {})
    if steps < burn_in + thinning:
        raise ValueError(
            f"observe: steps={steps} ends before the first draw, after burn_in={burn_in} and thinning={thinning}"
        )
    known = sorted({*of, "loss", "virial"})
    wanted = [*(name for pair in covariances for name in pair), *kept]
    wrong = [name for name in of if name in RESERVED] + [name for name in wanted if name not in known]
    if wrong:
        raise ValueError(
            f"observe: {wrong[0]!r} is no name for an observable here; covariances and kept are of {known}, and names that are "
            f"always measured ({', '.join(RESERVED)}) are taken"
        )
    inner, centre, fill = (loss, copied(params), as_it_is) if where is None else restrict(loss, params, where)
    data, n = data_of(batches)
    is_default = temperature is None
    if temperature is None:
        if n is None or n < 2:
            raise ValueError("observe: the number of data is not known from the batches; give temperature=")
        temperature = math.log(n) / n
    strength = temperature if strength is None else strength
    target = Target(inner, centre, fill, data, temperature, strength, 0.0 if momentum is None else momentum, seed)
    on_cpu = all(x.device.type == "cpu" for x in target.leaves)
    width = at_once or (1 if on_cpu and target.free > ALONE else chains)
    if chains % width:
        raise ValueError(f"observe: at_once={width} does not divide chains={chains}")
    with torch.random.fork_rng(devices=initialised_devices()):
        if target.in_batches or is_default:  # a sum over all data may have a temperature of its own
            require_mean("observe", inner, centre, target.one_batch(1))
        torch.manual_seed(seed)
        reference, square = target.at_centre()
        if not math.isfinite(reference):
            raise ValueError(f"observe: the loss at params is {reference}: look for NaN in params and batches")
        target.require_one_loss()
        with torch.no_grad():
            shift = {name: f(fill(centre)) for name, f in of.items()}
        for name, x in shift.items():
            _FOUND(f"observe: of[{name!r}], at params,", x)
        held = sum(shift[name].numel() for name in {*wanted} & {*shift})
        if held * (steps - burn_in) > HELD * thinning:
            raise ValueError(
                f"observe: the draws of {held} entries that covariances need would take more than 256 MiB a chain; take "
                f"thinning={held * (steps - burn_in) // HELD + 1} or more, or observables of fewer entries"
            )
        if width > 1:
            target.require_mapped(width, of)
        settings = _settings(path, target, (width, max(40, burn_in // 4), steps - burn_in, lr, momentum))
        lr, momentum = float(settings["lr"]), float(settings["momentum"])
        program: Any = None
        target, stiff = replace(target, momentum=momentum), target.stiff_directions(1 if target.free > ALONE else 4)
        device = target.leaves[0].device
        sizes = dict.fromkeys(RESERVED, 1) | {"virial by leaf": len(target.leaves)}
        about = shift | {
            name: torch.zeros(size, dtype=torch.float64, device=device)
            for name, size in sizes.items()
            if target.in_batches or name != "noise"
        }
        about["loss"] += reference
        made = list[tuple[Watch, Any]]()
        for number in range(chains // width):
            record = Record(width, about, wanted)
            measured = Measured(target, width, of, stiff, reference, number)
            watch = Watch(measured, record, burn_in, thinning, target.one_batch(width), of)
            tx, start = target.chain(lr), target.start(width)
            step = replace(make_step(measured.stacked, tx, inplace=True, observe=watch.seen), loss=loss)
            if capture:
                program = program or record_step(
                    replace(step, observe=None), start, tx.init(start), target.one_batch(width)
                )
                step = Interleaved(**{**vars(step), "watch": watch, "program": program})
            folder = None if path is None else Path(path) / f"chains-{number * width}"
            drawn = sample(
                step, start, tx.init(start), target.course(width, number),
                steps=steps, thinning=min(16, steps), keep=False, callbacks=[watch], path=folder,
                seed=1_000_003 * seed + number, checkpoint_seconds=checkpoint_seconds,
            )  # fmt: skip
            made.append((watch, drawn))
            if not drawn.complete:
                break
    whole = [w for w, _ in made if w.record.count == made[0][0].record.count]
    curvature = max([settings["curvature"], *[w.curvature + strength for w, _ in made]])
    record, none = merged([w.record for w in whole]), torch.zeros(1, dtype=torch.float64, device=device)
    noise = record.mean("noise") if target.in_batches and record.count else Estimate(none, none, none == 0)
    return Observed(
        temperature=temperature,
        strength=strength,
        n=n,
        free=target.free,
        chains=len(whole) * width,
        lr=lr,
        momentum=momentum,
        limit=lr * curvature / (2 * (1 + momentum)),
        reference=reference,
        fall=square / (2 * settings["curvature"]) / temperature,
        gradients=settings["gradients"] + sum(w.spent for w, _ in made),
        relaxation=relaxation(lr, momentum, strength),
        heat=noise.scaled(heat_of_noise(lr, momentum, temperature)),
        burn_in=burn_in,
        thinning=thinning,
        complete=made[-1][1].complete,
        why=made[-1][1].why,
        record=record,
        leaves={name: x.numel() for name, x in zip(paths(target.centre), target.leaves)},
        stiff=len(stiff),
    )


def _settings(path: Any, target: Target, about: tuple[int, int, int, float | None, float | None]) -> dict[str, Any]:
    """The rate: as a run on disk has begun with, or chosen now."""
    file = None if path is None else Path(path) / "settings.json"
    if file is not None and file.exists():
        known = json.loads(file.read_text())
        if all(given in (None, known[name]) for name, given in zip(("lr", "momentum"), about[3:])):
            return known
    known = chosen(target, *about)
    if file is not None and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(file, [json.dumps(known).encode()])
    return known


@checks.takes(
    part=checks.instance(Observed, "a run of bc.observe"),
    full=checks.instance(Observed, "a run of bc.observe"),
)
def susceptibility(part: Observed, full: Observed, train: str, probe: str) -> Estimate:
    """The susceptibility of a part of the model to each probe (Baker et al., 2025).

    Args:
        part: a run that moves the part alone (``where=``), with the covariances ``(train, train)`` and ``(train, probe)``.
        full: a run that moves everything, with both observables, at the same temperature and strength.
        train: the name of the mean loss, one number.
        probe: the name of the losses of probes, ``[m]``.

    Returns:
        ``Cov(phi, L - l_x) + E[phi] (E[L - l_x] - E_full[L - l_x])`` with ``phi = L - L(start)``, ``[m]``. The derivative
        of the mean of ``phi`` with a weight that moves the data from ``L`` towards probe ``x`` is ``1 / temperature``
        times the first term. The errors of its terms are added as those of independent numbers.

    Raises:
        ValueError: runs of other targets; covariances that were not measured.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(p, batch):
        ...     return (p["a"] ** 2 + p["a"] * p["b"] + p["b"] ** 2) / 2
        >>> of = {"L": lambda p: loss(p, None), "probes": lambda p: torch.stack([p["a"] ** 2, p["b"] ** 2])}
        >>> about = dict(temperature=0.1, strength=1.0, steps=300, burn_in=50)
        >>> start = {"a": torch.tensor(0.0), "b": torch.tensor(0.0)}
        >>> part = bc.observe(loss, start, None, of, where={"a": None}, **about)
        >>> bc.diagnostics.susceptibility(part, bc.observe(loss, start, None, of, **about), "L", "probes").value.shape
        torch.Size([2])
    """
    if (part.temperature, part.strength) != (full.temperature, full.strength):
        raise ValueError("susceptibility: the two runs have another temperature or strength; give both the same")
    c, v = part.covariance(train, probe), part.covariance(train, train)
    means = [(run.mean(train), run.mean(probe)) for run in (part, full)]
    c, v = Estimate(*[x.reshape(-1) for x in c]), Estimate(*[x.reshape(()) for x in v])
    phi = means[0][0].value.reshape(()) - part.record.shift[train].reshape(())
    gap = (means[0][0].value - means[1][0].value).reshape(()) - (means[0][1].value - means[1][1].value).reshape(-1)
    square = v.error**2 + c.error**2 + (gap * means[0][0].error.reshape(())) ** 2
    square = square + phi**2 * sum(x.reshape(-1) ** 2 for pair in means for x in (pair[0].error, pair[1].error))
    return Estimate(v.value - c.value + phi * gap, square.sqrt(), c.agree & v.agree)


FINDINGS = (
    Row("limit", lambda m: not m.limit < 1,
        "refused: lr is {limit:.2f} of the stability limit where the loss is steepest on the way; take lr={lower:.2g}"),
    Row("hot", lambda m: not m.ratio < 1.05 + 3 * m.error,
        "refused: too hot, virial {virial} of {free}; take half the lr, or larger batches"),
    # chains that multiplicative noise throws far have errors as large as their virial
    Row("hot", lambda m: m.ratio > 1.5,
        "refused: too hot, or too short to tell it from chance, virial {virial} of {free}; run longer, or more chains, and "
        "where it stays take half the lr, or larger batches"),
    Row("hot", lambda m: m.top > 1.1 + 3 * m.top_error,
        "refused: the {stiff} stiffest directions are {top:.2f} times as hot as they should be (+- {top_errors:.2g}), which "
        "the others hide; take half the lr, or larger batches"),
    Row("spread", lambda m: m.ratio < 0.95 - 3 * m.error,
        "flat directions have not spread: virial {virial} of {free}; {longer}"),
    Row("spread", lambda m: m.flat,
        "flat directions of {flat[0]} have not spread: virial {flat[1]:.3g} of {flat[2]}; {longer}"),
    Row("short", lambda m: m.ratio == m.ratio and not m.error < 0.1,
        "too short to judge: virial {virial} of {free}; run longer, or more chains"),
    Row("drift", lambda m: abs(m.drift) > DRIFT,
        "refused: the loss still moves, {drift:+.1f} errors from the first to the last third; take a longer burn_in"),
    Row("apart", lambda m: not m.agree,
        "chains disagree by more than their own errors: the larger one is reported; run longer"),
)  # fmt: skip


def _round(steps: float) -> str:
    """A number of steps to two digits."""
    return f"{float(f'{steps:.2g}'):,.0f}"
