"""Draws of a sampler: in memory or on disk, stacked on axis 0 (draw, then chain), and what is asked of them.

    predictive   p(y | x, D) = 1/S sum_s p(y | f(theta_s, x))        a mean of probabilities, not of outputs

A run on disk is a directory: ``index.json`` names the shards, safetensors files with a few draws each, in order. The index
is written last, so that a directory always holds whole draws.
"""

from __future__ import annotations

import glob
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain.distributed.ranks import gather_objects
from bayesopt_chain.runs import checkpoint
from bayesopt_chain.runs.table import (
    BUFFER,
    LEAF,
    LOSS,
    STEP,
    Group,
    Shard,
    Writer,
    grouped,
    read_index,
    side_by_side,
    writers_of,
)

Reduce = Literal["mean", "log_mean_exp", "stack"]


class Draws:
    """Draws of parameters, in the order in which they were made.

    Made by :func:`bayesopt_chain.sample`, :meth:`open` and :meth:`from_trees`. Slices and :meth:`thin` share what they hold
    with the draws they come from.

    Attributes:
        chains: number of chains stacked on axis 1 of every leaf, or ``None`` for a single chain without that axis.
        complete: whether the run reached its last step.
        why: why it stopped, if it is not complete.
        last: ``(params, state)`` after the last step, or ``None``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> draws = bc.Draws.from_trees([{"w": torch.tensor([float(i)])} for i in range(4)])
        >>> len(draws), draws.params["w"].shape, draws[1:3].params["w"].mean()
        (4, torch.Size([4, 1]), tensor(1.5000))
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        spec: Any,
        names: Sequence[str],
        *,
        chains: int | None = None,
        rows: Sequence[tuple[int, int]] | None = None,
        complete: bool = True,
        why: str = "",
        last: tuple[Any, Any] | None = None,
    ) -> None:
        self._shards = list(shards)
        self._spec = spec
        self._names = list(names)
        self._rows = [(k, i) for k, s in enumerate(self._shards) for i in range(s.size)] if rows is None else list(rows)
        self.chains = chains
        self.complete = complete
        self.why = why
        self.last = last

    @classmethod
    def from_trees(cls, trees: Iterable[Any], *, chains: int | None = None) -> Draws:
        """Draws from a sequence of parameter trees.

        Args:
            trees: at least one tree; copies are made.
            chains: the length of axis 0 of every leaf, if the trees are of stacked chains.
        """
        trees = list(trees)
        if not trees:
            raise ValueError("Draws.from_trees: no trees were given")
        flat = [checkpoint.flat(tree)[0] for tree in trees]
        spec = optree.tree_structure(trees[0], none_is_leaf=True)
        leaves = {LEAF + name: torch.stack([tree[name] for tree in flat]) for name in flat[0]}
        leaves[STEP] = torch.arange(1, len(flat) + 1)
        return cls([Shard(len(flat), leaves)], spec, list(flat[0]), chains=chains)

    @classmethod
    def open(cls, path: str | Path | Sequence[str | Path], *, like: Any = None) -> Draws:
        """Open the draws of a directory that :func:`bayesopt_chain.sample` wrote; nothing is read yet.

        Those that several ranks wrote, one number of ranks after another perhaps, stand side by side on the axis of chains.

        Args:
            path: the directory; a list of them, or a pattern such as ``"runs/job-*"``, opens the chains of several runs as one.
            like: the parameters, for their structure. Without it the tree is a nested dictionary of the names in the paths.
                Draws of DTensors come spread as these parameters are, and whole where these are plain tensors, or without it.

        Raises:
            FileNotFoundError: no run, or a shard of it is missing.
            ValueError: a damaged index, or other parameters than ``like``; parts of several ranks that drew the same noise.
        """
        given = path if isinstance(path, (list, tuple)) else [path]
        paths = [Path(str(p)) for g in given for p in (sorted(glob.glob(str(g))) if glob.has_magic(str(g)) else [g])]
        return _opened(paths, like)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        chains = "" if self.chains is None else f" of {self.chains} chains"
        why = "" if self.complete else f", incomplete: {self.why}"
        return f"Draws({len(self)} draws{chains}, {len(self._names)} leaves{why})"

    @overload
    def __getitem__(self, at: int) -> Any: ...

    @overload
    def __getitem__(self, at: slice) -> Draws: ...

    def __getitem__(self, at: int | slice) -> Any:
        """One draw as a tree of parameters, or some of the draws."""
        if isinstance(at, slice):
            return self._with(self._rows[at])
        k, i = self._rows[at]
        held = self._shards[k].load()
        return self._tree([held[LEAF + name][i] for name in self._names])

    def __iter__(self) -> Iterator[Any]:
        """The draws one by one; of draws on disk one shard is held at a time."""
        current, held = None, {}
        for k, i in self._rows:
            if k != current:
                current, held = k, self._shards[k].load()
            yield self._tree([held[LEAF + name][i] for name in self._names])

    def thin(self, every: int) -> Draws:
        """Every ``every``-th draw, the first among them."""
        if every < 1:
            raise ValueError(f"Draws.thin: every must be at least 1, got {every}")
        return self[::every]

    @property
    def params(self) -> Any:
        """The tree of parameters with all draws stacked on axis 0 (read into memory if on disk)."""
        return self._tree([self._column(LEAF + name) for name in self._names])

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers that belong to each draw, by name, stacked on axis 0 like the parameters; often none."""
        return {name: self._column(BUFFER + name) for name in self._buffer_names}

    @property
    def steps(self) -> Tensor:
        """The number of the step after which each draw was taken, int64 ``[S]``, counted from 1."""
        return self._column(STEP)

    @property
    def loss(self) -> Tensor:
        """The loss that the step of each draw reported, at the parameters it started from, ``[S]`` or ``[S, chains]``."""
        return self._column(LOSS)

    def merge(self, *others: Draws) -> Draws:
        """These draws followed by others of the same parameters.

        Raises:
            ValueError: other leaves or buffers, or another number of chains.
        """
        shards, rows = list(self._shards), list(self._rows)
        for other in others:
            mine, theirs = ((sorted(x._names), x._buffer_names, x.chains) for x in (self, other))
            if mine != theirs:
                raise ValueError(f"Draws.merge: {other!r} has other leaves or chains than {self!r}")
            rows += [(k + len(shards), i) for k, i in other._rows]
            shards += other._shards
        complete = self.complete and all(other.complete for other in others)
        return Draws(shards, self._spec, self._names, chains=self.chains, rows=rows, complete=complete, why=self.why)

    def stack_chains(self, *others: Draws) -> Draws:
        """These draws and those of other chains at the same steps, side by side on the axis of chains, in memory.

        Where one has fewer draws than another, those that all have.

        Raises:
            ValueError: other leaves, or draws after other steps.
        """
        every = [self, *others]
        size = min(map(len, every))
        columns = [draws[:size].columns() for draws in every]
        if any(
            c.keys() != columns[0].keys() or (c and not torch.equal(c[STEP], columns[0][STEP])) for c in columns[1:]
        ):
            raise ValueError("Draws.stack_chains: these are draws of other leaves, or after other steps")
        stacked = {STEP: columns[0][STEP]} if size else {}
        for name in columns[0].keys() - {STEP}:
            rows = [c[name][:, None] if d.chains is None else c[name] for c, d in zip(columns, every)]
            stacked[name] = torch.cat(rows, 1)
        complete = all(d.complete and len(d) == size for d in every)
        why = next((d.why for d in every if d.why), "" if complete else "some of the chains have more draws")
        return self.with_columns(stacked, chains=sum(d.chains or 1 for d in every), complete=complete, why=why)

    def gather(self, mesh: Any) -> Draws:
        """The draws of all ranks of a mesh, side by side on the axis of chains, in memory on every rank.

        Raises:
            ValueError: on every rank, draws of other leaves or steps.
        """
        mine = self.columns()
        kinds = {name: (x.dtype, tuple(x.shape)) for name, x in mine.items()}
        every = gather_objects((kinds, self.chains, self.complete, self.why), mesh)
        if any(their[0].keys() != kinds.keys() for their in every):
            raise ValueError(
                "gather: the ranks' draws have other leaves; run the same chains over the same parameters on each"
            )
        columns: list[dict[str, Tensor]] = [{} for _ in every]
        device = torch.device(mesh.device_type)
        for name, x in mine.items():
            sizes = [their[0][name][0].itemsize * torch.Size(their[0][name][1]).numel() for their in every]
            sent = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
            sent[: sizes[mesh.get_local_rank()]] = x.detach().contiguous().reshape(-1).view(torch.uint8).to(device)
            came = [torch.empty_like(sent) for _ in every]
            dist.all_gather(came, sent, group=mesh.get_group())
            for column, their, raw, n in zip(columns, every, came, sizes):
                dtype, shape = their[0][name]
                column[name] = raw[:n].clone().view(dtype).view(shape).to(x.device)
        parts = [
            self.with_columns(column, chains=chains, complete=complete, why=why)
            for column, (_, chains, complete, why) in zip(columns, every)
        ]
        return parts[0].stack_chains(*parts[1:])

    def columns(self) -> dict[str, Tensor]:
        """Everything that is held of the draws, by name, draws on axis 0."""
        names = self._shards[self._rows[0][0]].load() if self._rows else ()
        return {name: self._column(name) for name in names}

    def with_columns(self, columns: dict[str, Tensor], *, chains: int | None, complete: bool, why: str) -> Draws:
        """Draws of the same parameters that hold these columns."""
        shards = [Shard(len(columns[STEP]), columns)] if columns else []
        return Draws(shards, self._spec, self._names, chains=chains, complete=complete, why=why)

    @torch.no_grad()
    def predict(
        self,
        forward: Callable[[Any, Any], Tensor],
        batches: Iterable[Any],
        *,
        transform: Callable[[Tensor], Tensor] | None = None,
        reduce: Reduce = "mean",
        chunk: int = 32,
    ) -> Tensor:
        """Average what the model says over draws and chains.

        Args:
            forward: ``forward(params, batch) -> outputs [B, *event]``, with parameters of one draw of one chain. Where
                the draws hold buffers: that of :func:`bayesopt_chain.make_functional`, its module in ``eval`` mode, or
                a function of ``(params, batch, buffers)``.
            batches: batches to go through once, such as a DataLoader; the results are concatenated along the data.
            transform: applied to the outputs of each draw, such as ``lambda x: x.softmax(-1)`` or, with
                ``reduce="log_mean_exp"``, ``lambda x: x.log_softmax(-1)``.
            reduce: ``"mean"``; ``"log_mean_exp"``, the logarithm of the mean of exponentials, for log probabilities; or
                ``"stack"``, which keeps the draws (and chains, flattened) on axis 0.
            chunk: so many draws in one batched forward (by ``torch.vmap``); models that it refuses run one by one.

        Returns:
            ``[N, *event]``, or ``[S * chains, N, *event]``.

        Raises:
            ValueError: no draws or no batches; a function that leaves out the draws' buffers, or a module in ``train``
                mode that would.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([torch.tensor([0.0]), torch.tensor([2.0])])
            >>> draws.predict(lambda w, x: x * w, [torch.ones(3)])
            tensor([1., 1., 1.])
        """
        if reduce not in ("mean", "log_mean_exp", "stack"):
            raise ValueError(f"predict: reduce is 'mean', 'log_mean_exp' or 'stack', got {reduce!r}")
        if not len(self):
            raise ValueError("predict: there are no draws; run longer, or with a shorter burn-in")
        run = Forward(buffered_forward(forward) if self._buffer_names else lambda p, batch, _: forward(p, batch))
        out = []
        for batch in batches:
            average = Average(reduce)
            for block, buffers in self._blocks(chunk):
                y = run(block, batch, buffers)
                average.add(y if transform is None else transform(y))
            out.append(average.value)
        if not out:
            raise ValueError(
                "predict: batches is empty; an iterator can be gone through only once, pass a list or a loader"
            )
        return torch.cat(out, 1 if reduce == "stack" else 0)

    def to_arviz(self, *, log_likelihood: Tensor | None = None, **names: str) -> Any:
        """The draws as ArviZ inference data: posterior, sample statistics, and the log likelihood if given.

        Args:
            log_likelihood: of every datum under every draw, ``[S, N]`` or ``[S, chains, N]``; with it ``arviz.loo`` and
                ``arviz.waic`` work.
            names: a name for a leaf's path, as ``names={"layer/weight": "w"}``.

        Returns:
            ``arviz.InferenceData``; variables are the leaves' paths with dots, dimensions (chain, draw, ...).
        """
        import arviz

        def laid_out(x: Tensor) -> Any:
            x = x[:, None] if self.chains is None else x
            return x.transpose(0, 1).contiguous().to(torch.float64).numpy()

        posterior = {
            names.get(name, name.replace("/", ".")): laid_out(self._column(LEAF + name)) for name in self._names
        }
        stats = {"step": laid_out(self.steps if self.chains is None else self.steps[:, None].expand(-1, self.chains))}
        if all(LOSS in shard.load() for shard in self._shards):
            stats["loss"] = laid_out(self.loss)
        likelihood = None if log_likelihood is None else {"y": laid_out(log_likelihood)}
        return arviz.from_dict(posterior=posterior, sample_stats=stats, log_likelihood=likelihood)

    def verify(self) -> None:
        """Compare every shard on disk with its checksum.

        Raises:
            ValueError: the first damaged shard, by name.
        """
        for files in {id(cell.files): cell.files for shard in self._shards for cell in shard.cells}.values():
            for i, part in enumerate(files.about["parts"]):
                for name in part["sums"]:
                    files.piece(i, name)

    def _with(self, rows: Sequence[tuple[int, int]]) -> Draws:
        return Draws(
            self._shards, self._spec, self._names, chains=self.chains, rows=rows, complete=self.complete, why=self.why
        )

    def _tree(self, leaves: list[Tensor]) -> Any:
        return optree.tree_unflatten(self._spec, leaves)

    def _column(self, name: str) -> Tensor:
        held: dict[int, Tensor] = {}
        for k, _ in self._rows:
            if k not in held:
                held[k] = self._shards[k].load()[name]
        if not self._rows:
            raise ValueError("Draws: there are none; run longer, or with a shorter burn-in")
        whole = len(held) == 1 and self._rows == [(k, i) for k in held for i in range(len(held[k]))]
        return next(iter(held.values())) if whole else torch.stack([held[k][i] for k, i in self._rows])

    @property
    def _buffer_names(self) -> list[str]:
        held = self._shards[0].load() if self._shards else {}
        return sorted(name.removeprefix(BUFFER) for name in held if name.startswith(BUFFER))

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Draws:
        """The same draws with these buffers, leaves ``[S, ...]`` or ``[S, chains, ...]``, in the place of their own."""
        leaves = {LEAF + name: self._column(LEAF + name) for name in self._names}
        leaves |= {BUFFER + name: x for name, x in buffers.items()}
        leaves |= {name: self._column(name) for name in (STEP, LOSS) if all(name in s.load() for s in self._shards)}
        shard = Shard(len(self), leaves)
        return Draws(
            [shard], self._spec, self._names, chains=self.chains, complete=self.complete, why=self.why, last=self.last
        )

    def _blocks(self, chunk: int) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        """Trees with at most ``chunk`` draws (of single chains) on axis 0, and the buffers that belong to them."""
        if chunk < 1:
            raise ValueError(f"predict: chunk must be at least 1, got {chunk}")
        step = max(1, chunk // (self.chains or 1))
        for start in range(0, len(self), step):
            some = self[start : start + step]
            block: Any = (some.params, some.buffers)
            if self.chains is not None:
                block = optree.tree_map(lambda x: x.flatten(0, 1), block)
            yield block


def buffered_forward(forward: Any) -> Callable[[Any, Any, Any], Tensor]:
    """A function of params, batch and buffers from what a user passed.

    Raises:
        ValueError: it takes no buffers, or its module is in ``train`` mode.
    """
    if hasattr(forward, "with_buffers"):
        if forward.module.training:
            raise ValueError(
                "predict: the module is in train mode, so that BatchNorm would take the statistics of the batch "
                "instead of those the draws hold; call module.eval() first"
            )
        return lambda params, batch, buffers: forward.with_buffers(params, batch, buffers)[0]
    try:
        inspect.signature(forward).bind(None, None, None)
    except TypeError:
        raise ValueError(
            "predict: these draws hold buffers of their own (BatchNorm's statistics), and this function takes none: pass the "
            "forward of bc.make_functional(module), or a function of (params, batch, buffers)"
        ) from None
    return forward


class Forward:
    """A model at many draws at once by ``vmap``; one by one from the first time that vmap refuses it."""

    def __init__(self, forward: Callable[[Any, Any, Any], Tensor]) -> None:
        self.forward = forward
        self.batched = True

    def __call__(self, draws: Any, batch: Any, buffers: Any) -> Tensor:
        """Outputs ``[S, B, *event]`` for parameters and buffers ``[S, ...]``."""
        size = optree.tree_leaves(draws)[0].shape[0]
        if self.batched and size > 1:
            try:
                return torch.vmap(lambda p, b: self.forward(p, batch, b), randomness="error")(draws, buffers)
            except RuntimeError:
                self.batched = False
        both: Any = (draws, buffers)
        singles = [optree.tree_map(lambda x, i=i: x[i], both) for i in range(size)]
        return torch.stack([self.forward(p, batch, b) for p, b in singles])


class Average:
    """A running mean, log-mean-exp or stack over axis 0 of what is added."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce
        self.count = 0
        self.total: Tensor | None = None
        self.parts: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Add a block ``[S, ...]``."""
        self.count += len(x)
        if self.reduce == "stack":
            self.parts.append(x)
            return
        block = x.logsumexp(0) if self.reduce == "log_mean_exp" else x.sum(0)
        if self.total is None:
            self.total = block
        else:
            self.total = torch.logaddexp(self.total, block) if self.reduce == "log_mean_exp" else self.total + block

    @property
    def value(self) -> Tensor:
        """The result so far."""
        if self.reduce == "stack":
            return torch.cat(self.parts)
        if self.total is None:
            raise ValueError("nothing was added yet")
        return self.total - math.log(self.count) if self.reduce == "log_mean_exp" else self.total / self.count


def _opened(paths: Sequence[Path], like: Any) -> Draws:
    """The draws of all writers of these runs, side by side."""
    if not paths:
        raise FileNotFoundError("Draws.open: no directory is named, or none fits the pattern")
    groups, every = list[Group](), list[Writer]()
    for path in paths:
        writers = writers_of(path)
        if not writers:
            if any(path.glob("*/lock")):
                raise FileNotFoundError(
                    f"Draws.open: none of the ranks that began a run in {path} has committed a draw yet"
                )
            read_index(path)
        groups += _groups_of(path, writers)
        every += writers
    first = every[0].index
    for w in every:
        differing = [k for k in ("burn_in", "thinning", "tree") if w.index[k] != first[k]]
        if differing:
            raise ValueError(f"Draws.open: {w.folder} and {every[0].folder} hold runs with another {differing[0]}")
    _require_chains_of_their_own(groups)
    spec, names = _leaves(every[0], like)
    shards = side_by_side(groups, None if like is None else checkpoint.flat(like)[0])
    newest = [g.newest for g in groups if g.newest is not None]
    even = len({sum(s.draws for s, _ in g.segments) for g in groups}) == 1
    complete = even and all(w.index["complete"] for w in newest)
    why = next(
        (w.index["why"] for w in newest if w.index["why"]),
        "" if complete else "some of the chains have more draws" if not even else "",
    )
    stacked = len(groups) > 1 or groups[0].stacked
    chains = sum(
        len(g.chains) if g.newest is None or g.newest.chains is not None else g.newest.index["chains"] or 1
        for g in groups
    )
    return Draws(shards, spec, names, chains=chains if stacked else None, complete=complete, why=why)


def _groups_of(path: Path, writers: Sequence[Writer]) -> list[Group]:
    """All chains of a run.

    Raises:
        FileNotFoundError: nobody holds some of them.
    """
    if any(w.chains is None for w in writers):
        size = writers[0].index["rank"][1]
        if len(writers) < size:
            raise FileNotFoundError(
                f"Draws.open: {path} holds runs of {len(writers)} of {size} ranks; restore the others"
            )
        return [grouped([w], range(1))[0] for w in writers]
    total = writers[0].index["total"]
    groups = grouped(writers, range(total))
    if missing := [group.chains for group in groups if group.newest is None]:
        raise FileNotFoundError(
            f"Draws.open: {path} holds no draws of {shown(missing[0])} of {total}; restore the folder "
            "of the rank that ran them, or go on with the run"
        )
    return groups


def _require_chains_of_their_own(groups: Sequence[Group]) -> None:
    """Refuse chains that drew the same noise: they have a key in common, or the same first draw.

    Raises:
        ValueError: naming two of them.
    """
    seen: dict[Any, Group] = {}
    for g in groups:
        if g.newest is None:
            continue
        alone = (
            [key for key in g.newest.index["keys"]] if g.newest.chains is None or len(g.newest.chains) == g.size else []
        )
        told: list[Any] = [*alone]
        if g.segments and g.newest.chains is None:
            segment, _ = g.segments[0]
            told.append(
                (
                    "draws",
                    *sorted(
                        crc for p in segment.files.about["parts"] for n, crc in p["sums"].items() if n.startswith(LEAF)
                    ),
                )
            )
        for key in told:
            other = seen.setdefault(key, g)
            if other is not g and other.newest is not g.newest and other.newest is not None:
                raise ValueError(
                    f"Draws.open: {other.newest.folder.name} and {g.newest.folder.name} drew the same noise, since their ranks "
                    "were seeded alike: they are one chain, not two. Make the chains with bc.parallel(step, n, mesh=mesh), or "
                    "seed each rank differently"
                )


def _leaves(writer: Writer, like: Any) -> tuple[Any, list[str]]:
    """Structure and names of the parameters, after ``like`` or the names in the paths."""
    names = writer.index["leaves"]
    if like is None:
        tree = nested(dict.fromkeys(names, 0))
        return optree.tree_structure(tree, none_is_leaf=True), list(checkpoint.flat(tree)[1])
    mine = list(checkpoint.flat(like)[0])
    if sorted(mine) != sorted(names):
        raise ValueError(f"Draws.open: {writer.folder} holds leaves {sorted(names)}, like has {sorted(mine)}")
    return optree.tree_structure(like, none_is_leaf=True), mine


def shown(chains: range) -> str:
    """Consecutive chains in words."""
    return f"chain {chains.start}" if len(chains) == 1 else f"chains {chains.start} to {chains.stop - 1}"


def nested(flat: Mapping[str, Any]) -> Any:
    """A nested dictionary from one with paths as keys."""
    return flat["tensor"] if list(flat) == ["tensor"] else merged({}, flat)


def merged(tree: Any, flat: Mapping[str, Any]) -> Any:
    """Nested dictionaries with these values in them too, by their paths."""
    out: Any = optree.tree_map(lambda x: x, tree)
    for name, value in flat.items():
        *folders, last = name.split("/")
        inner = out
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    return out
