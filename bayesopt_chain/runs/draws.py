"""Draws of a sampler: in memory or on disk, stacked on axis 0 (draw, then chain), and what is asked of them.

    predictive   p(y | x, D) = 1/S sum_s p(y | f(theta_s, x))        a mean of probabilities, not of outputs

A run on disk is a directory of safetensors files with a few draws each (:mod:`bayesopt_chain.runs.folder`). They are read when
they are asked for: ``draws[i:j]`` and iterating read the draws that are meant, :meth:`Draws.column` some rows of one leaf, and
``draws.params`` all of them.
"""

from __future__ import annotations

import glob
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.batches import each_once
from bayesopt_chain.distributed.ranks import gather_objects, gather_tensors, require_alike, require_one_axis
from bayesopt_chain.likelihoods import Likelihood, Predictive
from bayesopt_chain.loop.parallel import unstack
from bayesopt_chain.modules import (
    Forward,
    inner_of,
    logits_of,
    make_functional,
    one_by_one,
    require_eval_mode,
    statistics,
)
from bayesopt_chain.posterior.export import Members
from bayesopt_chain.runs import files
from bayesopt_chain.runs.folder import BUFFER, LEAF, LOSS, STEP, WEIGHT, Piece, opened, row_bytes, rows_of
from bayesopt_chain.runs.inference_data import Stored, inference_data
from bayesopt_chain.trees import wide

Reduce = Literal["mean", "log_mean_exp", "stack"]
_PATHS = checks.Kind(lambda x: isinstance(x, (str, os.PathLike)), "a directory, a pattern, or a list of them")
_TREES = checks.Kind(checks.BATCHES.fits, "a sequence of trees of parameters")
_SLICE = checks.instance(slice, "a slice")
_FORWARD = checks.Kind(callable, "a function of (params, batch), or a module")
AT_ONCE = 1 << 24  # bytes of draws on disk that iterating holds
LAZY = 1 << 20  # bytes of a column on disk that ArviZ reads when it looks at it


class Draws:
    """Draws of parameters, in the order in which they were made.

    Made by :func:`bayesopt_chain.sample`, :meth:`open` and :meth:`from_trees`. Slices and :meth:`thin` share what they hold
    with the draws they come from.

    Args:
        pieces: where consecutive draws lie, in memory or on disk.
        spec: the structure of the tree of parameters.
        names: the leaves' paths, in the order of ``spec``.
        rows: the numbers of the draws that are meant, over all pieces. Default: all of them.
        chains, complete, why, last, identity: the attributes.

    Attributes:
        chains: number of chains stacked on axis 1 of every leaf, or ``None`` for a single chain without that axis.
        complete: whether the run reached its last step.
        why: why it stopped, if it is not complete.
        last: ``(params, state)`` after the last step, or ``None``.
        identity: of draws that were opened, what is known of their run and compared when it goes on: chain, data, loss, seed.
            What is ``None`` or ``"unknown"`` there is not compared.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> draws = bc.Draws.from_trees([{"w": torch.tensor([float(i)])} for i in range(4)])
        >>> len(draws), draws.params["w"].shape, draws[1:3].params["w"].mean()
        (4, torch.Size([4, 1]), tensor(1.5000))
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        spec: Any,
        names: Sequence[str],
        *,
        chains: int | None = None,
        rows: Sequence[int] | None = None,
        complete: bool = True,
        why: str = "",
        last: tuple[Any, Any] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self._pieces = list(pieces)
        self._spec = spec
        self._names = list(names)
        self._rows = range(sum(s.size for s in self._pieces)) if rows is None else rows
        self.chains = chains
        self.complete = complete
        self.why = why
        self.last = last
        self.identity = identity

    @classmethod
    @checks.takes(trees=_TREES, chains=checks.WHOLE.or_none())
    def from_trees(cls, trees: Iterable[Any], *, chains: int | None = None) -> Draws:
        """Draws from a sequence of parameter trees.

        Args:
            trees: at least one tree, or module; copies are made. A module gives its parameters by name, and its buffers with
                them. Trees of parameters alone hold no running statistics of BatchNorm: :meth:`predict` warns of that.
            chains: the length of axis 0 of every leaf, if the trees are of stacked chains.

        Returns:
            The draws, in memory.

        Raises:
            ValueError: no trees, or trees of different leaves.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.Draws.from_trees([torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)]).buffers["running_mean"].shape
            torch.Size([2, 2])
        """
        if not (trees := list(trees)):
            raise ValueError("Draws.from_trees: no trees were given")
        modules = [inner_of(tree) if isinstance(tree, nn.Module) else None for tree in trees]
        trees = [
            tree if m is None else {n: p.detach() for n, p in m.named_parameters()} for tree, m in zip(trees, modules)
        ]
        both = [files.flat(tree, "Draws.from_trees:") for tree in trees]
        flat = [tensors for tensors, _ in both]
        if not flat[0] or any(x is not None for _, others in both for x in others.values()):
            raise TypeError(
                "Draws.from_trees: trees must be of tensors alone, and of one at least; make numbers tensors"
            )
        shapes = [{name: (x.shape, x.dtype) for name, x in tree.items()} for tree in flat]
        for i, tree in enumerate(shapes):
            if wrong := sorted({name for name, _ in tree.items() ^ shapes[0].items()}):
                raise ValueError(f"Draws.from_trees: trees[{i}] and trees[0] differ in {', '.join(wrong[:4])}")
        for name, (shape, _) in shapes[0].items():
            if chains is not None and shape[:1] != (chains,):
                raise ValueError(
                    f"Draws.from_trees: chains={chains} counts axis 0 of every leaf, and {name} has shape {tuple(shape)}"
                )
        spec = optree.tree_structure(trees[0])
        leaves = {LEAF + name: torch.stack([tree[name] for tree in flat]) for name in flat[0]}
        if all(m is not None for m in modules):
            buffers = [dict(m.named_buffers()) for m in modules if m is not None]
            leaves |= {BUFFER + name: torch.stack([b[name].detach() for b in buffers]) for name in buffers[0]}
        leaves[STEP] = torch.arange(1, len(flat) + 1, device="cpu")
        return cls([Piece(len(flat), leaves)], spec, list(flat[0]), chains=chains)

    @classmethod
    @checks.takes(like=checks.TREE.or_none(), damaged=checks.one_of("refuse", "skip"))
    def open(
        cls,
        path: str | Path | Sequence[str | Path],
        *,
        like: Any = None,
        damaged: Literal["refuse", "skip"] = "refuse",
    ) -> Draws:
        """Open the draws of a directory that :func:`bayesopt_chain.sample` wrote; only what is asked for is read.

        Those that several ranks wrote, one number of ranks after another perhaps, stand side by side on the axis of chains.

        Args:
            path: the directory; a list of them, or a pattern such as ``"runs/job-*"``, opens the chains of several runs as one.
                The name of a directory that is there is no pattern.
            like: the parameters, for their structure and device. Without it the tree is a nested dictionary of the names in
                the paths, on the CPU. Draws of DTensors come sharded as these parameters are, and whole where these are plain
                tensors, or without it.
            damaged: ``"refuse"`` raises an error that names the damaged file when its draws are read; ``"skip"`` reads
                every file now, and leaves out the draws of damaged ones, with a warning that names each.

        Returns:
            The draws.

        Raises:
            FileNotFoundError: no run, or a file of it is missing.
            ValueError: a damaged file, or other parameters than ``like``; parts of several ranks that drew the same noise.

        Example:
            >>> import tempfile, torch, bayesopt_chain as bc
            >>> tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.zeros(2)}
            >>> step, folder = bc.make_step(lambda p, batch: (p["w"] ** 2).mean(), tx), tempfile.mkdtemp()
            >>> _ = bc.sample(step, params, tx.init(params), None, steps=20, path=folder)
            >>> bc.Draws.open(folder)[::10].params["w"].shape
            torch.Size([2, 2])
        """
        for one in (given := path if isinstance(path, (list, tuple)) else [path]):
            _PATHS("Draws.open: path", one)
        # The name of what is there is no pattern.
        named = [[g] if os.path.lexists(g) or not glob.has_magic(g) else sorted(glob.glob(g)) for g in map(str, given)]
        pieces, spec, names, about = opened(
            [Path(p).absolute() for paths in named for p in paths], like, damaged == "skip"
        )
        return cls(pieces, spec, names, **about)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        told = ("" if self.chains is None else f" of {self.chains} chains") + f", {len(self._names)} leaves"
        return f"Draws({len(self)} draws{told}{'' if self.complete else f', incomplete: {self.why}'})"

    @overload
    def __getitem__(self, at: int) -> Any: ...

    @overload
    def __getitem__(self, at: slice) -> Draws: ...

    def __getitem__(self, at: int | slice) -> Any:
        """One draw as a tree of parameters, or some of the draws."""
        if isinstance(at, slice):
            return self._with(self._rows[at])
        try:
            row = self._rows[at]
        except (IndexError, TypeError) as err:
            raise type(err)(
                f"draws[i]: i must be a number of one of the {len(self)} draws, or a slice, got {checks.short(at)}"
            ) from err
        return next(iter(self._with([row])))

    def __iter__(self) -> Iterator[Any]:
        """The draws one by one, as copies, from which a step in place may start; of draws on disk a few are read at a time."""
        names = [LEAF + name for name in self._names] if len(self) else []
        some = self.at_once()
        for start in range(0, len(self), some):
            blocks = [rows_of(self._pieces, self._rows[start : start + some], name) for name in names]
            for i in range(min(some, len(self) - start)):
                yield self._tree([block[i].clone() for block in blocks])

    def at_once(self) -> int:
        """How many draws are read together by what goes through them: of those on disk some 16 MB, at least one.

        Returns:
            A number of draws.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.Draws.from_trees([{"w": torch.zeros(2**20)}] * 9).at_once()
            4
        """
        return max(1, AT_ONCE * len(self) // max(1, self._bytes()))

    @checks.takes(device=checks.Kind(lambda x: isinstance(x, (str, torch.device)), "a device of torch, such as 'cpu'"))
    def to(self, device: torch.device | str) -> Draws:
        """These draws on a device; what is on disk comes there when it is read. Their steps stay on the CPU.

        Those of :func:`bayesopt_chain.sample` are on the device of the parameters that it ran, those of :meth:`open` on that of
        ``like``.

        Args:
            device: of torch, such as ``"cpu"``.

        Returns:
            Draws that share what they hold with these where it is there already.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.Draws.from_trees([{"w": torch.zeros(2)}]).to("cpu").params["w"].device
            device(type='cpu')
        """
        return self._with(self._rows, [piece.to(torch.device(device)) for piece in self._pieces], self.last)

    @checks.takes(every=checks.WHOLE)
    def thin(self, every: int) -> Draws:
        """Every ``every``-th draw, the first among them.

        Args:
            every: how many draws it is from one to the next, at least 1.

        Returns:
            Draws that share what they hold with these.

        Raises:
            ValueError: ``every`` is no whole number, or smaller than 1.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.Draws.from_trees([{"w": torch.tensor(float(i))} for i in range(5)]).thin(2).params["w"]
            tensor([0., 2., 4.])
        """
        return self[::every]

    @property
    def params(self) -> Any:
        """The tree of parameters with all draws stacked on axis 0, read into memory if on disk.

        Raises:
            ValueError: there are no draws, or those on disk are larger than half of the machine's memory.
        """
        if self._is_stored and (size := self._bytes()) > largest():
            raise ValueError(
                f"Draws.params: {len(self)} draws on disk are {size / 2**30:.3g} GiB, more than half of this machine's memory: "
                "take some of them (draws[i:j], draws.thin(n)), iterate, or read one leaf, draws.column('params/...', rows)"
            )
        return self._tree([self.column(LEAF + name) for name in self._names])

    def _bytes(self) -> int:
        return len(self) * sum(row_bytes(self._pieces, LEAF + name) for name in self._names if len(self))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each leaf of one draw by its path, ``[...]`` or ``[chains, ...]``; nothing is read.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.Draws.from_trees([{"w": torch.zeros(2, 3)}]).shapes
            {'w': (2, 3)}
        """
        return {name: self._pieces[0].kind(LEAF + name)[1] for name in self._names} if self._pieces else {}

    @property
    def _is_stored(self) -> bool:
        return any(piece.parts for piece in self._pieces)

    @checks.takes(rows=_SLICE, elements=_SLICE)
    def column(self, name: str, rows: slice = slice(None), elements: slice | None = None) -> Tensor:
        """Some rows of one column, or some elements of them; of draws on disk only their blocks are read.

        Args:
            name: ``"params/..."`` with a leaf's path, ``"buffers/..."``, ``"_step"``, ``"_loss"`` or ``"_weight"``.
            rows: which of the draws.
            elements: which elements of each draw, taken as flat; consecutive ones.

        Returns:
            ``[S, ...]``, or ``[S, elements]``.

        Raises:
            ValueError: there is no such column, no draw, or elements that are not consecutive; a damaged file.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([{"w": torch.arange(4.0) + i} for i in range(3)])
            >>> draws.column("params/w", slice(1, 3), slice(0, 2))
            tensor([[1., 2.],
                    [2., 3.]])
        """
        if not len(self):
            raise ValueError("Draws: there are none; run longer, or with a shorter burn-in")
        if not isinstance(name, str) or not self._has(name):
            raise ValueError(
                f"Draws.column: name is {' or '.join(sorted(self._pieces[0].names())[:8])}, got {name!r:.100}"
            )
        if elements is None:
            return rows_of(self._pieces, self._rows[rows], name)
        low, high, step = elements.indices(math.prod(self._pieces[0].kind(name)[1]))
        if step != 1:
            raise ValueError(f"Draws.column: elements must be consecutive, got {elements}")
        return rows_of(self._pieces, self._rows[rows], name, (low, max(low, high)))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers that belong to each draw, by name, stacked on axis 0 like the parameters; often none."""
        return {name: self.column(BUFFER + name) for name in self._buffer_names}

    @property
    def steps(self) -> Tensor:
        """The number of the step after which each draw was taken, int64 ``[S]``, counted from 1."""
        return self.column(STEP)

    @property
    def loss(self) -> Tensor:
        """The loss that the step of each draw reported, at the parameters it started from, ``[S]`` or ``[S, chains]``."""
        return self.column(LOSS)

    @property
    def is_weighted(self) -> bool:
        """Whether these draws count differently: then means over them are wrong without :attr:`weights`."""
        return bool(len(self)) and self._has(WEIGHT)

    @property
    def weights(self) -> Tensor:
        """How much each draw counts, ``[S]`` or ``[S, chains]``, of a chain whose draws have weights; only ratios matter.

        Such draws are the parameters that the step of their number started from, those that :attr:`loss` belongs to.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx, params = bc.samplers.samadams(0.1, 1.0, temperature=0.5, gradient_scale=1.0), torch.ones(2)
            >>> step = bc.make_step(lambda p, batch: (p**2).sum(), tx)
            >>> draws = bc.sample(step, params, tx.init(params), None, steps=20)
            >>> mean = (draws.weights[:, None] * draws.params).sum(0) / draws.weights.sum()
            >>> mean.shape
            torch.Size([2])
        """
        return self.column(WEIGHT)

    def equally_weighted(self) -> Draws:
        """As many draws of the same chains that all count the same: every mean, quantile and diagnostic takes them.

        Of each chain the draws are read at equal distances along their summed weights, in their order, so that one
        with a large weight comes several times and one with a small weight perhaps not at all.

        Returns:
            Draws in memory; these themselves, where they have no weights.

        Raises:
            ValueError: weights that are negative or not finite, or all 0.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([{"w": torch.zeros(2)}] * 3)
            >>> draws.is_weighted, draws.equally_weighted() is draws
            (False, True)
        """
        if not self.is_weighted:
            return self
        columns = self._columns()
        weights = columns.pop(WEIGHT).double().reshape(len(self), -1)
        totals = weights.sum(0)
        if not bool((weights >= 0).all() and (totals > 0).all() and totals.isfinite().all()):
            raise ValueError("Draws.equally_weighted: weights must be finite and non-negative, and not all 0")
        places = (torch.arange(len(self), dtype=torch.float64, device=weights.device) + 0.5) / len(self)
        ends = (weights.cumsum(0) / totals).T.contiguous()
        rows = torch.searchsorted(ends, places.expand_as(ends).contiguous()).clamp(max=len(self) - 1)
        for name in columns.keys() - {STEP}:
            x, at = columns[name], rows.T.to(columns[name].device)
            columns[name] = x[at[:, 0]] if self.chains is None else x[at, torch.arange(self.chains, device=x.device)]
        return self._made(columns, chains=self.chains, complete=self.complete, why=self.why)

    def stack_chains(self, *others: Draws) -> Draws:
        """These draws and those of other chains at the same steps, side by side on the axis of chains, in memory.

        Where one has fewer draws than another, those that all have.

        Args:
            others: draws of other chains of the same parameters.

        Returns:
            Draws of all chains: leaves ``[S, chains, ...]``.

        Raises:
            TypeError: what is no :class:`Draws`.
            ValueError: other leaves, or leaves of other shapes or dtypes; draws after other steps, or one chain twice.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> one, two = (bc.Draws.from_trees([{"w": torch.tensor(x)}] * 3) for x in (1.0, 2.0))
            >>> one.stack_chains(two).params["w"].shape
            torch.Size([3, 2])
        """
        for other in others:
            checks.instance(Draws, "Draws")("Draws.stack_chains: others", other)
        every = [self, *others]
        size = min(map(len, every))
        columns = [draws[:size]._columns() for draws in every]
        rows = [
            {n: (x.dtype, x.shape[1 if n == STEP or d.chains is None else 2 :]) for n, x in c.items()}
            for c, d in zip(columns, every)
        ]
        if any(r != rows[0] or (c and not torch.equal(c[STEP], columns[0][STEP])) for r, c in zip(rows, columns)):
            raise ValueError(
                "Draws.stack_chains: these are draws of other leaves, shapes or dtypes, or after other steps"
            )
        leaves = [[x for n, x in c.items() if n.startswith(LEAF)] for c in columns]
        for i, j in itertools.combinations(range(len(every)), 2):
            if size and every[i].chains == every[j].chains and all(map(torch.equal, leaves[i], leaves[j])):
                raise ValueError(
                    f"Draws.stack_chains: number {i} and number {j} are one chain, not two: every draw is the same. Start them "
                    "from states with keys of their own (bc.fork, bc.parallel)"
                )
        stacked = {STEP: columns[0][STEP]} if size else {}
        for name in columns[0].keys() - {STEP}:
            rows = [c[name][:, None] if d.chains is None else c[name] for c, d in zip(columns, every)]
            stacked[name] = torch.cat(rows, 1)
        complete = all(d.complete and len(d) == size for d in every)
        why = next((d.why for d in every if d.why), "" if complete else "some of the chains have more draws")
        return self._made(stacked, chains=sum(d.chains or 1 for d in every), complete=complete, why=why)

    def gather(self, mesh: Any) -> Draws:
        """The draws of all ranks of a mesh, side by side on the axis of chains, in memory on every rank.

        Args:
            mesh: a ``torch.distributed`` mesh of one axis; all of its ranks call this.

        Returns:
            Draws of the chains of all ranks, in the order of the ranks: leaves ``[S, chains, ...]``.

        Raises:
            TypeError: what is no mesh.
            ValueError: a mesh of several axes; on every rank, draws of other leaves or steps.

        Example:
            On each of the ranks of ``mesh``, with draws of its own chains:

            >>> def all_chains(draws, mesh):
            ...     return draws.gather(mesh).params
        """
        require_one_axis(mesh, "Draws.gather")
        mine = self._columns()
        require_alike(
            "gather: the ranks' draws have other {}; run the same chains over the same parameters on each",
            {"leaves": tuple(sorted(mine))},
            mesh,
        )
        every = gather_objects((self.chains, self.complete, self.why), mesh)
        parts = [
            self._made(columns, chains=chains, complete=complete, why=why)
            for columns, (chains, complete, why) in zip(gather_tensors(mine, mesh), every)
        ]
        return parts[0].stack_chains(*parts[1:])

    @torch.no_grad()
    @checks.takes(
        forward=_FORWARD,
        batches=checks.BATCHES,
        transform=checks.FUNCTION,
        reduce=checks.one_of("mean", "log_mean_exp", "stack"),
        chunk=checks.WHOLE,
    )
    def predict(
        self,
        forward: Callable[[Any, Any], Tensor] | nn.Module,
        batches: Any,
        *,
        transform: Callable[[Tensor], Tensor] | None = None,
        reduce: Reduce = "mean",
        chunk: int = 32,
    ) -> Tensor:
        """Average what the model says over draws and chains; of draws with weights over :meth:`equally_weighted` ones.

        Args:
            forward: ``forward(params, batch) -> outputs [B, *event]``, with parameters of one draw of one chain; or a module,
                called with the inputs of a batch (of outputs that are no tensor the ``logits`` are taken). Where the draws hold
                buffers: a module in ``eval`` mode, the function that :func:`bayesopt_chain.make_functional` made of it, or a
                function of ``(params, batch, buffers)``.
            batches: batches to go through once, such as a DataLoader or a list; the results are concatenated along the data. A
                tensor, a tuple such as ``(inputs, targets)`` or a mapping is one batch. They are on the device of the draws, to
                which :meth:`to` takes these.
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
        if not len(self):
            raise ValueError("predict: there are no draws; run longer, or with a shorter burn-in")
        if self.is_weighted:
            same = self.equally_weighted()
            return same.predict(forward, batches, transform=transform, reduce=reduce, chunk=chunk)
        if isinstance(forward, nn.Module):
            forward = make_functional(forward, outputs=logits_of).forward
        if not self._buffer_names:
            warn_of_moving_buffers(forward)
        run = at_many(buffered_forward(forward) if self._buffer_names else lambda p, batch, _: forward(p, batch))
        if isinstance(batches, (Tensor, tuple, Mapping)):
            batches = [batches] if isinstance(batches, Tensor) or len(batches) else []
        each = max(1, chunk // (self.chains or 1))

        def outputs(batch: Any) -> Iterator[Tensor]:
            for start in range(0, len(self), each):
                block, buffers = self[start : start + each].unchained()  # [S * chains, ...], chunk of them
                with checks.blaming("predict", "batches"):
                    y = run(block, batch, buffers)
                y = y if transform is None else transform(y)
                if not isinstance(y, Tensor):
                    made = "forward" if transform is None else "transform"
                    raise TypeError(f"predict: {made} must return a tensor, got {type(y).__name__}")
                if y.ndim < 2:
                    raise ValueError(
                        f"predict: forward must return outputs [B, *event] for each of the batches, got {tuple(y.shape[1:])}"
                    )
                yield y

        out = [averaged(outputs(batch), reduce) for batch in each_once(batches)]
        if not out:
            raise ValueError(
                "predict: batches is empty; an iterator can be gone through only once, pass a list or a loader"
            )
        return torch.cat(out, 1 if reduce == "stack" else 0)

    @checks.takes(forward=_FORWARD, batches=checks.BATCHES)
    def predictive(
        self,
        forward: Callable[[Any, Any], Tensor] | nn.Module,
        batches: Any,
        likelihood: Likelihood,
        *,
        chunk: int = 32,
    ) -> Predictive:
        """The predictive distribution of new targets, a mixture over draws and chains.

        Args:
            forward: as for :meth:`predict`.
            batches: as for :meth:`predict`; targets are not read.
            likelihood: of :mod:`bayesopt_chain.likelihoods`, of targets given the outputs.
            chunk: as for :meth:`predict`.

        Returns:
            A :class:`bayesopt_chain.likelihoods.Predictive`, which holds the outputs of all draws.

        Raises:
            ValueError: as :meth:`predict`.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([torch.tensor([0.0]), torch.tensor([2.0])])
            >>> p = draws.predictive(lambda w, x: x * w, torch.ones(1, 1), bc.likelihoods.gaussian(0.5))
            >>> p.mean, p.variance
            (tensor([[1.]]), tensor([[1.5000]]))
        """
        return likelihood.mixture(self.predict(forward, batches, reduce="stack", chunk=chunk))

    @checks.takes(network=checks.MODULE, likelihood=checks.LIKELIHOOD)
    def module(self, network: nn.Module, likelihood: Likelihood) -> nn.Module:
        """The predictions of all draws and chains as an ordinary module, for ``torch.export`` and ONNX.

        Args:
            network: whose parameters were drawn. The module holds a copy for each draw: :meth:`thin` first.
            likelihood: of targets given the outputs.

        Returns:
            A module that is called with the network's inputs (tensors, not batches) and returns mean and variance of the
            targets, as :meth:`predictive` has them: ``[N, *positions]``, noise included; of classes probabilities
            ``[N, *positions, C]`` and their variances.

        Raises:
            ValueError: no draws, or draws of other parameters.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
            >>> network, x = torch.nn.Linear(1, 1), torch.ones(3, 1)
            >>> mean, variance = draws.module(network, bc.likelihoods.gaussian(0.5))(x)
            >>> torch.allclose(mean, draws.predict(network, x))
            True
        """
        params, buffers = self.unchained()
        count = len(self) * (self.chains or 1)
        draws = [({k: x[i] for k, x in params.items()}, {k: x[i] for k, x in buffers.items()}) for i in range(count)]
        logs = self.weights.log().flatten().log_softmax(0) if self.is_weighted else None
        return Members(network, draws, likelihood, logs)

    @torch.no_grad()
    @checks.takes(forward=_FORWARD, batches=checks.BATCHES)
    def log_likelihood(
        self,
        forward: Callable[[Any, Any], Tensor] | nn.Module,
        batches: Any,
        likelihood: Likelihood,
        *,
        chunk: int = 32,
    ) -> Tensor:
        """The log likelihood of every datum under every draw: what leave-one-out cross-validation is made of.

        Args:
            forward: as for :meth:`predict`.
            batches: of ``(inputs, targets)``, gone through once, in the order of the data; or one such pair.
            likelihood: of targets given the outputs, as in the loss that was sampled.
            chunk: as for :meth:`predict`.

        Returns:
            ``[S, N]``, or ``[S, chains, N]``, as :meth:`to_arviz` takes it.

        Raises:
            TypeError: batches that are no pairs.
            ValueError: as :meth:`predict`; draws with weights.

        Source:
            Vehtari, Gelman and Gabry (2017), Practical Bayesian model evaluation using leave-one-out cross-validation and WAIC.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([torch.tensor([0.0]), torch.tensor([2.0])])
            >>> data = (torch.ones(3, 1), torch.zeros(3, 1))
            >>> draws.log_likelihood(lambda w, x: x * w, data, bc.likelihoods.gaussian(1.0)).shape
            torch.Size([2, 3])
        """
        if self.is_weighted:
            raise ValueError("log_likelihood: these draws have weights; take draws.equally_weighted()")
        if isinstance(batches, tuple) or (
            isinstance(batches, list) and [*map(torch.is_tensor, batches)] == [True, True]
        ):
            batches = [batches]
        said = []
        for batch in each_once(batches):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise TypeError(
                    f"log_likelihood: batches must be pairs (inputs, targets), got {type(batch).__name__}: "
                    "((x['input'], x['label']) for x in batches) makes them"
                )
            outputs = self.predict(forward, [batch[0]], reduce="stack", chunk=chunk)  # [S * chains, B, *event]
            said.append(torch.stack([likelihood.log_prob(f, batch[1]) for f in outputs]))
        if not said:
            raise ValueError("log_likelihood: batches is empty; an iterator can be gone through only once")
        every = torch.cat(said, 1)
        if every.ndim > 2:
            every = every.flatten(2).sum(2)
        return every if self.chains is None else every.unflatten(0, (len(self), self.chains))

    @checks.takes(log_likelihood=checks.VALUES)
    def to_arviz(self, *, log_likelihood: Tensor | None = None, **names: str) -> Any:
        """The draws as ArviZ takes them: posterior, sample statistics, and the log likelihood if given.

        ArviZ knows no weights: of draws that have some pass ``draws.equally_weighted()``.

        Args:
            log_likelihood: of every datum under every draw, ``[S, N]`` or ``[S, chains, N]``, from :meth:`log_likelihood`; with
                it ``arviz.loo`` works.
            names: a name for a leaf's path, as ``names={"layer/weight": "w"}``.

        Returns:
            ``arviz.InferenceData``, and from ArviZ 1 on an ``xarray.DataTree``; variables are the leaves' paths with dots,
            dimensions (chain, draw, ...). Large leaves on disk are read when ArviZ looks at them.

        Raises:
            TypeError: a log likelihood that is no tensor.
            ValueError: a log likelihood of other draws or chains; draws with weights.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([{"w": torch.randn(3)} for _ in range(5)])
            >>> data = draws.to_arviz()  # doctest: +SKIP
            >>> data.posterior["w"].dims  # doctest: +SKIP
            ('chain', 'draw', 'w_dim_0')
        """
        checks.installed("to_arviz", "diagnostics", "arviz", "xarray")
        if self.is_weighted:
            raise ValueError(
                "to_arviz: these draws have weights, which ArviZ does not know; take draws.equally_weighted()"
            )
        lead = (len(self),) if self.chains is None else (len(self), self.chains)
        if log_likelihood is not None and log_likelihood.shape[: len(lead)] != lead:
            raise ValueError(
                f"to_arviz: log_likelihood has shape {tuple(log_likelihood.shape)}, and these draws need "
                f"[{', '.join(map(str, lead))}, N]"
                + (
                    f": unfold the chains, log_likelihood.unflatten(0, {lead})"
                    if len(log_likelihood) == math.prod(lead)
                    else ""
                )
            )
        params = {names.get(name, name.replace("/", ".")): self._for_arviz(LEAF + name) for name in self._names}
        stats = {"step": self.steps if self.chains is None else self.steps[:, None].expand(-1, self.chains)}
        if self._has(LOSS):
            stats["loss"] = self.loss
        return inference_data(params, stats, log_likelihood, self.chains)

    def verify(self) -> None:
        """Compare every file of draws with its checksums.

        Raises:
            ValueError: the first file that is damaged or gone, by name.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.Draws.from_trees([{"w": torch.zeros(2)}]).verify()  # nothing on disk
        """
        for file in {part.file.path: part.file for piece in self._pieces for part in piece.parts}.values():
            file.verify()

    def _columns(self) -> dict[str, Tensor]:
        """All columns, of parameters, buffers, steps and what else there is, in memory."""
        return {name: self.column(name) for name in (self._pieces[0].names() if len(self) else ())}

    def _made(self, columns: Mapping[str, Tensor], *, chains: int | None, complete: bool, why: str) -> Draws:
        """Draws of the same tree with these columns."""
        pieces = [Piece(len(columns[STEP]), columns)] if columns else []
        return Draws(pieces, self._spec, self._names, chains=chains, complete=complete, why=why)

    def _with(
        self, rows: Sequence[int], pieces: list[Piece] | None = None, last: tuple[Any, Any] | None = None
    ) -> Draws:
        return Draws(
            self._pieces if pieces is None else pieces,
            self._spec,
            self._names,
            chains=self.chains,
            rows=rows,
            complete=self.complete,
            why=self.why,
            last=last,
            identity=self.identity,
        )

    def _tree(self, leaves: list[Tensor]) -> Any:
        return optree.tree_unflatten(self._spec, leaves)

    def _for_arviz(self, name: str) -> Any:
        """A column; one that is large and on disk as something that is read when it is looked at."""
        dtype, row = self._pieces[0].kind(name) if len(self) else (None, ())
        if dtype is None or not self._is_stored or len(self) * row_bytes(self._pieces, name) <= LAZY:
            return self.column(name)
        return Stored((len(self), *row), dtype, lambda rows: rows_of(self._pieces, self._rows[rows], name))

    def _has(self, name: str) -> bool:
        return all(name in piece.names() for piece in self._pieces)

    @property
    def _buffer_names(self) -> list[str]:
        names = self._pieces[0].names() if self._pieces else []
        return sorted(name.removeprefix(BUFFER) for name in names if name.startswith(BUFFER))

    @checks.takes(buffers=checks.BY_NAME)
    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Draws:
        """The same draws with these buffers, in the place of those of the same names.

        Args:
            buffers: tensors ``[S, ...]``, or ``[S, chains, ...]``, by their names in the module.

        Returns:
            Draws that share with these what they hold besides, in memory or on disk.

        Raises:
            TypeError: no tensors by name.
            ValueError: a tensor of another number of draws or chains.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([{"w": torch.zeros(2)}] * 3)
            >>> draws.with_buffers({"mean": torch.ones(3, 4)}).buffers["mean"].shape
            torch.Size([3, 4])
        """
        lead = (len(self),) if self.chains is None else (len(self), self.chains)
        for name, x in buffers.items():
            if tuple(x.shape[: len(lead)]) != lead:
                raise ValueError(
                    f"Draws.with_buffers: buffers[{name!r}] must begin with {lead}, draws and chains, got {tuple(x.shape)}"
                )
        pieces, at = list[Piece](), 0
        total, rows = sum(piece.size for piece in self._pieces), torch.as_tensor(list(self._rows), device="cpu")
        # of every draw that is held, those that are not meant too
        every = {n: x.new_zeros((total, *x.shape[1:])).index_copy(0, rows.to(x.device), x) for n, x in buffers.items()}
        for piece in self._pieces:
            own = {BUFFER + name: x[at : at + piece.size] for name, x in every.items()}
            pieces.append(piece._replace(leaves={**piece.leaves, **own}))
            at += piece.size
        return self._with(self._rows, pieces, self.last)

    def unchained(self) -> tuple[Any, dict[str, Tensor]]:
        """Parameters and buffers of all draws of all chains on axis 0, in memory: ``[S * chains, ...]``.

        Returns:
            The tree of parameters and the dictionary of buffers.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> draws = bc.Draws.from_trees([{"w": torch.zeros(4, 2)}] * 3, chains=4)
            >>> draws.unchained()[0]["w"].shape
            torch.Size([12, 2])
        """
        block: Any = (self.params, self.buffers)
        flat: Any = block if self.chains is None else optree.tree_map(lambda x: x.flatten(0, 1), block)
        return flat


def largest() -> int:
    """Bytes of draws on disk up to which all of them are read at once: half of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


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


def at_many(forward: Callable[[Any, Any, Any], Tensor]) -> Callable[[Any, Any, Any], Tensor]:
    """A function of many draws, a batch and many buffers, with outputs ``[S, B, *event]``: by ``vmap``, and one by one from the
    first time that vmap refuses the model."""
    refused = list[RuntimeError]()

    def outputs(draws: Any, batch: Any, buffers: Any) -> Tensor:
        size = optree.tree_leaves(draws)[0].shape[0]
        if not refused and size > 1:
            try:
                return torch.vmap(lambda p, b: forward(p, batch, b), randomness="error")(draws, buffers)
            except RuntimeError as err:
                refused.append(err)
        return one_by_one(lambda p, b: forward(p, batch, b), draws, buffers)

    return outputs


def averaged(blocks: Iterable[Tensor], reduce: Reduce) -> Tensor:
    """The mean or the log-mean-exp over axis 0 of blocks ``[S, ...]``, one held at a time and added up in float32 at least, or
    their stack."""
    if reduce == "stack":
        return torch.cat(list(blocks))
    count, total = 0, None
    for x in (part.to(wide(part.dtype)) for part in blocks):
        block = x.logsumexp(0) if reduce == "log_mean_exp" else x.sum(0)
        more = torch.logaddexp if reduce == "log_mean_exp" else torch.add
        count, total = count + len(x), block if total is None else more(total, block)
    assert total is not None
    return total - math.log(count) if reduce == "log_mean_exp" else total / count


def warn_of_moving_buffers(forward: Any) -> None:
    """Warn where draws hold no buffers, and the module they predict with has statistics that training moved.

    Raises:
        ValueError: it is in training mode, where layers mix data or draw.
    """
    if not isinstance(forward, Forward):
        return
    require_eval_mode(forward.module, "predict")
    if any(name.endswith("running_mean") for name, _ in forward.module.named_buffers()):
        checks.warn(
            "predict: the module has BatchNorm, and these draws hold no statistics of their own: every draw predicts "
            "with those that the module has now. Keep them with the draws (make_step(..., buffers=), bc.collect), or compute "
            "them: bc.refresh_batch_norm(module, draws, loader)"
        )


@checks.takes(
    draws=checks.instance(Draws, "Draws, such as bc.Draws.from_trees([params])"),
    loader=checks.BATCHES,
    inputs=checks.INPUTS,
)
def refresh_batch_norm(
    module: nn.Module,
    draws: Draws,
    loader: Iterable[Any],
    *,
    inputs: str | Callable[[Any], Any] | None = None,
) -> Draws:
    """Compute BatchNorm's statistics anew for every draw, by one pass over the data.

    Draws from a posterior (SWAG's, Laplace's, variational ones) come without statistics, and those in the module belong
    to other parameters. Chains that were made with ``make_step(..., buffers=buffers)`` keep statistics of their own;
    these are running means over the chain's last steps, while the fresh ones are of the draw itself.

    Args:
        module: the module; it is not changed. BatchNorm alone runs in ``train`` mode, dropout is off.
        draws: :class:`Draws`; of one tree of parameters ``bc.Draws.from_trees([params])``.
        loader: the training inputs, in batches as large as those of training; gone through once. The statistics are the
            means of the batches', weighted by their sizes.
        inputs: as for :func:`make_functional`.

    Returns:
        The draws with buffers, which :meth:`Draws.predict` uses.

    Raises:
        ValueError: a module whose layers keep no statistics; no batches.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)).eval()
        >>> forward, params, _ = bc.make_functional(module)
        >>> draws = bc.Draws.from_trees([params, {name: 2 * p for name, p in params.items()}])
        >>> fresh = bc.refresh_batch_norm(module, draws, [torch.randn(100, 1)])
        >>> mean = fresh.buffers["1.running_mean"]
        >>> torch.allclose(mean[1], 2 * mean[0]), fresh.predict(forward, [torch.zeros(5, 1)]).shape
        (True, torch.Size([5, 1]))
    """
    module = inner_of(module)
    lead = (len(draws), draws.chains or 1)

    def singles() -> Iterator[Any]:
        for draw in draws:
            yield from [draw] if draws.chains is None else unstack(draw)

    own = {name: x if draws.chains is None else x.flatten(0, 1) for name, x in draws.buffers.items()}
    each = [{name: x[i] for name, x in own.items()} for i in range(math.prod(lead))]
    found = statistics(module, singles, each, loader, inputs)
    if draws.chains is not None:
        found = {name: x.unflatten(0, lead) for name, x in found.items()}
    return draws.with_buffers(found)
