"""Draws of a sampler: in memory or on disk, stacked on axis 0 (draw, then chain), and what is asked of them.

    predictive   p(y | x, D) = 1/S sum_s p(y | f(theta_s, x))        a mean of probabilities, not of outputs

A run on disk is a directory: ``index.json`` names the shards, safetensors files with a few draws each, in order. The index
is written last, so that a directory always holds whole draws.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import optree
import torch
from torch import Tensor

from bayesopt_chain.distributed.checkpoint import Table
from bayesopt_chain.loop import checkpoint
from bayesopt_chain.loop.layouts import Group, Part, grouped, part_folders, parts_of, ranks_of, read_index

STEP, LOSS, LEAF, BUFFER = "_step", "_loss", "params/", "buffers/"
Reduce = Literal["mean", "log_mean_exp", "stack"]


class Shard(NamedTuple):
    """Consecutive draws: leaves ``[S, ...]`` by name, or a file of them, or of a file some chains.

    Of parameters spread over ranks the file is a directory, and its leaves come spread as those of ``like``.
    """

    size: int
    leaves: dict[str, Tensor] | None
    path: Path | None
    checksum: int | None = None
    chains: slice | None = None
    like: Mapping[str, Any] | None = None

    def load(self) -> Mapping[str, Tensor]:
        """All leaves; a file is mapped into memory, and read where it is looked at."""
        held = self._held()
        if self.chains is None:
            return held
        return {name: x if name == STEP else x[:, self.chains] for name, x in held.items()}

    def _held(self) -> Mapping[str, Tensor]:
        if self.leaves is not None:
            return self.leaves
        assert self.path is not None
        if not self.path.exists():
            raise FileNotFoundError(
                f"Draws: the shard {self.path} is missing; restore it, or open a copy of the directory that has it"
            )
        if self.path.is_dir():
            return Table(self.path, {LEAF + name: x for name, x in (self.like or {}).items()})
        tensors, _ = checkpoint.read(self.path, verify=False)
        return tensors


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
        return cls([Shard(len(flat), leaves, None)], spec, list(flat[0]), chains=chains)

    @classmethod
    def open(cls, path: str | Path, *, like: Any = None) -> Draws:
        """Open the draws of a directory that :func:`bayesopt_chain.sample` wrote; nothing is read yet.

        Those that several ranks wrote, one number of ranks after another perhaps, are read into memory, side by side on
        the axis of chains (:meth:`beside`).

        Args:
            path: the directory.
            like: the parameters, for their structure. Without it the tree is a nested dictionary of the names in the paths.
                Draws of DTensors come spread as these parameters are, and whole where these are plain tensors, or without it.

        Raises:
            FileNotFoundError: no run, or a shard of it is missing.
            ValueError: a damaged index, or other parameters than ``like``; parts of several ranks that drew the same noise.
        """
        path = Path(path)
        if ((parts := parts_of(path)) and [part.folder for part in parts] != [path]) or part_folders(path):
            return _open_parts(path, parts, like)
        return _open_one(Part(path, read_index(path)), like)

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

    def beside(self, *others: Draws) -> Draws:
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
            raise ValueError("Draws.beside: these are draws of other leaves, or after other steps")
        stacked = {STEP: columns[0][STEP]} if size else {}
        for name in columns[0].keys() - {STEP}:
            rows = [c[name][:, None] if d.chains is None else c[name] for c, d in zip(columns, every)]
            stacked[name] = torch.cat(rows, 1)
        complete = all(d.complete and len(d) == size for d in every)
        why = next((d.why for d in every if d.why), "" if complete else "some of the chains have more draws")
        return self.holding_columns(stacked, chains=sum(d.chains or 1 for d in every), complete=complete, why=why)

    def columns(self) -> dict[str, Tensor]:
        """Everything that is held of the draws, by name, draws on axis 0."""
        names = self._shards[self._rows[0][0]].load() if self._rows else ()
        return {name: self._column(name) for name in names}

    def holding_columns(self, columns: dict[str, Tensor], *, chains: int | None, complete: bool, why: str) -> Draws:
        """Draws of the same parameters that hold these columns."""
        shards = [Shard(len(columns[STEP]), columns, None)] if columns else []
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
        run = Forward(with_buffers(forward) if self._buffer_names else lambda p, batch, _: forward(p, batch))
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
            ValueError: the first damaged shard, by name; draws of DTensors, which have no checksums.
        """
        for shard in self._shards:
            if shard.path is not None and shard.checksum is None:
                raise ValueError(f"Draws.verify: {shard.path} was written by several ranks and has no checksum")
            if shard.path is not None:
                checkpoint.read(shard.path, verify=True)

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

    def holding(self, buffers: Mapping[str, Tensor]) -> Draws:
        """The same draws with these buffers, leaves ``[S, ...]`` or ``[S, chains, ...]``, in the place of their own."""
        leaves = {LEAF + name: self._column(LEAF + name) for name in self._names}
        leaves |= {BUFFER + name: x for name, x in buffers.items()}
        leaves |= {name: self._column(name) for name in (STEP, LOSS) if all(name in s.load() for s in self._shards)}
        shard = Shard(len(self), leaves, None)
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


def with_buffers(forward: Any) -> Callable[[Any, Any, Any], Tensor]:
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


def shards_of(part: Part, chains: range | None = None, like: Mapping[str, Any] | None = None) -> list[Shard]:
    """The draws of a part, or of some of its chains; those of DTensors spread as the leaves of ``like``, by name.

    Raises:
        FileNotFoundError: a file that the index names is missing.
    """
    first, rows = part.chains, None
    if chains is not None and first is not None and chains != first:
        rows = slice(chains.start - first.start, chains.stop - first.start)
    shards = [Shard(s["draws"], None, part.folder / s["file"], s["checksum"], rows, like) for s in part.index["shards"]]
    for shard in shards:
        if shard.path is not None and not shard.path.exists():
            raise FileNotFoundError(f"Draws: the shard {shard.path} is missing; restore it from a copy")
    return shards


def draws_of(group: Group, spec: Any, names: Sequence[str]) -> Draws:
    """What the parts of a group hold of its chains, one part after the other."""
    shards = [shard for part in group.parts for shard in shards_of(part, group.chains)]
    last = group.parts[-1].index
    return Draws(shards, spec, names, chains=len(group.chains), complete=last["complete"], why=last["why"])


def shards_beside(groups: Sequence[Group], spec: Any, names: Sequence[str]) -> list[Shard]:
    """The draws that several groups have, side by side: of one group on the disk, of several in memory."""
    every = [draws_of(group, spec, names) if group.parts else Draws([], spec, names) for group in groups]
    return (every[0].beside(*every[1:]) if every[1:] else every[0])._shards


def _open_one(part: Part, like: Any) -> Draws:
    index = part.index
    spec, names = _leaves(part, like)
    shards = shards_of(part, like=None if like is None else checkpoint.flat(like)[0])
    return Draws(shards, spec, names, chains=index["chains"], complete=index["complete"], why=index["why"])


def _leaves(part: Part, like: Any) -> tuple[Any, list[str]]:
    """Structure and names of the parameters, after ``like`` or the names in the paths."""
    names = part.index["leaves"]
    if like is None:
        tree = nested(dict.fromkeys(names, 0))
        return optree.tree_structure(tree, none_is_leaf=True), list(checkpoint.flat(tree)[1])
    mine = list(checkpoint.flat(like)[0])
    if sorted(mine) != sorted(names):
        raise ValueError(f"Draws.open: {part.folder} holds leaves {sorted(names)}, like has {sorted(mine)}")
    return optree.tree_structure(like, none_is_leaf=True), mine


def _open_parts(path: Path, parts: Sequence[Part], like: Any) -> Draws:
    """The draws of several ranks' runs."""
    if not parts:
        raise FileNotFoundError(f"Draws.open: none of the ranks that began a run in {path} has committed a draw yet")
    _require_streams_of_their_own(parts)
    if any(part.chains is None for part in parts):
        size = ranks_of(part_folders(path)[0])
        if len(parts) < size:
            raise FileNotFoundError(
                f"Draws.open: {path} holds runs of {len(parts)} of {size} ranks; restore the others"
            )
        every = [_open_one(part, like) for part in sorted(parts, key=lambda part: part.folder)]
    else:
        groups = grouped(parts, range(parts[-1].index["total"]))
        if missing := [group.chains for group in groups if not group.parts]:
            raise FileNotFoundError(
                f"Draws.open: {path} holds no draws of {shown(missing[0])} of {parts[-1].index['total']}; restore the folder "
                "of the rank that ran them, or go on with the run"
            )
        every = [draws_of(group, *_leaves(parts[-1], like)) for group in groups]
    for draws in every:
        draws.verify()
    return every[0].beside(*every[1:])


def _require_streams_of_their_own(parts: Sequence[Part]) -> None:
    """Refuse parts of different chains that drew the same noise."""
    seen: dict[int, list[Part]] = {}
    for part in parts:
        for key in part.index.get("keys", []):
            for other in seen.setdefault(key, []):
                if part.chains is None or other.chains is None or not {*part.chains} & {*other.chains}:
                    raise ValueError(
                        f"Draws.open: {other.folder.name} and {part.folder.name} drew the same noise, since their ranks were "
                        "seeded alike: they are one chain, not two. Make the chains with bc.parallel(step, n, mesh=mesh), or "
                        "seed each rank differently"
                    )
            seen[key].append(part)


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
