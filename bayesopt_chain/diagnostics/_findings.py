"""What draws alone can tell: whether they are finite, different, moving, at rest as a whole, and in agreement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.diagnostics._agreement import agreement, apart, drift
from bayesopt_chain.diagnostics._shared_noise import shared_noise
from bayesopt_chain.diagnostics.temperatures import names_of
from bayesopt_chain.trees import paths_of

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

DISAGREE = 1.05  # R-hat that disagreement must reach besides being no accident
STUCK = 0.05  # share of the other chains' variance below which a chain hardly moves
FEW = 4.0  # effective draws a chain below which a run is short
LARGE = 1.5  # R-hat from which that many of them do not tell agreement from chance:
UNTOLD = 8.0  # effective draws a chain
APART = 2.0  # standard deviations of the draws by which one chain must differ from the others besides being no accident
STILL = 1e-3  # probability of as many equal draws in a row, by how often a chain repeats itself otherwise
GROWTH = 10.0  # by how much the loss, over its spread at first, must have grown to call a run diverging
DRIFTED = 0.5  # standard deviations from the first to the last third that a drift must reach besides being no accident
FIRST = 10.0  # standard deviations above the later losses at which the first draws were made on the way there
MOST = 1000  # elements of all leaves together that agreement is judged on


class Finding(NamedTuple):
    """One fault of a run.

    Attributes:
        kind: diverged, nonfinite, scale, duplicate, dead, heated, together, prior, burn-in, cold, modes, mixing or short.
        says: what was seen, a sentence with its number.
        do: what to do about it, a sentence.
    """

    kind: str
    says: str
    do: str


# What costs most comes first: a run that has a fault above has no need of an answer below.
RANK = (
    "diverged",
    "nonfinite",
    "scale",
    "duplicate",
    "dead",
    "heated",
    "together",
    "prior",
    "burn-in",
    "cold",
    "modes",
    "mixing",
    "short",
)


def no_draws(draws: Draws) -> Finding:
    """The finding of a run without draws."""
    if "loss" in draws.why:
        return Finding(
            "diverged", f"The run has no draws: {draws.why}.", "Lower lr by ten, or look for NaN in the data."
        )
    return Finding("short", f"The run has no draws{': ' + draws.why if draws.why else ''}.", "Run longer.")


def losses_of(draws: Draws) -> Tensor | None:
    """The recorded losses, ``[draws, chains]`` in float64 on the CPU; ``None`` where none were."""
    try:
        x = draws.loss.double().cpu()
    except KeyError:
        return None
    return x[:, None] if x.ndim == 1 else x


def named(draws: Draws) -> Sequence[tuple[str, Tensor]]:
    """Every leaf with its path."""
    tree = draws.params
    leaves = optree.tree_leaves(tree, none_is_leaf=True)  # as the names count them
    return [(name, x) for name, x in zip(names_of(paths_of(tree)), leaves) if x is not None]


def broken(draws: Draws, losses: Tensor | None, numbers: dict[str, float]) -> list[Finding]:
    """Numbers that are not finite, and runs that ran away."""
    out: list[Finding] = []
    bad = [name for name, x in named(draws) if not bool(torch.isfinite(x).all())]
    if bad:
        out.append(
            Finding(
                "nonfinite",
                f"Draws of {', '.join(bad[:4])} hold NaN or infinity.",
                "bc.make_step(..., check_finite=True) names the step and leaf; bc.skip_nonfinite(tx) leaves bad batches out.",
            )
        )
    stopped = "the loss of" in draws.why
    if stopped and losses is not None and len(losses) >= 4 and not _exploded(losses):
        out.append(
            Finding(
                "nonfinite",
                f"The run stopped: {draws.why}, and nothing before it grew.",
                "Look for NaN in the data or the loss: bc.make_step(..., check_finite=True) names the step and leaf.",
            )
        )
    elif stopped or _grown(losses):
        says = draws.why if stopped else "the loss grows without end"
        out.append(
            Finding("diverged", f"The run diverged: {says}.", "Lower lr; bc.suggest_lr gives one that is stable.")
        )
    elif losses is not None and not bad and not bool(torch.isfinite(losses).all()):
        count = int((~torch.isfinite(losses)).any(1).sum())
        out.append(
            Finding(
                "nonfinite",
                f"The recorded losses of {count} of {len(losses)} draws are NaN or infinite, and the draws are finite.",
                "Look for NaN in the data or the loss: bc.make_step(..., check_finite=True) names the step and leaf.",
            )
        )
    if losses is not None:
        numbers["loss, last quarter"] = float(losses[-max(1, len(losses) // 4) :].mean())
    return out


def _exploded(losses: Tensor) -> bool:
    """Whether the last loss is many times what it was at first."""
    return float(losses[-1].abs().max()) > GROWTH * float(losses[: len(losses) // 4].abs().max())


def _grown(losses: Tensor | None) -> bool:
    """Whether the last losses are infinite, or the loss ends many times its first spread above where it began."""
    if losses is None:
        return False
    finite = torch.isfinite(losses).all(1)
    if not bool(finite[-2:].any()):
        return True
    losses = losses[finite]
    if len(losses) < 4:
        return False
    quarter = len(losses) // 4
    first, last = losses[:quarter], losses[-quarter:]
    spread = float(first.std()) if first.numel() > 1 else 0.0
    rises = float(last.min()) > float(first.max())
    return rises and float(last.mean() - first.mean()) > GROWTH * max(spread, 1e-3 * float(first.abs().mean()))


def duplicates(draws: Draws) -> list[Finding]:
    """Chains that are the same numbers: one seed given twice."""
    n = draws.chains or 1
    leaves = [x for _, x in named(draws)]
    for j in range(n):
        for i in range(j):
            if all(torch.equal(x[:, i], x[:, j]) for x in leaves) and any(bool((x != x[:1]).any()) for x in leaves):
                return [
                    Finding(
                        "duplicate",
                        f"Chains {i} and {j} are the same numbers, so that they count as one.",
                        "Give every chain its own key, as bc.parallel does; on ranks bc.distributed.generator(seed, chain=i).",
                    )
                ]
    return []


def together(values: Tensor, numbers: dict[str, float]) -> list[Finding]:
    """Chains that are not bitwise equal, but move by the same noise."""
    found = shared_noise(values)
    if found is None:
        return []
    (i, j), behind = found.chains, abs(found.lag)
    numbers["correlation of chains' noise"] = found.correlation
    lag = f", {behind} draw{'s' * (behind > 1)} apart" if behind else ""
    if found.is_same:
        return [
            Finding(
                "duplicate",
                f"Chains {i} and {j} move by the same noise (correlation {found.correlation:.3f} of what is new in each "
                f"draw{lag}): they count as one, and R-hat and effective draws mean nothing.",
                "Give every chain its own key, as bc.parallel does; one seed from several starts, or a copy, is one chain.",
            )
        ]
    return [
        Finding(
            "together",
            f"Chains {i} and {j} share noise: what is new in their draws has correlation {found.correlation:.2f}{lag}, so that "
            "effective draws are counted more than once.",
            "Give every chain its own key and, where the noise of minibatches is large, its own batches.",
        )
    ]


def immobile(draws: Draws, noiseless: Collection[str] = ()) -> list[Finding]:
    """Leaves whose draws are all one, and chains that hardly move or stop.

    Args:
        noiseless: names of leaves that the chain does not sample; they may stand still.
    """
    out: list[Finding] = []
    leaves = named(draws)
    still = still_leaves(draws)
    if missed := [name for name in still if name not in noiseless]:
        out.append(
            Finding(
                "dead",
                f"{', '.join(missed[:4])} did not move in {len(draws)} draws.",
                "It gets neither gradient nor noise: look at masks and partitions, lr, and bfloat16 parameters.",
            )
        )
    moving = [x.reshape(len(draws), draws.chains or 1, -1) for name, x in leaves if name not in still]
    if not moving or len(draws) < 8:
        return out
    if (draws.chains or 1) > 2:
        variance = torch.cat([x.double().var(0) for x in moving], 1)
        share = (variance / variance.median(0).values.clamp(min=1e-300)).median(1).values
        stuck = [i for i in range(len(share)) if float(share[i]) < STUCK]
        if stuck:
            out.append(
                Finding(
                    "dead",
                    f"Chain {stuck[0]} hardly moves: {float(share[stuck[0]]):.2g} of the variance of the others.",
                    "It sits in a narrow place, or lost its noise: look at its loss, and start it elsewhere.",
                )
            )
            return out
    same = torch.stack([(x[1:] == x[:-1]).all(-1) for x in moving]).all(0)  # [draws - 1, chains]
    for chain, repeats in enumerate(same.T.tolist()):
        longest = max(len(list(run)) if equal else 0 for equal, run in itertools.groupby(repeats))
        rest = len(repeats) - longest
        # the probability with which it repeats a draw otherwise, as chains do that reject proposals
        often = (sum(repeats) - longest + 1) / (rest + 2)
        if longest >= 2 and len(repeats) * often**longest < STILL:
            out.append(
                Finding(
                    "dead",
                    f"Chain {chain} stood still for {longest + 1} draws in a row, bit for bit.",
                    "It lost its noise, or its step was skipped: look at its gradients and at what was written at those steps.",
                )
            )
            break
    return out


def still_leaves(draws: Draws) -> list[str]:
    """Names of the leaves whose draws are all one."""
    return [name for name, x in named(draws) if len(x) > 1 and x.numel() and bool((x == x[:1]).all())]


def watched(draws: Draws, of: Callable[[Any], Tensor] | None) -> Tensor:
    """What must have mixed, ``[draws, chains, elements]``, without elements that never move."""
    n = draws.chains or 1
    if of is None:
        columns = [x.reshape(len(draws), n, -1) for _, x in named(draws)]
        stride = max(1, math.ceil(sum(x.shape[-1] for x in columns) / MOST))
        values = torch.cat([x[..., ::stride].double() for x in columns], -1)
    else:
        rows: list[Tensor] = []
        for draw in draws:
            each = [draw] if draws.chains is None else [optree.tree_map(lambda x, i=i: x[i], draw) for i in range(n)]
            found = [of(params) for params in each]
            if not all(isinstance(x, Tensor) for x in found):
                raise TypeError(f"doctor: of must return a tensor, got {type(found[0]).__name__}")
            rows.append(torch.stack([x.detach().reshape(-1) for x in found]))
        values = torch.stack(rows).double()
    return values[..., (values != values[:1]).any(0).any(0)].cpu()


def unmixed(
    values: Tensor, numbers: dict[str, float], traces: dict[str, Tensor], level: float, named_by_user: bool
) -> list[Finding]:
    """Chains that disagree with each other, or each with itself, by more than chance at this level."""
    if len(values) < 8:
        return [
            Finding("short", f"{len(values)} draws are too few to tell whether they mix.", "Run longer, or thin less.")
        ]
    if not values.shape[-1]:
        return []
    found = agreement(values)
    w, worst = found.worst, float(found.r_hat.max())
    chains = values.shape[1]
    traces["what mixed least"] = values[..., w]
    numbers["R-hat, worst"] = worst
    numbers["R-hat, probability"] = found.p_value
    numbers["effective draws, least"] = float(found.effective.min())
    few = float(found.effective.min()) < FEW * chains
    untold = torch.where(found.effective < UNTOLD * chains, found.r_hat, 0.0)
    if found.p_value < level and worst > DISAGREE:
        alone = [agreement(values[:, [c], w : w + 1]) for c in range(chains)]
        if chains > 1 and all(one.p_value >= level or float(one.r_hat) <= 1.1 for one in alone) and not few:
            weights = "" if named_by_user else " For a network pass of=predictions: its weights have many equal modes."
            return [
                Finding(
                    "modes",
                    f"The chains are in different modes: R-hat {worst:.2f} between them, and none within a chain.",
                    "Average predictions over all chains; or cross between modes: bc.samplers.cyclical, replica "
                    f"exchange.{weights}",
                )
            ]
        return [
            Finding(
                "mixing",
                f"The draws have not mixed: R-hat {worst:.2f}, by chance with probability {found.p_value:.1g}.",
                "Run longer, with a longer burn-in, a larger lr or momentum, or a preconditioner.",
            )
        ]
    if few:
        return [
            Finding(
                "short",
                f"The slowest number has about {float(found.effective.min()):.0f} independent draws.",
                "Run longer: means then have an error of a standard deviation over the root of that number.",
            )
        ]
    if len(values) >= 16 and float(untold.max()) > LARGE:
        count = float(found.effective[untold.argmax()])
        return [
            Finding(
                "mixing",
                f"The draws have not mixed: R-hat {float(untold.max()):.2f}, with about {count:.0f} independent draws, too few "
                "to tell it from chance.",
                "Run longer. Where a chain jumped once from one place to another, it has to jump many times.",
            )
        ]
    if alone := apart(values):
        numbers["chain furthest from the others, in deviations"] = alone.size
        if alone.p_value < level and alone.size > APART:
            return [
                Finding(
                    "modes",
                    f"Chain {alone.chain} is elsewhere: its mean lies {alone.size:.1f} standard deviations from that of the "
                    f"others, by chance with probability {alone.p_value:.1g}.",
                    "Look at its loss. If it is that of the others it is in another mode: average predictions over all chains.",
                )
            ]
    return []


def is_untold(numbers: dict[str, float]) -> bool:
    """Whether the draws have a large R-hat and so few independent draws that it may be chance."""
    few = UNTOLD * numbers["chains"]
    return numbers.get("R-hat, worst", 1.0) > LARGE and numbers["effective draws, least"] < few


def drifting(values: Tensor, numbers: dict[str, float], level: float, independent: bool) -> list[Finding]:
    """Chains that drift together, which R-hat with the autocorrelation of the same draws cannot tell from slow ones."""
    if len(values) < 12 or not values.shape[-1]:
        return []
    found = drift(values, independent=independent)
    size = float(found.size[found.worst])
    numbers["drift, first to last third"] = size
    numbers["drift, probability"] = found.p_value
    if found.p_value >= level or abs(size) <= DRIFTED:
        return []
    return [
        Finding(
            "mixing",
            f"The draws drift: from the first to the last third a number moves by {abs(size):.2f} standard deviations in "
            f"all chains alike, by chance with probability {found.p_value:.1g}.",
            "Run longer, and lengthen burn_in until it stops; look whether lr, the temperature or the data change on the way.",
        )
    ]


class Trend(NamedTuple):
    """Whether the energy of the draws falls or rises, and what is reported of it."""

    findings: list[Finding]
    falls: bool


def unfinished(losses: Tensor | None, numbers: dict[str, float], level: float, independent: bool) -> Trend:
    """A loss whose first and last third differ, or whose first draws stand out: burn-in that was too short.

    The first draws (one, and the first 2, 5 and 10 %) are compared with the second half, in standard deviations of its mean
    over the chains. Losses of a posterior have exponential tails, so that 10 of these are exceeded by chance less than once
    in 1000 runs.
    """
    if losses is None or len(losses) < 12 or float(losses.std()) == 0.0:
        return Trend([], False)
    mean = losses.mean(1)
    later = mean[len(mean) // 2 :]
    spread = float(later.std().clamp(min=1e-6 * float(later.abs().mean()) + 1e-300))
    counts = sorted({max(1, len(mean) // share) for share in (len(mean), 50, 20, 10)})
    above = max((float(mean[:k].mean() - later.mean()) / spread for k in counts), key=abs)
    found = drift(losses[..., None], independent=independent)
    size = float(found.size[0])
    numbers["loss, first draws, in deviations"] = above
    numbers["loss, drift, probability"] = found.p_value
    do = "Lengthen burn_in until it does not; draws from before lie where the chain started, not where it samples."
    if found.p_value < level and abs(size) > DRIFTED:
        how = f"from the first to the last third it {'rises' if size > 0 else 'falls'} by {abs(size):.2f} standard deviations"
        says = f"The loss still moves: {how}, by chance with probability {found.p_value:.1g}."
        return Trend([Finding("burn-in", says, do)], size < 0)
    if above > FIRST:
        says = f"The loss falls at first: the first draws lie {above:.3g} standard deviations above those of the second half."
        return Trend([Finding("burn-in", says, "Lengthen burn_in: these draws lie where the chain started.")], True)
    return Trend([], False)
