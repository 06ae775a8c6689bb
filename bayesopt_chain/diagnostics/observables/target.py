r"""What chains near a point sample, what is measured at each of their draws, and the rate and momentum that they take.

The target is ``exp(-(L + s |theta - c|^2 / 2) / T)``: loss ``L``, centre ``c``, strength ``s`` of the spring. With ``delta
= theta - c``

    virial           E[delta . grad(L + s |delta|^2 / 2)] / T = d,   the number of free entries, for every loss
    of a projection  E[(P delta) . grad(...)] / T = rank P,          so of each leaf, and of each stiff direction

by integration by parts (``s > 0``, or a loss that grows). A chain that is too hot has more, one that has not spread yet
has less, and the two may cancel in the sum: so each leaf and the stiffest directions at ``c`` are measured by themselves.

Minibatches are drawn independently, so that the law of their heat is known, and everything is then measured on batches drawn
apart from those of the steps. The loss is ``L_b(theta) - L_b(c) + L(c)``, of which the first difference has little noise and
``L(c)`` is over all data. Half the squared distance of its gradient from that of the step is an estimate of ``tr(C)``, ``C``
the covariance of a batch's gradient at the draw, from which the heat of the batches follows
(:mod:`bayesopt_chain.diagnostics.suggest_lr`).

**Rate and momentum** are what stability, the noise of batches (:mod:`bayesopt_chain.diagnostics.suggest_lr`) and the spring
allow where a pilot goes.

stability    k is the largest curvature of loss and spring at a point where a chain is. A chain of less friction climbs farther
             up walls that it has not seen yet, so that its share of the limit is  MARGIN sqrt((1 - mu) / .1)
heat         lr tr(C) / (4 T (1 - mu))  is at most the share HEAT of the learning coefficient. Noise that grows with the
             distance can make a chain unstable at a tenth of the limit; its pilot has a virial far above d.
spread       a direction that only the spring holds forgets where it was at the rate of the slower root of
             x^2 - (1 - mu) x + lr s = 0,  lr s / (1 - mu)  where it is small, and its variance at twice that. The momentum is
             such that its variance takes an eighth of the draws, unless that is more than critical damping, 1 - mu = 2 sqrt(lr
             s), or than the heat allows, or the energy of a stiff direction, which takes 1 / (1 - mu), would not fit thirty
             times among the draws.

**Some entries** of the parameters, such as one attention head, move while the others stay (:func:`restrict`). The free ones are
tensors of their own, and ``fill`` puts them among the others. So a chain on them spends no gradient, noise or state on an entry
that stays, and their number is that of the dimensions of the target. Learning coefficients of such a part are the refined ones
of Wang et al. (2024, arXiv:2410.02984).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches, checks
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.diagnostics.gradient_noise import lanczos, product_of, random_states
from bayesopt_chain.diagnostics.suggest_lr import MARGIN
from bayesopt_chain.links.weight_decay import add_localization
from bayesopt_chain.loop.loss import gradient, value
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.runs.run import ResumableBatches
from bayesopt_chain.samplers.langevin import sghmc
from bayesopt_chain.trees import flatten, paths


class Restricted(NamedTuple):
    """What :func:`restrict` returns.

    Attributes:
        loss: ``loss(free, batch)``, the given loss at ``fill(free)``.
        free: the free entries by the name of their parameter: the parameter itself where no mask was given, else the
            entries ``[m]`` at which the mask is true, in the order of the flattened parameter.
        fill: free entries to parameters, a tree like the given one.
    """

    loss: Callable[..., Any]
    free: dict[str, Tensor]
    fill: Callable[[Any], Any]


@checks.takes(
    where=checks.Kind(
        lambda x: (
            isinstance(x, Mapping)
            and len(x) > 0
            and all(m is None or (isinstance(m, Tensor) and m.dtype == torch.bool) for m in x.values())
        ),
        "a dictionary of masks of dtype bool (or None for all of a parameter) by names of parameters",
        (Mapping,),
    )
)
def restrict(loss: Callable[..., Any], params: Any, where: Mapping[str, Tensor | None]) -> Restricted:
    """Make the loss a function of some entries of the parameters; the others keep the values that they have here.

    Args:
        loss: ``loss(params, batch)``, as for :func:`bayesopt_chain.make_step`; further arguments are handed on.
        params: a tree of tensors. Copies are made.
        where: the free entries, by the name of a parameter or by the beginning of names: ``{"blocks.0.attn.qkv": mask,
            "blocks.1": None}``. A mask has the parameter's shape and is true where an entry is free; ``None`` frees all.
            Where two names fit a parameter the longer one holds. Keys of nested trees are joined by dots; a tensor that is
            no tree is called ``"parameters"``.

    Returns:
        :class:`Restricted`, ``(loss, free, fill)``.

    Raises:
        ValueError: a name of no parameter; a mask of another shape; no entry is free.
        TypeError: masks that are not of dtype bool.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> params = {"w": torch.zeros(2, 2), "b": torch.ones(2)}
        >>> def loss(p, batch):
        ...     return (p["w"] @ batch + p["b"]).square().sum()
        >>> loss, free, fill = bc.restrict(loss, params, {"w": torch.tensor([[True, False], [False, False]])})
        >>> free, fill({"w": torch.tensor([3.0])})["w"]
        ({'w': tensor([0.])}, tensor([[3., 0.],
                [0., 0.]]))
        >>> step = bc.make_step(loss, bc.sghmc(0.1, temperature=0.1))      # a chain of one dimension
    """
    leaves, spec = optree.tree_flatten(params)
    names = paths(params)
    fixed = [p.detach().clone() for p in leaves]
    fitting = {name: [key for key in where if name == key or name.startswith(key + ".")] for name in names}
    if unknown := set(where).difference(*fitting.values()):
        raise ValueError(
            f"restrict: no parameter is called {sorted(unknown)[0]!r}, nor begins with it and a dot; there are "
            + ", ".join(names[:20])
            + (", ..." if len(names) > 20 else "")
        )
    free, places = dict[str, Tensor](), list[tuple[int, str, Tensor | None]]()
    for i, (name, p) in enumerate(zip(names, fixed)):
        if not fitting[name]:
            continue
        mask = where[max(fitting[name], key=len)]
        if mask is not None and mask.shape != p.shape:
            raise ValueError(
                f"restrict: the mask of {name} has the shape {list(mask.shape)}, and the parameter {list(p.shape)}; give one "
                "of the shape of the parameter, or None for all of it"
            )
        index = None if mask is None else mask.to(p.device).reshape(-1).nonzero().reshape(-1)
        if index is None or len(index):
            free[name] = p.clone() if index is None else p.reshape(-1)[index]
            places.append((i, name, index))
    if not free:
        raise ValueError("restrict: the masks leave no entry free; make at least one of their entries true")

    def fill(x: Any) -> Any:
        out = list(fixed)
        for i, name, index in places:
            p = fixed[i]
            out[i] = x[name] if index is None else p.reshape(-1).index_copy(0, index, x[name]).reshape(p.shape)
        return optree.tree_unflatten(spec, out)

    def restricted(free: Any, *args: Any) -> Any:
        return loss(fill(free), *args)

    return Restricted(restricted, free, fill)


PRODUCTS = 40  # of the Hessian at the centre, for its stiffest directions
APART = 0x41504152  # keeps the batches that are measured apart from those of the course


class Stacked:
    """The loss of chains stacked on axis 0: the sum over them, with each chain's own as ``aux``.

    The gradient of the sum is each chain's own gradient, and noise is drawn for each entry, so that one chain on stacked
    parameters is that many chains of element-wise links. One chain alone is not stacked: its loss is the loss itself,
    without ``vmap``.

    Args:
        loss: of one chain.
        chains: their number.
        of_batches: whether batches have the chains on axis 0 too, else all chains share one.
    """

    def __init__(self, loss: Callable[..., Any], chains: int, of_batches: bool) -> None:
        self.loss, self.chains, self.of_batches = loss, chains, of_batches

    def __call__(self, params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        each = self.each(params, batch)
        return each.sum(), each

    def each(self, params: Any, batch: Any, same_params: bool = False) -> Tensor:
        """The loss of each chain, ``[C]``; with ``same_params`` at one place, of each chain's batch."""
        rows, spec = batches.flatten(batch)
        rows = rows if self.of_batches else []

        def one(params: Any, *rows: Tensor) -> Tensor:
            return value(self.loss, params, spec.unflatten(rows) if self.of_batches else batch)[0]

        return over_chains(one, self.chains, None if same_params else 0, params, *rows)


def over_chains(f: Callable[..., Any], chains: int, axis: int | None, params: Any, *rows: Tensor) -> Any:
    """``f(params, *rows)`` of each chain, on axis 0: by vmap, or plainly where there is one chain, which is not stacked.

    Args:
        f: a function of one chain, which returns tensors.
        chains: their number.
        axis: of the parameters that counts the chains; ``None``: all chains have the same ones.
        params: parameters.
        rows: tensors with the chains on axis 0.
    """
    if chains == 1:
        return optree.tree_map(lambda x: x.unsqueeze(0), f(params, *rows))
    leaves, spec = optree.tree_flatten(params)

    def flat(leaves: Sequence[Tensor], *rows: Tensor) -> Any:
        return f(spec.unflatten(leaves), *rows)

    return torch.vmap(flat, in_dims=(axis, *[0] * len(rows)), randomness="different")(leaves, *rows)


def data_of(given: Any) -> tuple[Any, int | None]:
    """All data in one batch, or :class:`Epochs`; and their number, if it is known.

    Raises:
        TypeError: batches that can be gone through in one order only.
    """
    if isinstance(given, Epochs):
        return given, len(given.common_rows())
    if given is not None and not isinstance(given, (Tensor, tuple, Mapping)) and hasattr(given, "__iter__"):
        raise TypeError(
            f"observe: batches of {type(given).__name__} come in one order, which heats a chain, and cannot be drawn apart "
            "from its course: give bc.epochs(data, batch_size), where data = tuple(map(torch.cat, zip(*batches))) are those "
            "of all batches, or all data in one batch as a tuple"
        )
    sizes = {x.shape[0] if x.ndim else None for x in batches.flatten(given)[0] if isinstance(x, Tensor)}
    return given, sizes.pop() if len(sizes) == 1 else None


@dataclass
class Target:
    """What the chains sample.

    Attributes:
        loss: of the free entries.
        centre: the free entries at the start.
        fill: free entries to all parameters.
        data: one batch, or :class:`Epochs`.
        temperature, strength, momentum, seed: as for :func:`observe`.
    """

    loss: Callable[..., Any]
    centre: Any
    fill: Callable[[Any], Any]
    data: Any
    temperature: float
    strength: float
    momentum: float
    seed: int

    def __post_init__(self) -> None:
        self.leaves = optree.tree_leaves(self.centre)
        self.free = sum(x.numel() for x in self.leaves)
        self.in_batches = isinstance(self.data, Epochs)

    def stacked(self, chains: int) -> Stacked:
        """The loss of so many chains."""
        return Stacked(self.loss, chains, self.in_batches)

    def start(self, chains: int) -> Any:
        """The centre, stacked for so many chains; as it is for one."""
        axis = [chains] if chains > 1 else []
        return optree.tree_map(lambda x: x.detach().expand((*axis, *x.shape)).clone(), self.centre)

    def course(self, chains: int, number: int, apart: bool = False) -> Any:
        """Batches for chains, drawn independently for each, whatever the order of the epochs that are given.

        Reshuffled epochs heat less, by an amount that depends on every curvature, so that it could not be taken off.
        """
        if not self.in_batches:
            return self.data
        old, stacked = self.data, chains if chains > 1 else None
        seed = old.seed + 7919 * (number + 1) + 104729 * self.seed + (APART if apart else 0)
        return Epochs(old.data, old.batch_size, "independent", seed, stacked, old.left_out, (0, 1), old.with_rows)

    def one_batch(self, chains: int) -> Any:
        """A batch for each of some chains, always the same."""
        return self.course(chains, 0, True).batch(0, 0) if self.in_batches else self.data

    def chain(self, lr: float) -> Chain:
        """The transformation at a rate."""
        noise = torch.Generator().manual_seed(self.seed)
        spring = add_localization(self.centre, self.strength)
        return chain(spring, sghmc(lr, self.momentum, temperature=self.temperature, generator=noise))

    def at_centre(self) -> tuple[float, float]:
        """The loss over all data, each once, and the squared norm of its gradient."""
        every = self.data.common_rows() if self.in_batches else torch.zeros(1, device="cpu")
        total, grads = 0.0, [torch.zeros_like(x, dtype=torch.float64) for x in self.leaves]
        for rows in every.split(self.data.batch_size if self.in_batches else 1):
            g, info = gradient(self.loss, self.centre, self.data.of_rows(rows) if self.in_batches else self.data)
            total += len(rows) * float(info.loss)
            for sum_, x in zip(grads, optree.tree_leaves(g)):
                sum_.add_(x, alpha=len(rows))
        return total / len(every), sum(float(x.square().sum()) for x in grads) / len(every) ** 2

    @torch.no_grad()
    def require_one_loss(self) -> None:
        """Refuse a loss that draws random numbers, as dropout does: the chains would take its noise for the target's."""
        batch, before = self.one_batch(1), random_states()
        first, second = (float(value(self.loss, self.centre, batch)[0]) for _ in range(2))
        is_drawn = not all(map(torch.equal, before, random_states()))
        if is_drawn or not math.isclose(first, second, rel_tol=1e-5):  # a device's sums may differ in their last places
            raise ValueError(
                f"observe: the loss draws random numbers (it is {first:.6g} and {second:.6g} at the same parameters and "
                "batch); put dropout and other layers that draw into eval mode"
            )

    def require_mapped(self, chains: int, of: Mapping[str, Callable[[Any], Tensor]]) -> None:
        """Refuse to run chains at once where ``vmap`` refuses the loss, its gradient or an observable."""
        params, batch = self.start(chains), self.one_batch(chains)
        try:
            gradient(self.stacked(chains), params, batch)
            with torch.no_grad():
                Measured(self, chains, of, None, 0.0, 0).observables(params)
        except RuntimeError as error:
            raise ValueError(
                f"observe: vmap refuses loss or an observable ({str(error).splitlines()[0]}); pass at_once=1, which runs one "
                "chain after the other"
            ) from error

    def stiff_directions(self, most: int) -> Tensor:
        """The directions of the largest curvatures at the centre, orthonormal, ``[m, d]``."""
        product = product_of(self.loss, self.centre, [self.one_batch(1)])
        return lanczos(product, self.centre, min(most, self.free), max_products=PRODUCTS)[1]


def steepest(stacked: Stacked, params: Any, batch: Any, products: int = 20) -> float:
    """The largest curvature where any chain is, by Lanczos' method: from below, and infinite where a chain has diverged."""
    try:
        values, _ = lanczos(product_of(stacked, params, [batch]), params, 1, max_products=products)
    except ValueError:  # a product that is NaN or infinite
        return math.inf
    return float(values[0])


class Measured:
    """What is measured of all chains at a draw.

    Args:
        target: what they sample.
        chains: their number.
        of: observables, functions of all parameters of one chain.
        stiff: as :meth:`Target.stiff_directions` gives them, or ``None``.
        reference: the loss at the centre.
        number: of these chains among several runs of them.
    """

    def __init__(
        self,
        target: Target,
        chains: int,
        of: Mapping[str, Callable[[Any], Tensor]],
        stiff: Tensor | None,
        reference: float,
        number: int,
    ) -> None:
        self.target, self.chains, self.of, self.stiff = target, chains, of, stiff
        self.stacked, self.reference = target.stacked(chains), reference
        self.apart = target.course(chains, number, apart=True) if target.in_batches else None
        self.centre = flatten(target.centre, target.centre)

    def observables(self, params: Any) -> dict[str, Tensor]:
        """The observables of each chain, ``[C, m]``."""
        if not self.of:
            return {}

        def one(x: Any) -> dict[str, Tensor]:
            full = self.target.fill(x)
            return {name: f(full).reshape(-1) for name, f in self.of.items()}

        return over_chains(one, self.chains, 0, params)

    def __call__(self, params: Any, grads: Any, batch: Any, draw: int) -> dict[str, Tensor]:
        """All that is known before the loss of the step: observables, virial; from minibatches loss and noise too.

        Args:
            params, grads, batch: of the step that starts from the draw.
            draw: its number.
        """
        out, target, step = self.observables(params), self.target, grads
        if self.apart is not None:
            batch = self.apart.batch(*divmod(draw, len(self.apart)))
            grads, info = gradient(self.stacked, params, batch)
            at_centre = self.stacked.each(target.centre, batch, same_params=True)
            out["loss"] = info.aux.double() - at_centre.double() + self.reference
        delta, force = self.flat(params), self.flat(grads)
        if self.apart is not None:
            out["noise"] = self.flat(step).sub_(force).square().sum(1, keepdim=True) / 2
        force.add_(delta.sub_(self.centre), alpha=target.strength)
        out["virial of spring"] = target.strength * delta.square().sum(1, keepdim=True) / target.temperature
        if self.stiff is not None:  # (P delta) . force needs the inner products of both with each direction
            along = (delta @ self.stiff.mT) * (force @ self.stiff.mT)
            out["virial of stiff"] = along.sum(1, keepdim=True) / target.temperature
        pull = force.mul_(delta).split([x.numel() for x in target.leaves], 1)
        out["virial by leaf"] = torch.stack([x.sum(1) for x in pull], 1) / target.temperature
        out["virial"] = out["virial by leaf"].sum(1, keepdim=True)
        return out

    def flat(self, tree: Any) -> Tensor:
        """A tree of all chains in a new tensor ``[C, d]``."""
        return torch.cat([x.reshape(self.chains, -1) for x in optree.tree_leaves(tree)], 1).to(self.centre)

    def with_loss(self, seen: Mapping[str, Tensor], each: Tensor) -> dict[str, Tensor]:
        """What was seen, with the loss; ``each`` is that of the step's batch."""
        return {**seen, "loss": seen.get("loss", each).double().reshape(-1, 1)}


HEAT = 0.05  # of the learning coefficient that the batches may add
MOMENTUM = 0.9  # where nothing asks for more
HOT = 1.5  # a virial above this times the number of free entries lowers the rate
PILOTS = 8
THIN = 4  # steps of a pilot from one draw to the next


def relaxation(lr: float, momentum: float, strength: float) -> float:
    """Steps in which a direction that only the spring holds forgets where it was; infinite without a spring."""
    friction, pull = 1 - momentum, lr * strength
    slow = 2 * pull / (friction + math.sqrt(max(friction**2 - 4 * pull, 0.0))) if pull else 0.0
    return 1 / min(slow, friction / 2) if slow else math.inf


def heat_of_noise(lr: float, momentum: float, temperature: float) -> float:
    """What independent batches add to ``E[U] / T`` of a quadratic under momentum, for each unit of ``tr(C)``."""
    return lr / (4 * temperature * (1 - momentum))


def spreading(lr: float, strength: float, draws: int, coolest: float) -> float:
    """The momentum by which flat directions spread in an eighth of the draws, if that is possible.

    Args:
        lr: learning rate.
        strength: of the spring.
        draws: steps that are measured.
        coolest: the largest ``lr / (1 - mu)`` that the noise of batches allows.
    """
    if not strength:
        return MOMENTUM
    least = max(2 * math.sqrt(lr * strength), 30 / draws, lr / coolest)
    return 1 - min(1 - MOMENTUM, max(lr * strength * draws / 4, least))


def chosen(
    target: Target, chains: int, steps: int, draws: int, lr: float | None, momentum: float | None
) -> dict[str, Any]:
    """Choose rate and momentum by pilots, or look at those that are given.

    Args:
        target: what is sampled.
        chains: how many a pilot has.
        steps: of a pilot.
        draws: steps that will be measured.
        lr: a rate to take.
        momentum: a momentum to take.

    Returns:
        ``lr``; ``momentum``; the largest ``curvature`` that was seen, with the spring's; ``gradients`` of one chain that were
        spent.

    Raises:
        ValueError: the given rate is beyond the limit at the centre; no rate is stable.
    """
    batch, centre = target.one_batch(chains), target.start(chains)
    top, spent = _curvature(target, chains, centre, batch), 40 * chains
    mu, temperature = MOMENTUM if momentum is None else momentum, target.temperature
    if lr is not None:
        mu = spreading(lr, target.strength, draws, math.inf) if momentum is None and not target.in_batches else mu
        limit = 2 * (1 + mu)
        if lr * top > limit:
            raise ValueError(
                f"observe: lr={lr:.3g} is {lr * top / limit:.2g} times the stability limit at the start already "
                f"(curvature {top:.3g}, with the spring's); take lr={0.1 * limit / top:.2g}, or leave it out"
            )
        return {"lr": lr, "momentum": mu, "curvature": top, "gradients": spent}
    top = max(top, _curvature(target, chains, _thermal(target, chains, centre, batch), batch))
    spent, highest, most = spent + 80 * chains, 0.5, math.inf
    coolest = math.inf  # the largest lr / (1 - mu) that the noise of batches allows

    def allowed() -> float:
        """The rate at this momentum, after what was seen."""
        margin = MARGIN * math.sqrt(min(1.0, (1 - mu) / (1 - MOMENTUM)))
        return min(margin * (2 * (1 + mu) / top), coolest * (1 - mu), most)

    for k in range(PILOTS):
        lr = allowed()
        if momentum is None and (k if not target.in_batches else coolest < math.inf):
            mu = spreading(lr, target.strength, draws, coolest)
        params, (virial, rise, heat) = _pilot(replace(target, momentum=mu), chains, steps, lr, k)
        now = _curvature(target, chains, params, batch)
        spent += (steps + steps // (2 * THIN) * target.in_batches + 40) * chains
        hot = not virial < HOT * target.free
        if target.in_batches and not hot:
            highest = max(highest, rise)
            coolest = HEAT * highest / (heat_of_noise(1, 0, temperature) * heat) if heat else math.inf
        wanted = mu if momentum is not None else spreading(lr, target.strength, draws, coolest)
        settled = abs(math.log((1 - wanted) / (1 - mu))) < 0.2
        if now <= 1.2 * top and not hot and lr <= 1.2 * coolest * (1 - mu) and settled:
            top = max(top, now)
            break
        most = lr / 4 if hot else most
        top = max(min(now, 16 * top), top)
    return {"lr": allowed(), "momentum": mu, "curvature": top, "gradients": spent}


@torch.no_grad()
def _thermal(target: Target, chains: int, centre: Any, batch: Any) -> Any:
    """Points around the centre, so far that loss and spring have risen by ``T d / 2`` in the mean; at most 1,000 an entry.

    At the minimum of a quartic there is no curvature, and a first pilot would have no scale.
    """
    stacked, noise = target.stacked(chains), torch.Generator().manual_seed(target.seed)
    draws = optree.tree_map(
        lambda x: torch.randn(x.shape, generator=noise, dtype=torch.float64, device="cpu").to(x), centre
    )
    least, out = stacked.each(centre, batch).mean(), centre
    for k in range(-30, 11):
        moved = optree.tree_map(lambda x, z, r=2.0**k: x + r * z, centre, draws)
        rise = float(stacked.each(moved, batch).mean() - least) + 4.0**k * target.strength * target.free / 2
        if not rise < target.temperature * target.free / 2:
            break
        out = moved
    return out


def _pilot(target: Target, chains: int, steps: int, lr: float, number: int) -> tuple[Any, list[float]]:
    """Where the chains of a pilot are at its end; means over its second half of virial, loss over ``T`` and ``tr(C)``."""
    measured, half, seen = Measured(target, chains, {}, None, 0.0, number), steps // 2, list[Tensor]()
    tx, params = target.chain(lr), target.start(chains)
    state, feed = tx.init(params), ResumableBatches(target.course(chains, -2 - number))
    plain = make_step(target.stacked(chains), tx, inplace=True)
    watched = replace(plain, observe=lambda params, grads, batch: measured(params, grads, batch, len(seen)))
    for i in range(steps):
        watch = i >= half and i % THIN == 0
        params, state, info = (watched if watch else plain)(params, state, feed.next())
        if watch:
            now = measured.with_loss(info.observed, info.aux)
            noise = now.get("noise", torch.zeros_like(now["loss"])).double()
            seen.append(torch.cat([now["virial"].double(), now["loss"] / target.temperature, noise], 1).mean(0))
    return params, torch.stack(seen).mean(0).tolist()


def _curvature(target: Target, chains: int, params: Any, batch: Any) -> float:
    """The largest curvature where any chain is, with the spring's."""
    return max(steepest(target.stacked(chains), params, batch) + target.strength, 1e-12)
