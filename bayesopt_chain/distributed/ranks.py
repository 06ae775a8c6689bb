r"""Which chains each rank runs, with which keys, and how ranks exchange gradients, values and errors.

**Chains.** Of ``n`` chains on ``R`` ranks each rank runs ``n // R`` consecutive chains, and each of the first ``n % R`` ranks
runs one more. A chain has a global number ``i``, and its key is

    key of chain i = hash(seed, i),

so that chain ``i`` draws the same noise on any number of ranks.

**One chain on several ranks.** If rank ``r`` has ``n_r`` of the data of a batch, and the gradient ``g_r`` of their mean loss,
the gradient of the whole batch is

    g = sum_r n_r g_r / sum_r n_r.

The loss is averaged in the same way. Both take one all-reduce of one vector. Every rank receives the same bits, so that
replicas with equal parameters and states stay equal, bit for bit.

A mesh is a ``torch.distributed.device_mesh.DeviceMesh`` of one axis. Of a mesh with several axes pass one, as ``mesh["data"]``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import batches, checks, tracing
from bayesopt_chain._torch import is_dtensor, like, local
from bayesopt_chain.distributed.parts import runs_of
from bayesopt_chain.random.stream import chain_seed
from bayesopt_chain.trees import common_dtype, named_leaves

T = TypeVar("T")
Mesh = Any  # a DeviceMesh, whose module is not imported here because that is slow and few programs need it

COMPARED = frozenset([0, 1, *(4**i - 1 for i in range(1, 31))])  # the steps since a start at which ranks are compared


class World(NamedTuple):
    """The place of this process among those that were launched together.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
    """

    rank: int
    size: int


def world() -> World:
    """The place of this process among those that were launched together.

    Returns:
        Rank and size of the default process group. Before that is initialised, those that ``torchrun`` has put into the
        environment. Without either, rank 0 of 1.

    Example:
        >>> world()
        World(rank=0, size=1)
    """
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    if dist.is_available() and dist.is_torchelastic_launched():
        return World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return World(0, 1)


def require_one_axis(mesh: Mesh, who: str) -> None:
    """Refuse anything but a DeviceMesh of one axis.

    Args:
        mesh: what the user gave.
        who: the caller, for the message.

    Raises:
        TypeError: it is not a DeviceMesh.
        ValueError: it has several axes.
    """
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise TypeError(
            f"{who}: mesh must be a DeviceMesh (torch.distributed.device_mesh.init_device_mesh), got "
            f"{type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("...",)
        raise ValueError(
            f'{who}: mesh has {mesh.ndim} axes; say over which one: mesh["{names[0]}"], named by '
            "init_device_mesh(..., mesh_dim_names=...)"
        )


def chains_of(n: int, mesh: Mesh, who: str = "parallel:") -> range:
    """The global numbers of the chains that this rank runs.

    Args:
        n: the number of all chains.
        mesh: the ranks.
        who: the first words of the error message.

    Raises:
        ValueError: there are fewer chains than ranks.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    if n < size:
        raise ValueError(
            f"{who} {n} chains on {size} ranks leave some without one; run at least {size} chains, or fewer ranks"
        )
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


@checks.takes(seed=checks.INDEX, chain=checks.INDEX)
def generator(seed: int, chain: int = 0) -> torch.Generator:
    """Make the generator from which one chain draws its key. It is the same on any number of ranks.

    Args:
        seed: the seed of the run, equal on all ranks.
        chain: the global number of the chain (default: 0). Ranks that are replicas of one chain (DistributedDataParallel) give
            the same number. Ranks that run a chain each give different numbers, such as ``torch.distributed.get_rank()``.

    Returns:
        A generator on the CPU, for the argument ``generator`` of an optimizer of :mod:`bayesopt_chain.optim` or of a noise
        link.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.zeros(2, requires_grad=True)
        >>> optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.1, generator=bc.distributed.generator(0, chain=3))
    """
    return torch.Generator().manual_seed(chain_seed(seed, chain))


def require_named_chain(who: str, generator: torch.Generator | None, instead: str = "give it") -> None:
    """Refuse to draw a key from torch's global generator if there are several ranks.

    Replicas whose global generators have different seeds would drift apart, and chains on ranks with equal seeds would be
    copies of each other.

    Args:
        who: the caller, for the message.
        generator: the generator that the user gave, or ``None``.
        instead: the verb of the hint in the message, "give it" by default.

    Raises:
        ValueError: no generator is given, and there is more than one rank.
    """
    size = world().size
    if generator is None and size > 1:
        raise ValueError(
            f"{who}: {size} ranks run, and nothing says whether this one is a replica of the others or a chain of its own: "
            f"{instead} generator=bc.distributed.generator(seed) on replicas (DistributedDataParallel), and "
            "generator=bc.distributed.generator(seed, chain=rank) for a chain on each rank"
        )


def mesh_of(tree: Any) -> Any:
    """The largest mesh on which DTensors of a tree, or torch's descriptions of them, lie; ``None`` where there are none."""
    meshes = [x.device_mesh for x in optree.tree_leaves(tree) if hasattr(x, "device_mesh")]
    return max(meshes, key=lambda m: m.size(), default=None)


def broadcast(tree: T, mesh: Mesh) -> T:
    """Send the tensors of the first rank to every rank.

    Args:
        tree: a tree of tensors, such as ``(params, tx.init(params))``, whose structure and shapes are equal on all ranks.
        mesh: the ranks, a mesh of one axis.

    Returns:
        A tree of new tensors with the values of the first rank, each on the device of this rank's tensor. Leaves that are not
        tensors are this rank's. A DTensor may be sharded over another axis than that of ``mesh``; then the part that the ranks
        of ``mesh`` have in common is sent.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: a mesh of several axes; a DTensor of which the ranks hold different parts.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.zeros(2)}
        >>> start = (params, tx.init(params))
        >>> params, state = bc.distributed.broadcast(start, mesh)     # doctest: +SKIP
    """
    require_one_axis(mesh, "broadcast")
    spread = {name: runs_of(x) for name, x in named_leaves(tree).items() if is_dtensor(x)}
    require_alike(
        "broadcast: {} are DTensors, of which the ranks of this mesh hold different parts; pass the mesh of the ranks that "
        "hold the same ones, or plain tensors",
        spread,
        mesh,
    )

    def sent(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        part = local(x.detach())
        # "cuda" is the current device, since NCCL sends from no other
        y = part.to(mesh.device_type, memory_format=torch.contiguous_format, copy=True)
        dist.broadcast(y, group=mesh.get_group(), group_src=0)
        return like(x, y.to(part.device))

    return cast(T, optree.tree_map(sent, cast(Any, tree)))


def require_replicas(tree: Any, mesh: Mesh, *, who: str = "require_replicas") -> None:
    """Refuse ranks whose trees of tensors are not equal bit for bit.

    Hashes of the tensors are compared, which takes one message.

    Args:
        tree: a tree of tensors, such as ``(params, state)``.
        mesh: the ranks, a mesh of one axis.
        who: the first words of the error message (default: ``"require_replicas"``).

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: the trees differ. It is raised on every rank, and names the first leaves that differ.

    Example:
        >>> import bayesopt_chain as bc
        >>> def check(it):
        ...     if it.step % 1000 == 0:
        ...         bc.distributed.require_replicas((it.params, it.state), mesh)
    """
    require_one_axis(mesh, who)
    mine = {name: digest(x) for name, x in named_leaves(tree).items() if isinstance(x, Tensor)}
    require_alike(
        who
        + ": the ranks hold no replicas of one chain: {} differ. Start all of them from the first rank's: params, state = "
        "bc.distributed.broadcast((params, state), mesh), and give all of them the same chain and schedules",
        {**mine, "the tree": tuple(mine)},
        mesh,
    )


def require_fit(what: str, here: Mapping[str, str], there: Mapping[str, str], besides: Iterable[str] = ()) -> None:
    """Refuse what was read where it is not what it is to be read into.

    Args:
        what: the first words of the message.
        here, there: names, and what is to be of this name, or is.
        besides: what is wrong in other ways.

    Raises:
        ValueError: the message has the first five differences.
    """
    wrong = [
        f"{name} is {there.get(name, 'missing')}, expected {x}" for name, x in here.items() if there.get(name) != x
    ]
    wrong += [f"{name} is not expected" for name in there if name not in here]
    if wrong := [*wrong, *besides]:
        raise ValueError(f"{what}: {shown_some(wrong, 5, '; ')}")


DRIFTED = (
    " differ from rank to rank, and one of them would be kept: bc.distributed.broadcast for replicas that have drifted apart, "
    "DTensors for shards"
)


def require_alike(message: str, mine: Mapping[str, Any], mesh: Mesh | None) -> None:
    """Refuse, on every rank, values of one name that are not alike on two of them.

    With a mesh it takes one message of two numbers where all is alike, whatever the number of ranks.

    Args:
        message: of the error, with ``{}`` in the place of the names, and of the values where they are numbers.
        mine: this rank's values by name, which can be hashed and pickled and should be small. A name may be absent on some.
        mesh: the ranks; ``None`` for all ranks.

    Raises:
        ValueError: there are such values.
    """
    if mesh is not None and _are_alike(mine, mesh):
        return
    seen: dict[str, set[Any]] = {}
    for name, value in itertools.chain(*(theirs.items() for theirs in gather_objects(mine, mesh))):
        seen.setdefault(name, set()).add(value)
    if wrong := {name: values for name, values in seen.items() if len(values) > 1}:
        shown = [
            f"{name} ({', '.join(map(str, sorted(xs)))})" if {*map(type, xs)} <= {int, float} else name
            for name, xs in wrong.items()
        ]
        raise ValueError(message.format(shown_some(shown)))


def _are_alike(mine: Mapping[str, Any], mesh: Mesh) -> bool:
    """Whether all ranks of a mesh have the same values by name, of which each sends a hash."""
    word = int.from_bytes(hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=7).digest(), "little")
    ends = torch.tensor([word, -word], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return int(ends.sum()) == 0  # the least of all words is the largest one


def shown_some(names: Iterable[Any], most: int = 4, comma: str = ", ") -> str:
    """The first few of these names as text for messages."""
    listed = [*dict.fromkeys([str(x)[:200] for x in names])]
    return comma.join(listed[:most]) + f"{comma}and {len(listed) - most} more" * (len(listed) > most)


def digest(x: Tensor) -> tuple[Any, ...]:
    """Dtype and shape of a tensor and a hash of its bits. Of a DTensor, this rank's elements, and those of their tensor.

    Args:
        x: a plain tensor or a DTensor.

    Returns:
        A tuple that is equal on ranks with equal tensors.
    """
    if is_dtensor(x):
        return (runs_of(x), *digest(local(x.detach())))
    return (str(x.dtype), *x.shape, hash_of_bits(x))


def hash_of_bits(x: Tensor) -> int:
    """A hash of 64 bits of the bits of a plain tensor.

    Args:
        x: a tensor of any dtype and shape.
    """
    return int.from_bytes(hashlib.blake2b(bytes_of(x), digest_size=8).digest(), "little")


def bytes_of(x: Tensor) -> memoryview:
    """The bytes of the elements of a plain tensor, one after the other."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # an axis of length 1 may have any stride, which contiguous keeps
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data if x.numel() else memoryview(b"")


def gather_objects(value: T, mesh: Mesh | None) -> list[T]:
    """Collect a value from every rank.

    Args:
        value: this rank's value, which is pickled, so that it should be small.
        mesh: the ranks, a mesh of any number of axes, each of which takes a message, or several meshes in a tuple, of the
            ranks of the first one those of the next, and so on; ``None`` for all ranks.

    Returns:
        The values in the order of ranks, on every rank.
    """
    # Behind ``torchrun`` there can be several ranks and no process group yet, over which values could be sent.
    if mesh is None and (world().size == 1 or not dist.is_initialized()):
        return [value]
    out: list[Any] = [value]
    meshes: Any = mesh if isinstance(mesh, tuple) else (mesh,)
    for group in [None] if mesh is None else [m.get_group(axis) for m in meshes for axis in range(m.ndim)][::-1]:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, out, group=group)
        out = [*itertools.chain(*every)]
    return out


def gather_tensors(mine: Mapping[str, Tensor], mesh: Mesh) -> list[dict[str, Tensor]]:
    """Collect named tensors from every rank.

    Args:
        mine: this rank's tensors. The names are equal on all ranks; shapes and dtypes may differ.
        mesh: the ranks.

    Returns:
        The tensors of each rank in the order of ranks, on every rank, each on the device of this rank's tensor of that name.
    """
    every = [(name, x.device, gather_objects(x.detach().cpu(), mesh)) for name, x in mine.items()]
    return [{name: came[rank].to(device) for name, device, came in every} for rank in range(mesh.size())]


class FailedElsewhere(RuntimeError):
    """What :func:`answers` raises where another rank failed, which the message names."""


def answers(mesh: Mesh | None, what: Callable[[], T]) -> list[T]:
    """Run a function on every rank. If it fails on one rank, it fails on all, so that no rank waits for another in vain.

    Args:
        mesh: the ranks; ``None`` for all ranks.
        what: the function; what it returns is pickled, so that it should be small.

    Returns:
        What the function returned on each rank, on every rank.

    Raises:
        RuntimeError: the function failed on another rank; the message is that of the other rank. A failure on this rank is
            raised as it is.
    """
    try:
        mine, failure = (what(), None), None
    except BaseException as err:
        # the number among all ranks, of which a mesh may have some
        mine, failure = (None, f"rank {world().rank} failed: {type(err).__name__}: {err}"), err
    every: list[Any] = gather_objects(mine, mesh)
    if failure is not None:
        raise failure
    if other := next((text for _, text in every if text is not None), None):
        raise FailedElsewhere(other)
    return [answer for answer, _ in every]


def together(mesh: Mesh | None, what: Callable[[], T]) -> T:
    """The same of a function that may return anything; what it returned on this rank."""
    mine: list[T] = []
    answers(mesh, lambda: mine.append(what()))
    return mine[0]


def rendezvous_store() -> Any:
    """The rendezvous store of the default process group; ``None`` if there is only one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()


class Ranks:
    """The ranks that make the steps of one chain together, with a part of each batch or with parts of the parameters.

    Ranks with a part of each batch average gradient and loss. Every tensor of a batch has one entry for each datum on axis 0,
    except 0-d tensors, which belong to the whole batch. The weight of a rank is the number of its data.

    Both kinds are compared in the calls 1, 2, 4, 16, 64 and so on of the step. Ranks that are alike send one message of two
    numbers for each comparison and axis of a mesh.

    Args:
        mesh: the ranks with a part of each batch, a mesh of one axis; ``None`` if there are none. Ranks with parts of the
            parameters are those of the DTensors' meshes.

    Attributes:
        calls: how many calls of the step there were before.
    """

    def __init__(self, mesh: Mesh) -> None:
        if mesh is not None:
            require_one_axis(mesh, "make_step")
        self.mesh: Mesh = mesh
        self.calls = 0

    def compare(self, numbers: Callable[[int], Mapping[str, Any]], params: Any, state: Any) -> None:
        """Refuse ranks whose chains have other numbers, replicas that differ, and shards whose whole leaves differ.

        Args:
            numbers: returns what the chain holds besides its state, by name, after a number of steps.
            params, state: the arguments of the step.

        Raises:
            ValueError: naming what differs; a call within ``vmap`` or a trace.
            RuntimeError: other ranks of two meshes refuse; the message is theirs.
        """
        tree, spread = {"params": params, "state": state}, mesh_of(params)
        meshes = tuple([mesh for mesh in (self.mesh, spread) if mesh is not None])
        if meshes and not tracing.is_plain():
            raise ValueError(_HIDDEN)
        # What some ranks of two meshes refuse, all have to know before the next comparison, in which they would be waited for.
        shared = partial(answers, meshes if len(meshes) > 1 else ())
        for mesh in meshes:
            told = numbers_in(numbers(self.calls))
            shared(
                partial(
                    require_alike,
                    "make_step: ranks step one chain with other {}; give all of them the same links, hyperparameters and "
                    "schedules",
                    {**told, "links": tuple(told)},
                    mesh,
                )
            )
        if self.mesh is not None:
            shared(partial(require_replicas, tree, self.mesh, who="make_step(mesh=)"))
        if spread is not None:
            shared(
                partial(
                    require_alike,
                    "make_step: {} differ between ranks that hold parts of one chain, and are whole on each of them; start all "
                    "of them alike, with one seed and one checkpoint",
                    {
                        name: digest(local(x))
                        for name, x in named_leaves(tree).items()
                        if isinstance(x, Tensor) and all([p.is_replicate() for p in getattr(x, "placements", ())])
                    },
                    spread,
                )
            )

    def gradient(self, grads: Any, loss: Tensor, batch: Any) -> tuple[Any, Tensor]:
        """Average gradient and loss over the ranks. It takes one message.

        Args:
            grads: the gradient of the mean loss of this rank's data, a tree like the parameters; ``None`` for a missing one.
            loss: the mean loss of this rank's data, 0-d.
            batch: this rank's data, by whose number they are weighted.

        Returns:
            Gradient and loss of the whole batch.

        Raises:
            ValueError: a call within ``vmap`` or a trace; a complex gradient; tensors of the batch with different numbers of
                data.
        """
        leaves, spec = optree.tree_flatten(grads, none_is_leaf=True)
        present = [g for g in leaves if g is not None]
        if not tracing.is_plain(*present):
            raise ValueError(_HIDDEN)
        if any(g.is_complex() for g in present):
            raise ValueError(
                "make_step(mesh=): complex gradients cannot be averaged over ranks; make it torch.view_as_real"
            )
        weight = batches.size(batch, 1)
        # Gradients of 16 bits are added up in 32 bits, in which the sum over ranks does not overflow.
        dtype = common_dtype([*present, loss])
        parts = [local(x.detach()).reshape(-1).to(dtype) for x in (*present, loss)]
        # The last element becomes the weight of the rank, so that one message has the sums of gradients, loss and weights.
        flat = torch.cat([*parts, parts[-1].new_ones(1)])
        # A rank without data has a mean loss of NaN, which would stay NaN when multiplied by 0.
        flat = flat.mul_(weight) if weight else flat.zero_()
        dist.all_reduce(flat, group=self.mesh.get_group())
        flat[:-1].div_(flat[-1].clone())
        pieces = iter(torch.split(flat, [*(x.numel() for x in parts), 1]))
        new = [None if g is None else like(g, next(pieces).view(local(g).shape).to(g.dtype)) for g in leaves]
        return optree.tree_unflatten(spec, new), next(pieces).view(()).to(loss.dtype)


def numbers_in(named: Mapping[str, Any]) -> dict[str, float]:
    """Those of named values that are numbers, also those in tuples, such as rate, temperature, momentum and decay of a chain.

    Key and count of the noise are left out, by which ranks may differ.
    """
    inside = [(f"{name}[{i}]", x) for name, xs in named.items() if isinstance(xs, tuple) for i, x in enumerate(xs)]
    return {
        name: float(x)
        for name, x in (*named.items(), *inside)
        if not name.startswith("noise_")
        and (isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.numel() == 1 and not is_dtensor(x)))
    }


_HIDDEN = (
    "make_step: ranks exchange messages in every step, which vmap cannot map and a captured step cannot hold: "
    "run several chains with bc.parallel(step, n, loop=True), and leave the step uncaptured"
)
