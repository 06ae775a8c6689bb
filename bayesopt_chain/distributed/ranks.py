r"""What ranks share: which chains each of them runs, with which keys, and how a gradient is averaged over them.

Of ``n`` chains on ``R`` ranks each rank runs ``n / R`` consecutive ones, the first ranks one more where that leaves a
remainder. Their numbers are global:

    key of chain i = hash(seed, i)

so that chain ``i`` draws the same noise on any number of ranks. Ranks that share a chain and split its batch (``n_r``
of the data on rank ``r``) need the same parameters and state, and the gradient of the whole batch,

    g = sum_r n_r g_r / sum_r n_r,        and the loss likewise,

which takes one all-reduce of one vector. Every rank receives the same bits, so that replicas stay bit-identical.

The mesh is a ``torch.distributed.device_mesh.DeviceMesh`` of one axis; of a mesh with several, ``mesh["data"]``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import batches, tracing
from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.layout import runs_of
from bayesopt_chain.distributed.shards import like, local
from bayesopt_chain.random.stream import splitmix64

T = TypeVar("T")
Mesh = Any  # a DeviceMesh; torch's module of them is not imported where nobody has one

_BLOCK = 2**17  # words of 64 bits that are hashed at once


class World(NamedTuple):
    """This process among those that were launched together."""

    rank: int
    size: int


def world() -> World:
    """This process's place: that of the default process group, or what ``torchrun`` said before there is one.

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

    Raises:
        TypeError, ValueError: naming the argument of ``who``.
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


def chains_of(n: int, mesh: Mesh) -> range:
    """The global numbers of the chains that this rank runs, of ``n`` chains in all.

    Raises:
        ValueError: a rank that would have none.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    if n < size:
        raise ValueError(
            f"parallel: {n} chains on {size} ranks leave some without one; run at least {size} chains, or fewer ranks"
        )
    return share_of(n, rank, size)


def share_of(n: int, rank: int, size: int) -> range:
    """The global numbers of the chains, of ``n`` in all, that rank ``rank`` of ``size`` ranks runs."""
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def chain_seed(seed: int, chain: int) -> int:
    """A seed of 63 bits for one chain: a hash of the run's seed and the chain's global number."""
    return splitmix64(splitmix64(seed & (2**64 - 1)) ^ splitmix64(~chain & (2**64 - 1))) >> 1


def generator(seed: int, chain: int = 0) -> torch.Generator:
    """A generator for the key of one chain, which does not depend on how many ranks there are.

    Args:
        seed: of the run, the same on every rank.
        chain: the chain's global number: the same on ranks that are replicas (DistributedDataParallel), another one on
            each rank that runs a chain of its own (``chain=torch.distributed.get_rank()``).

    Returns:
        A generator on the CPU, for ``generator=`` of an optimizer of :mod:`bayesopt_chain.optim` or of a noise link.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.zeros(2, requires_grad=True)
        >>> optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.1, generator=bc.distributed.generator(0, chain=3))
    """
    return torch.Generator().manual_seed(chain_seed(seed, chain))


def require_named_chain(who: str, generator: torch.Generator | None, instead: str = "give it") -> None:
    """Refuse a key from torch's global generator where several ranks run: as they happen to be seeded, replicas would
    drift apart or chains coincide.

    Raises:
        ValueError: no generator, and more than one rank.
    """
    size = world().size
    if generator is None and size > 1:
        raise ValueError(
            f"{who}: {size} ranks run, and nothing says whether this one is a replica of the others or a chain of its own: "
            f"{instead} generator=bc.distributed.generator(seed) on replicas (DistributedDataParallel), and "
            "generator=bc.distributed.generator(seed, chain=rank) for a chain on each rank"
        )


def agreed_seed(seed: int | None, *meshes: Mesh) -> int:
    """The seed if there is one, else a random seed that the first rank of these meshes draws and sends to all others."""
    if seed is not None:
        return int(seed)
    drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    for mesh in meshes:
        drawn = broadcast(drawn, mesh)
    return int(drawn)


def broadcast(tree: T, mesh: Mesh) -> T:
    """Send the tensors of the first rank to every rank.

    Args:
        tree: any tree of tensors, of one structure on all ranks, such as ``(params, tx.init(params))``.
        mesh: of one axis.

    Returns:
        A tree of new tensors, each on the device of this rank's own; what is no tensor stays this rank's. Of DTensors that
        are spread over another axis, the part that these ranks hold.

    Raises:
        ValueError: a mesh of several axes; a DTensor of which the ranks hold different parts.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.zeros(2)}
        >>> start = (params, tx.init(params))
        >>> params, state = bc.distributed.broadcast(start, mesh)     # doctest: +SKIP
    """
    require_one_axis(mesh, "broadcast")
    spread = {_shown(path): runs_of(x) for path, x in _leaves(tree) if is_dtensor(x)}
    if spread and any(other != spread for other in gather_objects(spread, mesh)):
        raise ValueError(
            f"broadcast: {next(iter(spread))} is a DTensor, of which the ranks of this mesh hold different parts; pass the "
            "mesh of the ranks that hold the same ones, or plain tensors"
        )

    def sent(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        part = local(x.detach())
        y = part.to(_device(mesh), memory_format=torch.contiguous_format, copy=True)
        dist.broadcast(y, group=mesh.get_group(), group_src=0)
        return like(x, y.to(part.device))

    everything: Any = tree
    copied: Any = optree.tree_map(sent, everything)
    return copied


def require_replicas(tree: Any, mesh: Mesh, *, who: str = "require_replicas") -> None:
    """Compare a tree on all ranks of a mesh by a hash of every tensor's bits; one message.

    Args:
        tree: of tensors, such as ``(params, state)``.
        mesh: of one axis.
        who: what the message begins with.

    Raises:
        ValueError: on every rank, naming the first leaves that differ.

    Example:
        >>> import bayesopt_chain as bc
        >>> def check(it):
        ...     if it.step % 1000 == 0:
        ...         bc.distributed.require_replicas((it.params, it.state), mesh)
    """
    require_one_axis(mesh, who)
    mine = {_shown(path): digest(x) for path, x in _leaves(tree) if isinstance(x, Tensor)}
    every = gather_objects(mine, mesh)
    wrong = [name for name in mine if any(theirs.get(name) != mine[name] for theirs in every)]
    if wrong or any(theirs.keys() != mine.keys() for theirs in every):
        named = f"{', '.join(wrong[:4])}{', ...' if len(wrong) > 4 else ''} differ" if wrong else "their trees differ"
        raise ValueError(
            f"{who}: the ranks hold no replicas of one chain: {named}. Start all of them from the first rank's: "
            "params, state = bc.distributed.broadcast((params, state), mesh)"
        )


def _shown(path: Any) -> str:
    """The path of a leaf as messages name it, such as ``state/0/trace/w``."""
    return "/".join([str(getattr(entry, "field", entry.entry)) for entry in path]) or "the tensor"


def _leaves(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Pairs of a path and a leaf."""
    return zip(optree.tree_accessors(tree), optree.tree_leaves(tree))


def digest(x: Tensor) -> tuple[Any, ...]:
    """The shape of a tensor and a 64-bit hash of its bits. For a DTensor: the elements that are here, and a hash of those."""
    if is_dtensor(x):
        return (runs_of(x), *digest(local(x.detach())))
    return (*x.shape, int(hash_of_bits(x)))


def hash_of_bits(x: Tensor) -> Tensor:
    """64 bits of a hash of a plain tensor's bits, 0-d int64 on its device: the host does not wait for it.

    The bits are read as 64-bit words; each word of a block is multiplied by a random odd number of its place, and the sums of
    the blocks are combined by Horner's rule, all modulo ``2^64``. It takes about as long as adding two such tensors.
    """
    bits = x.detach().contiguous().reshape(-1)
    bits = torch.view_as_real(bits).reshape(-1) if bits.is_complex() else bits
    a_word = 8 // bits.element_size()
    whole = bits.numel() - bits.numel() % a_word
    head, tail = bits[:whole], bits[whole:].contiguous().view(torch.uint8)
    if head.storage_offset() % a_word:
        head = head.clone()
    words, weights = head.view(torch.int64), _weights(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for block in [*words.split(_BLOCK), tail.to(torch.int64)]:
        of_block = weights[: block.numel()]
        summed = torch.dot(block, of_block) if x.device.type == "cpu" else (block * of_block).sum()
        total = total * 0x5851F42D4C957F2D + summed
    return total


@lru_cache
def _weights(device: torch.device) -> Tensor:
    """The odd numbers that words are multiplied by, one for each place in a block, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(_BLOCK, dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=generator)
    return (drawn | 1).to(device)


def gather_objects(value: T, mesh: Mesh | None) -> list[T]:
    """The values of all ranks of a mesh (``None``: of all ranks), in the order of ranks. They are pickled: keep them small."""
    if mesh is None and (world().size == 1 or not dist.is_initialized()):
        return [value]
    out: list[Any] = [None] * (world().size if mesh is None else mesh.size())
    dist.all_gather_object(out, value, group=None if mesh is None else mesh.get_group())
    return out


def gather_tensors(mine: Mapping[str, Tensor], mesh: Mesh) -> list[dict[str, Tensor]]:
    """Named tensors of all ranks of a mesh, in the order of ranks, on the devices of this rank's own.

    The names are the same on every rank; shapes and dtypes may differ.
    """
    kinds = gather_objects({name: (x.dtype, tuple(x.shape)) for name, x in mine.items()}, mesh)
    every: list[dict[str, Tensor]] = [{} for _ in kinds]
    device = _device(mesh)
    for name, x in mine.items():
        sizes = [theirs[name][0].itemsize * torch.Size(theirs[name][1]).numel() for theirs in kinds]
        sent = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        sent[: sizes[mesh.get_local_rank()]] = x.detach().contiguous().reshape(-1).view(torch.uint8).to(device)
        came = [torch.empty_like(sent) for _ in kinds]
        dist.all_gather(came, sent, group=mesh.get_group())
        for tensors, theirs, raw, n in zip(every, kinds, came, sizes):
            dtype, shape = theirs[name]
            tensors[name] = raw[:n].clone().view(dtype).view(shape).to(x.device)
    return every


def together(mesh: Mesh | None, what: Callable[[], T]) -> T:
    """Run a function on every rank. If it fails on one rank it fails on all, instead of leaving the others waiting.

    Raises:
        RuntimeError: another rank failed, with its message.
    """
    failure: BaseException | None = None
    value: Any = None
    try:
        value = what()
    except Exception as err:
        failure = err
    said = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}", mesh)
    if failure is not None:
        raise failure
    if other := next(((rank, text) for rank, text in enumerate(said) if text is not None), None):
        raise RuntimeError(f"rank {other[0]} failed: {other[1]}")
    return value


class DataParallel:
    """Averages gradient and loss over the ranks of a mesh, of which each has a part of the batch.

    ``gradient(grads, loss, batch)`` is one message a step. Every tensor of a batch has one entry a datum on axis 0
    (0-d tensors belong to all ranks), and a rank counts as much as it has data.
    """

    def __init__(self, mesh: Mesh) -> None:
        require_one_axis(mesh, "make_step")
        self.mesh = mesh
        self.messages = 0  # how many ``gradient`` has sent
        self._compared = False

    def compare_once(self, params: Any, state: Any) -> None:
        """Refuse, before the first step, ranks that do not start from the same parameters and state; later calls do nothing.

        Raises:
            ValueError: naming what differs.
        """
        if not self._compared:
            if not tracing.is_plain():
                raise ValueError(_HIDDEN)
            require_replicas({"params": params, "state": state}, self.mesh, who="make_step(mesh=)")
            self._compared = True

    def gradient(self, grads: Any, loss: Tensor, batch: Any) -> tuple[Any, Tensor]:
        """Gradient and loss of the whole batch, from those of this rank's part.

        Raises:
            ValueError: within ``vmap`` or a trace; a batch whose tensors disagree on how many data there are.
        """
        leaves, spec = optree.tree_flatten(grads, none_is_leaf=True)
        present = [g for g in leaves if g is not None]
        if not tracing.is_plain(*present):
            raise ValueError(_HIDDEN)
        if any(g.is_complex() for g in present):
            raise ValueError(
                "make_step(mesh=): complex gradients cannot be averaged over ranks; make it torch.view_as_real"
            )
        weight = data_of(batch)
        dtype = torch.float32
        for x in (*present, loss):
            dtype = torch.promote_types(dtype, x.dtype)
        parts = [local(x.detach()).reshape(-1).to(dtype) for x in (*present, loss)]
        flat = torch.cat([*parts, parts[-1].new_ones(1)])
        flat = flat.mul_(weight) if weight else flat.zero_()  # the mean over no data is not a number
        dist.all_reduce(flat, group=self.mesh.get_group())
        self.messages += 1
        flat[:-1].div_(flat[-1].clone())
        pieces = iter(torch.split(flat, [*(x.numel() for x in parts), 1]))
        new = [None if g is None else like(g, next(pieces).view(local(g).shape).to(g.dtype)) for g in leaves]
        return optree.tree_unflatten(spec, new), next(pieces).view(()).to(loss.dtype)


_HIDDEN = (
    "make_step(mesh=): ranks exchange messages in every step, which vmap cannot map and a captured step cannot hold: "
    "run several chains with bc.parallel(step, n, loop=True), and leave the step uncaptured"
)


def data_of(batch: Any) -> int:
    """How many data this rank has of a batch: the length of axis 0 of its tensors; 1 where there are none.

    Raises:
        ValueError: tensors of several lengths.
    """
    sizes = sorted({len(x) for x in batches.flatten(batch)[0] if isinstance(x, Tensor) and x.ndim})
    if len(sizes) > 1:
        raise ValueError(
            f"make_step(mesh=): the batch's tensors have {' and '.join(map(str, sizes[:4]))} entries on axis 0, and a "
            "rank counts as much as it has data: pass one entry a datum in each, and let the loss hold what belongs to "
            "all data"
        )
    return sizes[0] if sizes else 1


def _device(mesh: Mesh) -> torch.device:
    """The device of the tensors that a mesh sends: NCCL sends from the current CUDA device only."""
    return (
        torch.device(mesh.device_type)
        if mesh.device_type != "cuda"
        else torch.device("cuda", torch.cuda.current_device())
    )
