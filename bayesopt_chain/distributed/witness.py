r"""A check that ranks with plain parameter tensors do not share noise where they must not.

A plain tensor does not tell whether it is a whole parameter, of which other ranks hold replicas, or a part of a parameter. The
noise is a function of the key, the leaf, the element and the step. Six mistakes therefore give a wrong chain without an error:

    parts         with FSDP1, ZeroRedundancyOptimizer or pipeline stages, ranks hold different parameters under one key and leaf
    drift         replicas that started differently, or had different data, hold different parameters under one key and leaf
    counts        replicas made different numbers of steps (``DistributedDataParallel.join``)
    two keys      replicas follow one averaged gradient (DistributedDataParallel), but each with a key of its own
    one chain     ranks are replicas of one chain, and a run on disk would keep each of them as a chain of its own
    numbers       ranks step a leaf under one key with another rate, temperature, momentum or decay, shards of it also

At some steps each rank writes records of its parameters and its key, its claims, into the rendezvous store of the process
group, and reads the records of other ranks. There is no collective operation, and no rank waits for another. The names of the
records are made of the key or of the gradients:

    key/<key>            {leaf: (name, hyperparameters, hash of the parameter's bits, number of steps that drew)} of the
                         first rank there; of leaves of which it holds parts, name and hyperparameters alone
    key/<key>/<hash>     the same for parts of leaves, of the first rank there that holds these parts
    gradient/<hash>      (key, hash of the parameters) of the first rank there with these gradients

A leaf that the first rank with a key does not have is compared in a record of its own. So the number of records that a rank
reads does not grow with the number of ranks, and shards that nobody else holds are compared with nothing. A rank that finds a
contradiction writes a refusal, and every rank, including that one, raises it at the step after its comparison. In this way no
rank is left alone in a collective operation that the others make. Gradients that are zero everywhere are ignored, because they
are equal without an average.

Ranks compare at the steps 1, 2, 4, 16, 64 and so on after a start, so that the mean cost of a step vanishes. Only from step 2
on does an averaged gradient differ from the gradient at equal starts. A start is the first step, a fork, a loaded state, or a
write of somebody else into the parameters between two steps, unless that happens in every step.
``DistributedDataParallel.join`` makes such a write on every rank at its end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from bayesopt_chain._torch import local_parts
from bayesopt_chain.distributed.ranks import COMPARED, hash_of_bits, numbers_in, rendezvous_store
from bayesopt_chain.random.philox import Runs

# The numbers of the witnesses of this process. Ranks that run one program make them in one order, so that equal numbers belong
# to the same optimizer.
_made = itertools.count()

_SHARED = (
    "ranks {} and {} hold other values of {!r} under one key{}, so that they draw the same noise for it. Parts of one model: "
    "take fully_shard in the place of FullyShardedDataParallel (FSDP1); of ZeroRedundancyOptimizer and pipeline stages say "
    "which parts by bc.distributed.part(model.named_parameters(), where). Replicas (DistributedDataParallel): start them alike "
    "and let them make equally many steps (DistributedSampler evens batches out). A chain on each rank: "
    "generator=bc.distributed.generator(seed, chain=rank)"
)
_COUNTS = (
    "ranks {} and {} are replicas that have drawn {} and {} times, and would draw other noise from now on. Give all "
    "ranks equally many batches, as torch's DistributedSampler does, or load the optimizer's state of one of them everywhere"
)
_TWO_KEYS = (
    "ranks {} and {} follow one averaged gradient with noise of two keys, and drift apart. Replicas under "
    "DistributedDataParallel are one chain: give every rank generator=bc.distributed.generator(seed), with one seed and one "
    "chain. For chains of their own leave DistributedDataParallel out"
)
_NUMBERS = (
    "ranks {} and {} step {!r} under one key, and so as one chain, with {} = {} and {}. Give all ranks of a chain the same "
    "hyperparameters and schedulers; a chain on each rank: generator=bc.distributed.generator(seed, chain=rank)"
)
_ONE_CHAIN = (
    "ranks {} and {} hold equal values of {!r} under one key, so that they run one chain, and this run would keep it as two. "
    "Replicas: give bc.optim.as_step the module under DistributedDataParallel, and its loss takes that. A chain on each rank: "
    "generator=bc.distributed.generator(seed, chain=rank), and no average over ranks in the loss or in hooks"
)


class Claim(NamedTuple):
    """A leaf to which a rank is about to add noise.

    Attributes:
        name: the name of the leaf, for messages.
        key: the key of the random stream.
        number: the number of the leaf in the random stream.
        runs: the elements of the leaf that this rank holds; ``None`` for all of them.
        drawn: how many steps have drawn noise for the leaf before.
        param: the parameter tensor.
        gradient: its gradient; ``None`` if it is sparse or absent.
        group: the parameter group, whose hyperparameters move the leaf.
    """

    name: str
    key: int
    number: int
    runs: Runs | None
    drawn: int
    param: Tensor
    gradient: Tensor | None
    group: Mapping[str, Any]


class Witness:
    """Compares the claims of the ranks of the default process group, for one optimizer.

    Args:
        who: the first words of its error messages.

    Attributes:
        compares: whether the ranks are compared (default: true).
        apart: whether the chain of every rank is kept as a chain of its own, so that replicas are refused (default: false).
        number: the number of this witness, equal on all ranks.
        events: how many starts there were besides the first.
        steps: how many steps there were since the last start.
        writes: torch's count of writes into the parameters, after the last step; ``None`` before the first.
        written_to: whether somebody else wrote into one of them before the last step.
        met: whether the last step compared, so that a refusal of another rank may wait in the store.
        refusal: the contradiction that was found; it is raised at every step until the next start.
    """

    def __init__(self, who: str) -> None:
        self.who, self.compares, self.apart = who, True, False
        self.number = next(_made)
        self.events = 0
        self.steps = 0
        self.writes: int | None = None
        self.written_to = False
        self.met = False
        self.refusal: str | None = None

    def restart(self) -> None:
        """Begin anew to compare, because the key, the state or the parameters were replaced."""
        self.events, self.steps, self.refusal = self.events + 1, 0, None

    @contextmanager
    def step(self, claims: Callable[[], list[Claim]], params: Sequence[Tensor]) -> Iterator[None]:
        """Compare the ranks if it is time, and raise a contradiction. The step that draws noise is made inside of this block.

        Args:
            claims: returns the claims of this step; called only if they are compared, because they are slow to make.
            params: all parameters, in which writes of others are noticed: torch counts the writes.

        Returns:
            A context manager.

        Raises:
            ValueError: a rank has found claims that contradict each other. Nothing has moved then.
        """
        parts = local_parts(params)
        written_to = self.writes is not None and sum([x._version for x in parts]) != self.writes
        if written_to and not self.written_to:
            self.restart()
        self.written_to = written_to
        step, self.steps = self.steps, self.steps + 1
        due = self.compares and step in COMPARED
        store = rendezvous_store() if self.refusal is None and (due or self.met) else None
        if store is not None:
            try:
                self._meet(store, claims if due else None, step)
            except dist.DistError:
                # The process that held the store has ended before this one, so that nothing can be compared any more.
                self.compares = due = False
            self.met = due
        if self.refusal is not None:
            raise ValueError(f"{self.who}: {self.refusal}")
        yield
        self.writes = sum([x._version for x in parts])

    def _meet(self, store: Any, claims: Callable[[], list[Claim]] | None, step: int) -> None:
        """Read the refusal that another rank may have written. If there is none, compare this rank's claims.

        Args:
            store: the rendezvous store.
            claims: returns the claims of this step; ``None`` if they are not to be compared now.
            step: the number of the step since the last start.
        """
        top = f"bayesopt_chain/witness/{self.number}/{self.events}"
        # Not that of this step's own comparison, which some ranks would see one step before others.
        earlier = [f"{top}/{x}/refusal" for x in sorted(COMPARED) if x < step] if self.met else []
        if told := [name for name in earlier if store.check([name])]:
            self.refusal = store.get(told[0]).decode()
        elif claims is not None and (found := self._contradiction(store, claims(), f"{top}/{step}")) is not None:
            store.compare_set(f"{top}/{step}/refusal", "", found)

    def _contradiction(self, store: Any, claims: list[Claim], top: str) -> str | None:
        """Publish this rank's claims, and compare them with those of other ranks.

        Args:
            store: the rendezvous store.
            claims: the claims of this step.
            top: the first part of the names of the records.

        Returns:
            The message of a refusal; ``None`` without a contradiction.
        """
        rank = dist.get_rank()
        bits, refusal = [hash_of_bits(c.param) for c in claims], None
        for key in dict.fromkeys(claim.key for claim in claims):
            leaves, parts = dict[str, list[Any]](), dict[str, list[Any]]()
            for c, b in ((c, b) for c, b in zip(claims, bits) if c.key == key):
                numbers, place, leaf = numbers_in(c.group), _place(c), f"{c.number:x}"
                here = [c.name, numbers, [*c.param.shape, b], c.drawn]
                leaves[leaf] = here if place == leaf else [c.name, numbers, None, 0]
                if place != leaf and c.param.numel():  # a rank may hold nothing of a shard
                    parts[place] = here
            for slot, held in ((key, leaves), (f"{key}/{_combined(parts)}", parts)):
                if held and refusal is None:
                    refusal = self._compare(store, f"{top}/key/{slot}", held, rank)
        gradients = [(c, c.gradient, b) for c, b in zip(claims, bits) if c.gradient is not None and c.gradient.any()]
        if refusal is None and gradients:
            name = _combined([(_place(c), hash_of_bits(g)) for c, g, _ in gradients])
            mine = [rank, _combined([c.key for c, _, _ in gradients]), _combined([b for _, _, b in gradients])]
            other = _first(store, f"{top}/gradient/{name}", mine)
            # Different chains with bitwise equal gradients at different parameters can only follow an average.
            if other[1] != mine[1] and other[2] != mine[2]:
                return _TWO_KEYS.format(*sorted([rank, other[0]]))
        return refusal

    def _compare(self, store: Any, slot: str, mine: dict[str, list[Any]], rank: int) -> str | None:
        """Compare the claims of one key with those of other ranks.

        They are compared with those of the first rank that has the key, and claims for leaves that it does not have leaf by
        leaf in the same way.

        Args:
            store: the rendezvous store.
            slot: the name of the record.
            mine: this rank's claims with this key, by leaf and elements: name and hyperparameters of the leaf, shape and hash
                of what is held, how often it has drawn.
            rank: this rank.

        Returns:
            The message of a refusal; ``None`` without a contradiction.
        """
        other, theirs = _first(store, slot, [rank, mine])
        for place in sorted(mine.keys() & theirs.keys()) if other != rank else ():
            # Sorted, so that the message is the same whichever of the two ranks finds the contradiction.
            (a, (leaf, here, held, count)), (b, (_, there, holds, counted)) = sorted(
                [(rank, mine[place]), (other, theirs[place])]
            )
            if wrong := [k for k in here if k in there and here[k] != there[k]]:
                return _NUMBERS.format(a, b, leaf, wrong[0], here[wrong[0]], there[wrong[0]])
            if held is None or holds is None:
                continue
            if held != holds:
                after = f" after {count} and {counted} draws" if count != counted else ""
                return _SHARED.format(a, b, leaf, after)
            if count != counted:
                return _COUNTS.format(a, b, count, counted)
            if self.apart:
                return _ONE_CHAIN.format(a, b, leaf)
        missing = [place for place in mine if place not in theirs]
        found = (self._compare(store, f"{slot}/{place}", {place: mine[place]}, rank) for place in missing)
        return next((refusal for refusal in found if refusal is not None), None)


def _first(store: Any, name: str, mine: list[Any]) -> Any:
    """Publish ``mine`` under a name unless another rank was first, and return the record of the first rank."""
    return json.loads(store.compare_set(name, "", json.dumps(mine)))


def _place(claim: Claim) -> str:
    """The leaf and its elements as text. Two ranks with equal keys draw the same noise for equal places."""
    whole = claim.runs is None or claim.runs == ((0, claim.param.numel()),)
    return f"{claim.number:x}" if whole else f"{claim.number:x}:{_combined(claim.runs or ())}"


def _combined(values: Iterable[Any]) -> str:
    """A hash of values, which does not depend on their order."""
    return hashlib.blake2b(json.dumps(sorted(values)).encode(), digest_size=8).hexdigest()
