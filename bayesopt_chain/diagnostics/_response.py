r"""How a chain responds to gradients, to parameters and to its noise, read off the chain itself.

For one element ``theta`` of a leaf every linear chain is a small system. With ``s`` the numbers that the state keeps
for that element, ``g`` its gradient and ``xi`` its normal draws,

    s'     = A s + b g + u theta + E xi
    theta' = theta + c s - d g - w theta + f xi.

Impulses through ``tx.update`` give these numbers, whatever links the chain is made of. Elements differ by a gain ``G``,
the total displacement that one unit of gradient causes (``lr / (1 - mu)`` for momentum, times the preconditioner). In
the coordinates ``phi = theta / sqrt(G)`` the gradient is ``sqrt(G) g``, and all elements on which the same links act
have the same system, of gain one: a *group*. A preconditioner that learns is read as it stands in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.testing._linear_system import IMPULSE, OneUpdate
from bayesopt_chain.testing._lyapunov import solve_lyapunov

STEPS = 6  # of an impulse's response that are compared
TOLERANCE = 1e-6  # relative
MEMORY = 32  # numbers that a state may keep for an element
DRIFT = 0.01  # by which a response may change from one step to the next


class Group(NamedTuple):
    """The system of one element of ``leaves``, in coordinates in which its gain is one."""

    leaves: tuple[int, ...]
    A: Tensor
    b: Tensor
    u: Tensor
    E: Tensor
    c: Tensor
    d: Tensor
    w: Tensor
    f: Tensor
    places: tuple[tuple[int, int], ...] = ()  # where the numbers ``s`` stand in the state: entry, element
    draws: tuple[int, ...] = ()  # which of the normal numbers of a step are ``xi``

    @property
    def prior(self) -> float:
        """The curvature that weight decay adds."""
        return float(self.w - self.c @ torch.linalg.solve(_eye(self.A) - self.A, self.u))

    @property
    def temperature(self) -> float:
        """The variance times the curvature, prior included, as the learning rate goes to 0."""
        return 2.0 * self._warmth(5e-6) - self._warmth(1e-5)  # what white noise adds is linear in the curvature

    def _warmth(self, curvature: float) -> float:
        k = len(self.b)
        M = torch.zeros(k + 1, k + 1, dtype=torch.float64, device="cpu")
        M[0, 0] = 1.0 - self.d * curvature - self.w
        M[0, 1:], M[1:, 0], M[1:, 1:] = self.c, self.b * curvature + self.u, self.A
        noise = torch.cat([self.f[None], self.E])
        return float(solve_lyapunov(M, noise @ noise.T)[0, 0]) * (curvature + self.prior)


class Response(NamedTuple):
    """What a chain does to all leaves.

    Attributes:
        gains: ``G``, float64, like each leaf; zero where the chain never moves it.
        groups: the systems of the leaves that move.
    """

    gains: tuple[Tensor, ...]
    groups: tuple[Group, ...]


def read(tx: Any, params: Any, state: Any = None) -> Response:
    """The response of ``tx`` as it stands in ``state`` (default: two steps after ``init``).

    Raises:
        TypeError: an optimizer of :mod:`bayesopt_chain.optim`.
        ValueError: ``tx`` is not linear at that state, or its elements act on each other in ways that no gain
            describes.
    """
    if isinstance(tx, torch.optim.Optimizer):
        group = {k: v for k, v in tx.param_groups[0].items() if k in ("lr", "momentum", "weight_decay", "temperature")}
        raise TypeError(
            f"a chain is asked for, and {type(tx).__name__} is an optimizer, which moves its own parameters: pass the chain "
            f"of the same hyperparameters, such as bc.sgd({', '.join(f'{k}={v!r}' for k, v in group.items())})"
        )
    kinds.require("the diagnostics of a chain", tx=(tx, kinds.TX))
    probe = _Probe(tx, params, state)
    first, second = probe.response("gradient", 0), probe.response("gradient", 1)
    decay, other_decay = probe.response("parameter", 2), probe.response("parameter", 3)
    noise = probe.response("noise", 0)
    if any(_differ(x, y) for x, y in zip(noise, probe.response("noise", 0, 1.0))):
        raise ValueError(
            "the chain's own draws change how it answers later ones, as a thermostat's do; its heating by minibatches is "
            "that of no linear chain: compare bc.sghmc at the same lr and momentum"
        )
    later = _Probe(tx, params, probe.next_state).response("gradient", 0)
    if any(_differ(x, y, tolerance=DRIFT) for x, y in zip(first, later)):
        raise ValueError(
            "the chain answers a gradient otherwise from one step to the next at this state; pass the state of "
            "a run, after its burn-in, as state="
        )
    gains = [torch.zeros_like(p) for p in probe.params]
    groups: list[tuple[Tensor, list[int]]] = []
    for j, h in enumerate(first):
        if _differ(h, second[j]) or _differ(decay[j], other_decay[j], 1.0):
            raise ValueError(
                "the chain's response is not linear, or its elements act on each other; freeze an adaptive preconditioner "
                "(freeze_after) and pass the state of a run, after its burn-in, as state="
            )
        if not h.any():
            continue
        at = int(h.abs().amax(1).argmax())
        peak = -h[at]
        if not bool((peak > 0).all()):
            raise ValueError(
                "the chain climbs the loss, or leaves single elements of a leaf where they are; pass the loss that it "
                "descends, and mask whole leaves"
            )
        shape = torch.cat([h / peak, decay[j], noise[j] / peak.sqrt()])
        if _differ(shape, shape[:, :1]):
            raise ValueError(
                "elements of one leaf differ by more than a gain, as weight decay in front of a preconditioner makes them; put "
                "that prior into the loss, so that its curvature is measured with the rest"
            )
        gains[j] = peak.reshape(gains[j].shape).to(gains[j].device)
        for known, leaves in groups:
            if not _differ(shape[:, 0], known):
                leaves.append(j)
                break
        else:
            groups.append((shape[:, 0], [j]))
    systems = []
    for shape, leaves in groups:
        peak = float(gains[leaves[0]].reshape(-1)[0])
        system, gain = probe.system(leaves[0], shape, peak)
        for j in leaves:
            gains[j] *= gain / peak
        systems.append(system._replace(leaves=tuple(leaves)))
    return Response(tuple(gains), tuple(systems))


def reread(known: Response, tx: Any, params: Any, state: Any = None) -> Response:
    """The response of the same chain at another learning rate, by impulses where :func:`read` found its numbers."""
    probe = _Probe(tx, params, state)
    gains, groups = list(known.gains), []
    for group in known.groups:
        system, gain = probe.at(group.leaves[0], group.places, group.draws)
        before = _first(gains[group.leaves[0]])
        for j in group.leaves:
            gains[j] = gains[j] * (gain / before)
        groups.append(system._replace(leaves=group.leaves))
    return Response(tuple(gains), tuple(groups))


class _Probe(OneUpdate):
    """One update, and the responses of the updates after it, the rest of the state being kept as it is."""

    def response(self, kind: str, seed: int, size: float = IMPULSE) -> list[Tensor]:
        """Moves of every leaf, ``[STEPS, elements]``, after an impulse in all of its elements, over the impulse's height.

        The heights differ between elements: where elements act on each other, two such responses differ.
        """
        heights = [torch.full_like(p, size) for p in self.params]
        if kind != "noise":
            generator = torch.Generator().manual_seed(seed)
            for x in heights:
                x.mul_((1.0 + torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu")).to(x.device))
        impulse: dict[str, Any] = {
            "gradient": {"gradient": heights},
            "parameter": {"theta": heights},
            "noise": {"normals": torch.full((self.draws,), size, dtype=torch.float64, device="cpu")},
        }[kind]
        rows: list[list[Tensor]] = [[] for _ in self.params]
        moves, change = self(**impulse)
        for _ in range(STEPS):
            for row, move, height in zip(rows, moves, heights):
                row.append((move / height).reshape(-1))
            moves, change = self(numbers=change)
        return [torch.stack(row).cpu() for row in rows]

    def system(self, j: int, shape: Tensor, peak: float) -> tuple[Group, float]:
        """The system of the first element of leaf ``j``, and its gain; checked against its responses."""

        def late(pulse: dict[str, Any]) -> tuple[bool, set[tuple[int, int]]]:
            """Whether a pulse ever moves the element, and which places of the state it reaches."""
            moves, change = self(**pulse)
            moved, places = bool(_first(moves[j])), set()
            for _ in range(STEPS):
                places |= _places(change)
                moves, change = self(numbers=change)
                moved |= bool(_first(moves[j]))
            return moved, places

        draws = self._draws_of(range(self.draws), lambda pulse: late(pulse)[0])
        pulses = [self._pulse(j), self._pulse(j, "theta"), *(self._draws([n]) for n in draws)]
        places = set().union(*(late(pulse)[1] for pulse in pulses))
        if len(places) > MEMORY:
            raise ValueError(
                f"the chain's elements act on each other: one gradient reaches {len(places)} numbers of its state"
            )
        columns: dict[tuple[int, int], tuple[float, dict[tuple[int, int], float]]] = {}
        for place in places:
            moves, after = self(numbers=self._change(*place))
            columns[place] = (
                _first(moves[j]) / IMPULSE,
                {(i, n): float(after[i].view(-1)[n]) / IMPULSE for i, n in places},
            )
        group, gain = self.at(j, sorted(_influence(columns)), draws)
        root = gain**0.5
        A, c, E = group.A, group.c * root, group.E
        built = torch.cat(
            [
                _run(A, group.b * root, c, -group.d * gain) / peak,
                _run(A, group.u / root, c, -group.w),
                _run(A, E.sum(1), c, group.f.sum() * root) / peak**0.5,
            ]
        )
        if _differ(built, shape):
            raise ValueError("the chain's response could not be read: a linear system does not reproduce it")
        return group, gain

    def at(self, j: int, places: Sequence[tuple[int, int]], draws: Sequence[int]) -> tuple[Group, float]:
        """The system of the first element of leaf ``j`` whose memory is at these places of the state, and its gain."""

        def column(**pulse: Any) -> tuple[Tensor, Tensor]:
            moves, after = self(**pulse)
            s = [float(after[i].view(-1)[n]) / IMPULSE for i, n in places]
            move = torch.tensor(_first(moves[j]) / IMPULSE, dtype=torch.float64, device="cpu")
            return move, torch.tensor(s, dtype=torch.float64, device="cpu")

        def matrix(columns: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            if not columns:
                nothing = torch.zeros(len(places) + 1, 0, dtype=torch.float64, device="cpu")
                return nothing[0], nothing[1:]
            return torch.stack([move for move, _ in columns]), torch.stack([s for _, s in columns], dim=1)

        c, A = matrix([column(numbers=self._change(*place)) for place in places])
        f, E = matrix([column(**self._draws([n])) for n in draws])
        (d, b), (w, u) = column(**self._pulse(j)), column(**self._pulse(j, "theta"))
        if len(places) and float(torch.linalg.eigvals(A).abs().amax()) >= 1.0:
            raise ValueError("the chain's own memory does not fade: its momentum must lie below 1")
        gain = float(-d - c @ torch.linalg.solve(_eye(A) - A, b))
        if not gain > 0:
            raise ValueError("the chain climbs the loss: a constant gradient moves the parameters along it")
        root = gain**0.5
        group = Group((j,), A, b / root, u * root, E, c / root, -d / gain, -w, f / root, tuple(places), tuple(draws))
        return group, gain

    def _pulse(self, j: int, name: str = "gradient") -> dict[str, Any]:
        """A pulse in the first element of leaf ``j``."""
        leaves = [torch.zeros_like(p) for p in self.params]
        leaves[j].view(-1)[0] = IMPULSE
        return {name: leaves}

    def _change(self, i: int, n: int) -> list[Tensor]:
        """A pulse in place ``n`` of the ``i``-th moving entry of the state."""
        change = [torch.zeros_like(t) for t in self.numbers]
        change[i].view(-1)[n] = IMPULSE
        return change

    def _draws(self, chosen: Sequence[int]) -> dict[str, Any]:
        xi = torch.zeros(self.draws, dtype=torch.float64, device="cpu")
        xi[list(chosen)] = IMPULSE
        return {"normals": xi}

    def _draws_of(self, among: range, moves: Callable[[dict[str, Any]], bool]) -> list[int]:
        """Which of a step's normal numbers move an element, by bisection; their heights differ so that no two cancel."""
        if not among:
            return []
        xi = torch.zeros(self.draws, dtype=torch.float64, device="cpu")
        xi[among.start : among.stop] = IMPULSE * torch.linspace(1.0, 2.0, len(among), dtype=torch.float64, device="cpu")
        if not moves({"normals": xi}):
            return []
        if len(among) == 1:
            return [among.start]
        middle = (among.start + among.stop) // 2
        return [
            *self._draws_of(range(among.start, middle), moves),
            *self._draws_of(range(middle, among.stop), moves),
        ]


def _places(change: list[Tensor]) -> set[tuple[int, int]]:
    """The places of the state that a pulse has reached."""
    return {(i, int(n)) for i, x in enumerate(change) for n in x.reshape(-1).nonzero()[: MEMORY + 1]}


def _run(A: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The first moves after a unit impulse."""
    moves = [d]
    for _ in range(STEPS - 1):
        moves.append(c @ b)
        b = A @ b
    return torch.stack(moves)


def _influence(columns: dict[tuple[int, int], tuple[float, dict[tuple[int, int], float]]]) -> set[tuple[int, int]]:
    """The places that move the parameter, now or later."""
    found = {i for i, (move, _) in columns.items() if move}
    while wider := {i for i, (_, after) in columns.items() if i not in found and any(after[n] for n in found)}:
        found |= wider
    return found


def _differ(x: Tensor, y: Tensor, scale: float = 0.0, tolerance: float = TOLERANCE) -> bool:
    """Whether two responses differ; NaN does."""
    return not bool(((x - y).abs() <= tolerance * max(scale, float(y.abs().amax()))).all())


def _first(x: Tensor) -> float:
    return float(x.reshape(-1)[0])


def _eye(A: Tensor) -> Tensor:
    return torch.eye(len(A), dtype=A.dtype, device=A.device)
