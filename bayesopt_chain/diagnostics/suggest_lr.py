r"""``suggest_lr``: the learning rate of a chain whose momentum, batch size and order are given.

:func:`bayesopt_chain.suggest_chain` with one choice of each: the same laws, the same pilot runs, and the same
answer, which also says what the
choices cost. Two limits decide, both asked of the chain itself (:mod:`bayesopt_chain.diagnostics.heating` has the equations):

    stability    the largest lr at which the closed loop of chain and curvature has spectral radius below 1 (``lr k = 2 (1 +
                 mu)`` for momentum, ``2 (1 + mu) / (1 + 2 mu)`` for Nesterov); a tenth of it is used at most
    heating      the largest lr at which the noise of the batches adds no more than ``tolerance`` to the variance in any
                 direction

How gradient noise sets the variance of a run is due to Mandt, Hoffman and Blei (2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from bayesopt_chain import batches as batch_trees
from bayesopt_chain import kinds
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.data.index_stream import Order
from bayesopt_chain.diagnostics._advice import Advice, Family, Search, keeps_generators
from bayesopt_chain.diagnostics._places import Listed, Rows, Source, require_mean
from bayesopt_chain.diagnostics.gradient_noise import take
from bayesopt_chain.diagnostics.suggest_chain import (
    BASE,
    FAR,
    MARGIN,
    MOMENTA,
    PLACE_OR_MODULE,
    SHARE,
    ChainSuggestion,
    maker,
    of_data,
    of_module,
    require_law,
    suggested,
)
from bayesopt_chain.optimizers.functional import sgd


@kinds.takes(
    params=PLACE_OR_MODULE,
    batches=kinds.BATCH_OR_BATCHES,
    max_batches=kinds.whole(2),
    order=kinds.one_of(*get_args(Order)),
    steps_per_epoch=kinds.real("[1, inf]"),
    epochs=kinds.POSITIVE,
    margin=kinds.real("(0, 1]"),
)
@keeps_generators
def suggest_lr(
    make_tx: Callable[..., Any],
    loss: Callable[[Any, Any], Any],
    params: Any,
    batches: Iterable[Any] | Any,
    *,
    tolerance: float = 0.05,
    order: Order | None = None,
    steps_per_epoch: float | None = None,
    state: Any = None,
    epochs: float | None = None,
    margin: float = MARGIN,
    rank: int = 8,
    max_batches: int = 100,
    seed: int = 0,
) -> ChainSuggestion:
    """Suggest a learning rate for a chain at a temperature.

    Args:
        make_tx: ``make_tx(lr)`` returns the chain, such as ``lambda lr: bc.sghmc(lr, temperature=1 / N)``; or a class of
            ``bc.optim`` with its other arguments, as for :func:`bayesopt_chain.suggest_chain`.
        loss: as for :func:`bayesopt_chain.make_step`; of a module, ``loss(module, batch)``.
        params: where the chain will sample: near a mode, not the initial values. A tree, or a module.
        batches: ``bc.epochs(...)``; all data as one batch (a tensor, tuple or dictionary); or an iterable of batches
            of one size that share no datum and can be gone through again, such as a list or a DataLoader: pilots take them
            all, in a new order each epoch where it is a list, and the answer's ``batches`` are these.
        tolerance: how much the variance of any direction may grow, on average over the steps of an epoch; 0.05 is 5 %.
        order: of the batches; default: that of the ``epochs``, and ``"reshuffled"`` for another iterable.
        steps_per_epoch: ``K = N / b``; default: that of the ``epochs``, and the number of batches for another iterable.
        state: the state of the chain, where a preconditioner learns; pilots start from it. Start the run from it too.
        epochs: how many passes over the data the run may take; a tenth of them at most goes into suggesting. Default: no limit.
        margin: share of the stability limit that the rate may take at most, with minibatches and with full batches; pilots
            that run away halve their own, but for a first one with minibatches, after which full batches are tried.
        rank: number of directions looked at, of the noise and of the curvature each.
        max_batches: of an iterable, measure at most so many; pilots and the run take all.
        seed: of the pilots and of the batches.

    Returns:
        :class:`~bayesopt_chain.diagnostics.ChainSuggestion` with one setting; ``.lr`` is the rate, ``print`` says
        what limits it and what would buy more.

    Raises:
        TypeError: a class whose chain is not known; batches that can be gone through once, such as a generator.
        ValueError: batches without a length, where ``steps_per_epoch`` is not given; a chain without noise, or one that is
            not linear; a loss that is a sum over the batch; a loss without positive curvature here, or one that torch cannot
            differentiate twice; chains that run away at every rate; a tolerance that is not positive.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (w - batch).square().mean() / 2
        >>> data = bc.epochs(torch.linspace(-3**0.5, 3**0.5, 1000), 20)
        >>> found = bc.suggest_lr(lambda lr: bc.sghmc(lr, temperature=1 / 1000), loss, torch.tensor(0.0), data)
        >>> round(found.best.stability, 2), bool(0.0005 < found.lr < 0.003)               # 2 (1 + 0.9) / curvature
        (3.8, True)
    """
    name = "suggest_lr"
    loss, params, draws = of_module(name, loss, params)
    source, batch, known = _source(name, batches, max_batches, steps_per_epoch, seed)
    if batch < source.size:
        require_law(name, [order or known])
    require_mean(name, loss, params, source, sums_only=batch == source.size or isinstance(source, Listed))
    allowance = math.inf if epochs is None else SHARE * epochs
    family = Family(name, maker(name, make_tx, 1), (None,), params, state)
    choice = (batch, order or known)
    search = Search(name, loss, source, family, [choice], tolerance, margin, 1e-4, rank, allowance, seed)
    advice = search.run(params)
    notes = [*_elsewhere(search, advice, params), *_of_order(batches, choice[1])]
    return suggested(search, advice, epochs, "epoch", draws, notes)


def _source(name: str, batches: Any, most: int, steps: float | None, seed: int) -> tuple[Source, int, Order | Any]:
    """Where batches come from, how many data one has, and their order."""
    whole = torch.is_tensor(batches) or not hasattr(batches, "__iter__") or isinstance(batches, (tuple, dict))
    if isinstance(batches, Epochs) or whole:
        tree, size, known_size, order = of_data(name, batches)
        batch = next(iter(known_size)) if known_size else size
        base = max(1, min(BASE, batch, size // 2))
        return Rows(tree, size, base, seed), batch, order[0] if order else "full"
    if isinstance(batches, Iterator):
        raise TypeError(
            f"{name}: batches must be something that can be gone through again, as the pilots and the run do, got "
            f"{type(batches).__name__}; pass a list, a DataLoader or bc.epochs(...)"
        )
    try:
        count = len(batches)
    except TypeError:
        count = None
    if count is None and steps is None:
        raise ValueError(
            f"{name}: batches has no length, so that the steps of an epoch are not known, got {type(batches).__name__}; pass "
            "steps_per_epoch=, a list, a DataLoader with a length or bc.epochs(...)"
        )
    if isinstance(batches, Sequence) and len(batches) > most:  # any of them: the first may be unlike the rest
        generator = torch.Generator().manual_seed(seed)
        made = [batches[k] for k in torch.randperm(len(batches), generator=generator, device="cpu")[:most].tolist()]
    else:
        made = take(batches, most)[0][0]
    if not made:
        raise ValueError(f"{name}: batches is empty")
    leaves = [leaf for leaf in batch_trees.flatten(made[0])[0] if torch.is_tensor(leaf) and leaf.ndim]
    b = len(leaves[0]) if leaves else 1
    return Listed(made, b * (steps or float(count or len(made))), b, batches, len(made) == count), b, "reshuffled"


def _of_order(batches: Any, order: Any) -> list[str]:
    """That batches come in the same order every epoch, where the law of another order was asked for."""
    loader = (
        isinstance(batches, DataLoader)
        and type(batches.batch_sampler) is BatchSampler  # one of the user's own may shuffle
        and isinstance(batches.batch_sampler.sampler, SequentialSampler)
    )
    if order == "fixed" or not (loader or (isinstance(batches, list) and len(batches) > 1)):
        return []
    return [
        f"These batches come in the same order every epoch, which adds a bias; the row is of {order} ones: pass "
        f"{'shuffle=True to the DataLoader' if loader else 'bc.epochs(data, batch size) in place of the list'}, or ask for "
        "order='fixed'."
    ]


def _elsewhere(search: Search, advice: Advice, params: Any) -> list[str]:
    """What other momenta and full batches would buy, where the chain moves all parameters alike."""
    family, row = search.family, advice.rows[0]
    gains = torch.cat([gain.flatten() for gain in family.base.gains])
    if len(family.base.groups) > 1 or not bool((gains == gains[0]).all()) or not isinstance(search.source, Rows):
        return []
    other = Family(search.name, lambda lr, mu: sgd(lr, mu, temperature=family.temperature), MOMENTA, params, None)
    other.base = family.base  # what was measured is in this chain's coordinates
    size = search.source.size
    choices = dict.fromkeys([(row.batch, row.order), (size, "full")])
    rows = replace(search, family=other, choices=list(choices), exact=0.05).rows(advice.places, advice.margins)
    out = []
    for found in rows:
        times = found.draws / row.draws
        if times > FAR:
            what = "full batches" if found.batch == size else "the same batches"
            out.append(
                f"With {what} and momentum {MOMENTA[found.momentum]:.4g} heavy ball would make {times:.2g} times the "
                "draws an epoch: "
                "bc.suggest_chain chooses momentum, order and batch size too."
            )
    return out[:1]
