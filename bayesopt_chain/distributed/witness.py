r"""A witness for ranks whose parameters are plain tensors: it refuses noise that is shared where it should not be.

Nothing in a plain tensor says whether it is a whole parameter, of which other ranks hold replicas, or a part of one. The noise
is a function of (key, leaf, element, step), so that five mistakes give wrong noise without any error:

    parts              FSDP1, ZeroRedundancyOptimizer, pipeline stages: other parameters under the same key and leaf
    drift              replicas that started differently or were fed different data: again other parameters under one key
    counts             replicas that made different numbers of steps (``DistributedDataParallel.join``)
    two keys           replicas that follow one averaged gradient (DistributedDataParallel), each with a key of its own
    one chain          replicas of which a run on disk keeps each as a chain of its own

At some steps each rank writes what it is about to do to the rendezvous store of the process group and reads what others wrote.
There is no collective and no rank waits for another. Every record lies under a name that is made of what it is about:

    key/<key>            {leaf and elements: (hash of the parameter's bits, steps that drew)} of the first rank that came
    gradient/<hash>      (key, hash of the parameters) of the first rank that came with these gradients

so that a rank reads one record for each key, whatever the number of ranks. Whoever finds a contradiction writes a refusal, and
every rank, the finder included, raises it at its next step. So no rank is left alone in a collective that the others make.
Gradients that are zero everywhere are equal without any average and count for nothing.

The steps are the first and the second, the 4th, 16th, 64th and so on after the start, a fork or a loaded state, whose cost
vanishes among the steps in between, and every so many where asked for. The second is the first at which an averaged gradient
can be told from equal starts. A start is also what somebody else wrote into the parameters between two steps, as
``DistributedDataParallel.join`` does at its end on every rank, unless it happens in every step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain.distributed.ranks import hash_of_bits
from bayesopt_chain.random.philox import Runs

_STEPS = frozenset([0, 1, *(4**i - 1 for i in range(1, 31))])
_made = 0  # witnesses in this process: ranks that run one program make them in one order

_SHARED = (
    "ranks {} and {} hold other values of {!r} under one key{}, so that they draw the same noise for it. Parts of one model "
    "(FSDP1, ZeroRedundancyOptimizer, pipeline stages): say of which by bc.distributed.part(model.named_parameters(), where), "
    "or take fully_shard. Replicas (DistributedDataParallel): start them alike and let them make the same steps (with uneven "
    "batches: Join([model, optimizer])). A chain on each rank: generator=bc.distributed.generator(seed, chain=rank)"
)
_COUNTS = (
    "ranks {} and {} are replicas that have drawn {} and {} times, and would draw other noise from now on. With batches that "
    "are uneven over ranks take Join([model, optimizer]) of torch.distributed.algorithms.join, which brings both to one state"
)
_TWO_KEYS = (
    "ranks {} and {} follow one averaged gradient with noise of two keys, and drift apart. Replicas under "
    "DistributedDataParallel are one chain: give every rank generator=bc.distributed.generator(seed), with one seed and one "
    "chain. For chains of their own leave DistributedDataParallel out"
)
_ONE_CHAIN = (
    "ranks {} and {} hold equal values of {!r} under one key, so that they run one chain, and this run would keep it as two. "
    "Replicas: give bc.optim.as_step the module under DistributedDataParallel, and its loss takes that. A chain on each rank: "
    "generator=bc.distributed.generator(seed, chain=rank), and no average over ranks in the loss or in hooks"
)


class Claim(NamedTuple):
    """A leaf that a rank is about to give noise to."""

    name: str
    key: int
    number: int
    runs: Runs | None  # the elements of the leaf that are here; None: all of them
    drawn: int  # by how many steps before
    param: Tensor
    gradient: Tensor | None  # dense; None where it is sparse or absent


class Witness:
    """Compare the claims of the ranks of the default process group for one optimizer.

    Args:
        who: what its refusals begin with.

    Attributes:
        every: also compare at every so many steps; ``None`` (default): not.
        first: whether to compare at the first two steps and at powers of four.
        apart: whether every rank's chain is kept as one of its own, so that replicas are refused.
    """

    def __init__(self, who: str) -> None:
        global _made
        self.who, self.first = who, True
        self.every: int | None = None
        self.apart = False
        self.number, _made = _made, _made + 1
        self.events = 0  # starts: the first, forks, loaded states
        self.steps = 0  # since the last of them
        self.version: int | None = (
            None  # of a parameter behind the last step; torch counts what is written into a tensor
        )
        self.written_to = False  # whether somebody else wrote into it before the last step
        self.met = False  # whether the last step compared, so that a refusal may be waiting
        self.refusal: str | None = None  # what was found; it holds until the next restart
        self.written: list[list[str]] = []  # names of this rank's records, of the last comparisons that were asked for

    def restart(self) -> None:
        """Compare at the next two steps again: the key, the state or the parameters were replaced."""
        self.events, self.steps, self.refusal = self.events + 1, 0, None

    def look(self, claims: Callable[[], list[Claim]], of: Tensor) -> None:
        """Compare the ranks if it is time, and raise what was found; called in front of every step that draws noise.

        Args:
            claims: gives the leaves that this step gives noise to; called only where they are compared.
            of: one of the parameters.

        Raises:
            ValueError: a rank found claims that contradict each other.
        """
        written_to = self.version is not None and of._version != self.version
        if written_to and not self.written_to:
            self.restart()
        self.written_to = written_to
        step, self.steps = self.steps, self.steps + 1
        due = (self.first and step in _STEPS) or (self.every is not None and step % self.every == 0)
        if not due and not self.met and self.refusal is None:
            return
        store = _store()
        if store is None:
            return
        try:
            self._meet(store, claims if due else None, step)
        except dist.DistError:  # the process that held the store has ended before this one
            self.first, self.every, due = False, None, False
        self.met = due
        if self.refusal is not None:
            raise ValueError(f"{self.who}: {self.refusal}")

    def stepped(self, of: Tensor) -> None:
        """Remember the version of a parameter, to notice who else writes into it; called behind every step that drew noise."""
        self.version = of._version

    def _meet(self, store: Any, claims: Callable[[], list[Claim]] | None, step: int) -> None:
        """Read the refusal that another rank may have written; without one, and if it is time, publish this rank's claims."""
        top = f"bayesopt_chain/witness/{self.number}/{self.events}"
        if self.refusal is None and self.met and store.check([f"{top}/refusal"]):
            self.refusal = store.get(f"{top}/refusal").decode()
        if self.refusal is not None or claims is None:
            return
        self.written.append([])
        found = self._contradiction(store, [c for c in claims() if c.param.numel()], f"{top}/{step}", step > 0)
        if found is not None:
            store.compare_set(f"{top}/refusal", "", found)
        if step in _STEPS:
            self.written.pop()  # these few stay, for ranks that come much later
        elif len(self.written) > 2:
            for name in self.written.pop(0):
                store.delete_key(name)

    def _contradiction(self, store: Any, claims: list[Claim], top: str, moved: bool) -> str | None:
        """Publish what this rank claims, and return what contradicts the claims that others have published, if anything.

        ``moved``: whether the noise moved the parameters before, so that averaged gradients differ from equal starts.
        """
        rank = dist.get_rank()
        bits = hashes([c.param for c in claims])
        said = None
        for key in dict.fromkeys(claim.key for claim in claims):
            mine = {_place(c): [*c.param.shape, b, c.drawn, c.name] for c, b in zip(claims, bits) if c.key == key}
            said = said or self._beside(store, f"{top}/key/{key}", mine, rank)
        gradients = [(c, c.gradient, b) for c, b in zip(claims, bits) if c.gradient is not None]
        nonzero = _read([g.any() for _, g, _ in gradients])
        pulled = [x for x, there in zip(gradients, nonzero) if there]
        if said is None and pulled and moved:
            name = _combined([(_place(c), b) for (c, _, _), b in zip(pulled, hashes([g for _, g, _ in pulled]))])
            mine = [rank, _combined([c.key for c, _, _ in pulled]), _combined([b for _, _, b in pulled])]
            other = self._first(store, f"{top}/gradient/{name}", mine)
            if other[1] != mine[1] and other[2] != mine[2]:
                return _TWO_KEYS.format(*sorted([rank, other[0]]))
        return said

    def _first(self, store: Any, name: str, mine: list[Any]) -> Any:
        """Publish ``mine`` under a name unless another rank was first, and return what the first rank published there."""
        there = json.loads(store.compare_set(name, "", json.dumps(mine)))
        if there[0] == mine[0]:
            self.written[-1].append(name)
        return there

    def _beside(self, store: Any, slot: str, mine: dict[str, list[Any]], rank: int) -> str | None:
        """Compare these leaves with those of the first rank with that key, and those that it does not have with the next's."""
        number = 0
        while mine:
            # whoever comes last sees both claims, and names the two ranks in the same order as any other would
            other, theirs = self._first(store, f"{slot}/{number}", [rank, mine])
            for place in mine.keys() & theirs.keys():
                *held, count, name = mine[place]
                *holds, counted, _ = theirs[place]
                (a, few), (b, many) = sorted([(rank, count), (other, counted)])
                if held != holds:
                    return _SHARED.format(a, b, name, f" after {few} and {many} draws" if few != many else "")
                if few != many:
                    return _COUNTS.format(a, b, few, many)
                if self.apart and other != rank:
                    return _ONE_CHAIN.format(a, b, name)
            mine = {place: value for place, value in mine.items() if place not in theirs}
            number += 1
        return None


def _place(claim: Claim) -> str:
    """The leaf and the elements of it: two ranks that name the same place draw the same numbers for it."""
    whole = claim.runs is None or claim.runs == ((0, claim.param.numel()),)
    return f"{claim.number:x}" if whole else f"{claim.number:x}:{_combined(claim.runs or ())}"


def _combined(values: Iterable[Any]) -> str:
    return hashlib.blake2b(json.dumps(sorted(values)).encode(), digest_size=8).hexdigest()


def hashes(tensors: list[Tensor]) -> list[int]:
    """64 bits of a hash of each tensor's bits; the host waits once for each device, not once for each tensor."""
    return _read([hash_of_bits(x) for x in tensors])


def _read(values: list[Tensor]) -> list[Any]:
    """0-d tensors of one dtype as Python numbers, those of one device at once."""
    found: dict[int, Any] = {}
    for device in dict.fromkeys(x.device for x in values):
        here = [i for i, x in enumerate(values) if x.device == device]
        found.update(zip(here, torch.stack([values[i] for i in here]).tolist()))
    return [found[i] for i in range(len(values))]


def _store() -> Any:
    """The rendezvous store of the default process group; ``None`` where there is one process, or no store."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()
