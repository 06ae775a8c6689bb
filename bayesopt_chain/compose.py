"""Composing chains: links of this library and TorchOpt's, masks, groups of leaves, and links whose response is declared."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torchopt.base import ChainedGradientTransformation, GradientTransformation, IdentityGradientTransformation

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.weight_decay import AddDecayedWeights, flip_sign_and_add_weight_decay
from bayesopt_chain.links.wrapper import Foreign, keywords_of
from bayesopt_chain.matching.response import Decay, Linear, Nonlinear, Response
from bayesopt_chain.trees import broadcast_prefix


def chain(*links: GradientTransformation) -> Chain:
    """Compose links into one transformation: the first sees the gradient, the last returns the update.

    Use it, not ``torchopt.chain``, where anything samples: ``torchopt.chain(bc.sghmc(...), torchopt.transform.scale(0.5))``
    moves by half of what the noise is matched to, samples something else, and no link of it can see that.

    Takes links of this library and TorchOpt's, nested at will: ``chain(chain(a, b), c)``, ``chain(a, chain(b, c))`` and
    ``chain(a, b, c)`` are the same chain with the same state. If a link injects noise, the noise is matched to the
    whole chain when ``init`` is called, and injected where it belongs.

    Args:
        links: transformations, in the order in which they see the gradient.

    Returns:
        A :class:`Chain`. ``update`` passes keywords on to the links that declare them.

    Raises:
        TypeError: a link is not a gradient transformation.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(0.01), bc.scale_by_neg_lr(0.1))
        >>> params = {"w": torch.zeros(3)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": torch.ones(3)}, state, params=params, inplace=False)
        >>> updates["w"].shape
        torch.Size([3])
    """
    return Chain([x for n, link in enumerate(links) for x in _links_of(link, n)])


chain.flat = chain  # pyright: ignore[reportFunctionMemberAccess]  # TorchOpt's name for the same on flat lists, as ours always is


def _links_of(link: Any, n: int = 0) -> Sequence[Link]:
    """The links that a transformation is made of. TorchOpt's are closures, known by the function that made them."""
    if isinstance(link, Chain):
        return link.links
    if isinstance(link, ChainedGradientTransformation):
        return [x for inner in link.transformations for x in _links_of(inner)]
    if isinstance(link, IdentityGradientTransformation):
        return []
    if not isinstance(link, GradientTransformation):
        raise TypeError(f"chain: link {n} is {link!r} ({type(link).__name__}), not a gradient transformation")
    module = getattr(link.update, "__module__", "") or ""
    name = getattr(link.update, "__qualname__", type(link.update).__name__)
    maker = name.split(".<locals>")[-2].rpartition(".")[2] if "<locals>" in name else name
    if module.startswith("torchopt") and maker in TORCHOPT:
        return TORCHOPT[maker](link, inspect.getclosurevars(link.update).nonlocals)
    return [Foreign(link, None, f"{module}.{maker}", keywords_of(link))]


def _flat(link: GradientTransformation, cells: Mapping[str, Any]) -> Sequence[Link]:
    inner = cells["inner"]
    links = chain(*inner.transformations if isinstance(inner, ChainedGradientTransformation) else (inner,)).links
    if any(isinstance(x, Foreign) for x in links):  # its links expect the flat lists that only it makes
        return [Foreign(link, None, "torchopt's optimizer (bc has the same with a temperature)")]
    return links


def _schedule(link: GradientTransformation, cells: Mapping[str, Any]) -> Sequence[Link]:
    fn = cells["step_size_fn"]
    if fn.__qualname__ == "_scale_by_neg_lr.<locals>.schedule_wrapper":
        return [Scale(inspect.getclosurevars(fn).nonlocals["lr"], -1)]
    return [Scale(fn)]


def _flip(link: GradientTransformation, cells: Mapping[str, Any]) -> Sequence[Link]:
    # nothing in the closure says whether it maximises, but a gradient of 1 at parameters of 0 shows it
    params, gradient = [torch.zeros((), device="cpu")], [torch.ones((), device="cpu")]
    (moved,), _ = link.update(gradient, link.init(params), params=params, inplace=False)
    return flip_sign_and_add_weight_decay(cells.get("weight_decay", 0.0), maximize=bool(moved < 0)).links


# What stands for TorchOpt's closures, by the function that makes their update, as a function of (transformation, its cells).
TORCHOPT: dict[str, Callable[[GradientTransformation, Mapping[str, Any]], Sequence[Link]]] = {
    "chain_flat": _flat,
    "_scale": lambda link, cells: [Scale(cells["step_size"])],
    "_scale_by_schedule": _schedule,
    "_trace": lambda link, cells: add_momentum(cells["momentum"], cells["dampening"], cells["nesterov"]).links,
    "_add_decayed_weights": lambda link, cells: [AddDecayedWeights(cells["weight_decay"])],
    "_flip_sign_and_add_weight_decay": _flip,
    "_masked": lambda link, cells: masked(chain(cells["inner"]), cells["mask"]).links,
    "clip_grad_norm": lambda link, cells: [Foreign(link, Nonlinear(), "clip_grad_norm")],
    "nan_to_num": lambda link, cells: [Foreign(link, Nonlinear(), "nan_to_num")],
    "register_hook": lambda link, cells: [Foreign(link, Linear(), "register_hook")],
}


@checks.takes(name=checks.TEXT.or_none())
def with_response(
    link: GradientTransformation,
    response: Response,
    *,
    name: str | None = None,
) -> Chain:
    """Tell the noise what your own link does, so that it may stand in a chain that samples.

    Under a changing learning rate or temperature all floating-point state of a link with one pole is taken for its velocity,
    and scaled by one factor where the rate rises. A link with more poles samples at a constant rate only.

    Args:
        link: any gradient transformation, yours or another library's.
        response: ``bc.response.Linear(b, a)`` for a time-invariant filter ``b(1/z) / a(1/z)`` of the gradient (lowest
            power first; ``Linear((0.5,))`` halves it), ``bc.response.Nonlinear()`` for a memoryless function of it,
            ``bc.response.Decay(weight_decay)`` for ``u + weight_decay * params``.
        name: shown by ``repr``.

    Returns:
        A chain of that one link.

    Raises:
        TypeError: no gradient transformation, or another response.
        ValueError: coefficients that are no filter.

    Example:
        >>> import bayesopt_chain as bc, torchopt
        >>> halve = bc.with_response(torchopt.transform.scale(0.5), bc.response.Linear((0.5,)), name="halve")
        >>> bc.chain(halve, bc.sgd(0.1))
        chain(
            halve,
            scale_by_neg_lr(0.1),
        )
    """
    if not isinstance(link, GradientTransformation):
        raise TypeError(f"with_response: link is {link!r}, not a gradient transformation")
    if type(response) not in (Linear, Nonlinear, Decay):
        raise TypeError(f"with_response: response is {response!r}; use one of bc.response.Linear, Nonlinear, Decay")
    numbers = (
        (*response.b, *response.a)
        if isinstance(response, Linear)
        else (response.weight_decay,)
        if isinstance(response, Decay)
        else ()
    )
    empty = isinstance(response, Linear) and not (response.b and response.a and response.a[0])
    if empty or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"with_response: {response} needs finite coefficients, at least one each in b and a, and a[0] != 0"
        )
    return Chain([Foreign(link, response, name or "declared link", keywords_of(link))])


@checks.takes(mask=checks.PREFIX)
def masked(link: GradientTransformation, mask: Any) -> Chain:
    """Apply ``link`` only to the leaves selected by ``mask``; the updates of the others pass through as they are.

    A leaf on which no link acts gets its gradient as its update, as in TorchOpt and optax, and would climb the loss. A chain
    that samples other leaves refuses that: parameters that are to stay go into ``bc.sgd(0.0)`` by :func:`partition`.

    Args:
        link: a link or a whole chain.
        mask: tree of booleans that is a prefix of the parameter tree, or a function from the parameters to one; it is read
            once, by ``init``.

    Returns:
        A chain. Noise is matched for each leaf to the links that act on that leaf.

    Raises:
        ValueError: at ``init``, a mask whose structure is no prefix of the parameters'; at a temperature above 0, leaves
            outside the mask that would climb the loss.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.masked(bc.links.add_decayed_weights(0.1), {"w": True, "b": False}), bc.sgd(1.0))
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> grads = {"w": torch.zeros(1), "b": torch.zeros(1)}
        >>> tx.update(grads, tx.init(params), params=params, inplace=False)[0]["w"]
        tensor([-0.1000])
    """
    tx = chain(link)
    return type(tx)([replace(x, masks=(*x.masks, mask)) for x in tx.links])


@dataclass(frozen=True)
class _Labelled:
    """The mask of one group of :func:`partition`: the leaves with this label."""

    labels: Any = field(hash=False)
    label: Any
    known: tuple[Any, ...]

    def __call__(self, tree: Any) -> Any:
        labels = self.labels(tree) if callable(self.labels) else self.labels
        leaves = optree.tree_leaves(tree, none_is_leaf=True)
        given = [x for x, p in zip(broadcast_prefix(labels, tree), leaves) if p is not None]
        if any(not isinstance(x, Hashable) or hasattr(x, "__array__") for x in given):
            raise TypeError(
                f"partition: labels must be a tree of the keys of transformations, {list(self.known)}, got {given}"
            )
        unknown = set(given).difference(self.known)
        if unknown:
            raise ValueError(
                f"partition: labels {sorted(map(str, unknown))} have no chain; transformations has {list(self.known)}"
            )
        return optree.tree_map(lambda label: label == self.label, labels)  # pyright: ignore[reportArgumentType]


@checks.takes(transformations=checks.MAPPING, labels=checks.PREFIX)
def partition(transformations: Mapping[Any, GradientTransformation], labels: Any) -> Chain:
    """Give each group of leaves its own chain: its own learning rate, momentum and temperature.

    Args:
        transformations: chain for each label.
        labels: tree of labels that is a prefix of the parameter tree, or a function from the parameters to one. Every
            leaf needs a label that ``transformations`` knows.

    Returns:
        A chain; noise is matched within each group.

    Raises:
        ValueError: at ``init``, a label that no chain is given for.

    Example:
        Last-layer Bayes: SGD below, SGHMC for the head.

        >>> import bayesopt_chain as bc
        >>> tx = bc.partition({"body": bc.sgd(0.1), "head": bc.sghmc(0.1, temperature=1e-3)}, {"conv": "body", "fc": "head"})
    """
    known = tuple(transformations)
    return chain(*(masked(tx, _Labelled(labels, name, known)) for name, tx in transformations.items()))
