"""Chains whose rate falls sample ``T / curvature`` at every step, by whatever way of making one; each that takes a schedule.

Exactly, by the maps of their own updates. A function that takes a schedule is known by its annotations, so that a new one turns
this red until it stands in a table. One update is a linear map of parameters, state and draws: in float64, from a random start
and with random draws, equal steps mean equal maps, so that what ``variance_along`` says of ``update`` holds of all of them.
"""

import inspect
import types
from typing import Any

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain import precision
from bayesopt_chain.loop.capture import replays
from bayesopt_chain.testing import variance_along
from tests.walk import walk

S, T = bc.schedules, 0.7
FALLS = {
    "StepLR": S.piecewise([5, 10], [0.1, 0.01, 0.0001]),
    "MultiStepLR": S.piecewise([3, 4, 12], [0.1, 0.06, 0.002, 0.001]),
    "cosine": S.cosine(0.1, 15),
    "linear": S.polynomial(0.1, 20, final=1e-3),
    "exponential": lambda count: 0.1 * 0.8 ** torch.as_tensor(count).double(),
    "polynomial": S.polynomial(0.1, 16, final=1e-6, power=3.0),
    "zero in the middle and last": S.piecewise([3, 4, 6, 8, 9, 12], [0.1, 0.0, 0.1, 0.0, 0.05, 0.01, 0.0]),
}
STEPS = 16


def error(tx: Any, curvatures, prior: float = 0.0, steps: int = STEPS, **kwargs: Any) -> float:
    """The largest ``|Var theta (K + prior) / T - 1|`` over the steps and curvatures."""
    k = torch.as_tensor(curvatures, dtype=torch.float64)
    covariance = variance_along(tx, k.diag(), steps, **kwargs)
    off = covariance * (k + prior) / T - torch.eye(len(k), dtype=torch.float64)
    return off.abs().max().item()


def of_the_limit(mu: float) -> list[float]:
    return [fraction * 2 * (1 + mu) / 0.1 for fraction in (0.03, 0.3, 0.9)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mu", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("schedule", FALLS)
def test_momentum_is_exact_along_every_fall(schedule, mu):
    assert error(bc.sgd(FALLS[schedule], mu, temperature=T), of_the_limit(mu)) < 1e-9


def links(mu: float, lr: Any, **momentum: Any) -> tuple[Any, ...]:
    return bc.add_momentum(mu, **momentum), bc.inject_langevin_noise(T), bc.scale_by_neg_lr(lr)


CHAINS = {
    "Nesterov": (lambda lr: bc.sgd(lr, 0.9, nesterov=True, temperature=T), 0.0),
    "Nesterov, little momentum": (lambda lr: bc.sgd(lr, 0.1, nesterov=True, temperature=T), 0.0),
    "dampening": (lambda lr: bc.sgd(lr, 0.9, dampening=0.4, temperature=T), 0.0),
    "average": (lambda lr: bc.chain(bc.links.scale(0.1), *links(0.9, lr)), 0.0),
    "coupled decay": (lambda lr: bc.sgd(lr, 0.9, weight_decay=0.5, temperature=T), 0.5),
    "decoupled decay": (
        lambda lr: bc.chain(*links(0.9, lr)[:2], bc.links.add_decayed_weights(0.5), links(0.9, lr)[2]),
        0.05,
    ),
    "decoupled decay behind Nesterov": (
        lambda lr: bc.chain(*links(0.9, lr, nesterov=True)[:2], bc.links.add_decayed_weights(0.5), links(0.9, lr)[2]),
        0.05,
    ),
    "rate and gain in front and behind": (lambda lr: bc.chain(bc.links.scale_by_schedule(lr), *links(0.9, 0.5)), 0.0),
    "two rates": (lambda lr: bc.chain(bc.links.scale_by_schedule(lr), *links(0.9, S.cosine(1.0, 30))), 0.0),
    "preconditioner": (
        lambda lr: bc.chain(bc.scale_by_preconditioner(torch.tensor([0.5, 2.0]).double()), *links(0.9, lr)),
        0.0,
    ),
}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("schedule", ["StepLR", "cosine"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_all_kinds_are_exact_along_a_fall(name, schedule):
    build, prior = CHAINS[name]
    assert error(build(FALLS[schedule]), [0.2, 8.0], prior) < 1e-9


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_a_rate_in_front_of_the_momentum_is_exact_too_and_leaves_the_velocity_alone_on_the_way(mu):
    def build(schedule):
        return bc.chain(bc.scale_by_neg_lr(schedule), bc.add_momentum(mu), bc.inject_langevin_noise(T))

    for name in ("StepLR", "linear"):
        assert error(build(FALLS[name]), of_the_limit(mu)[::2]) < 1e-9
    # a fall that is slow enough: with T -> 0 the chain is the optimizer, whose velocity nobody scales
    tx, cold = (bc.chain(bc.scale_by_neg_lr(FALLS["linear"]), bc.add_momentum(mu), *noise) for noise in
                ([bc.inject_langevin_noise(1e-30)], []))  # fmt: skip
    p = torch.ones(1, dtype=torch.float64)
    states = [tx.init(p), cold.init(p)]
    for _ in range(12):
        (a, states[0]), (b, states[1]) = (x.update(p, s, params=p, inplace=False) for x, s in zip((tx, cold), states))
        assert (a - b).abs().max() < 1e-12


TURNED = torch.tensor([[2.0, 0.6, 0.1], [0.6, 1.0, 0.0], [0.1, 0.0, 3.0]], dtype=torch.float64)


@pytest.mark.slow
def test_correlated_parameters_and_groups_with_rates_of_their_own_are_exact():
    tx = bc.partition(
        {
            "a": bc.sgd(FALLS["StepLR"], 0.9, temperature=T),
            "b": bc.sgd(FALLS["cosine"], nesterov=True, momentum=0.5, temperature=T),
        },
        {"x": "a", "y": "b"},
    )
    params = {"x": torch.zeros(2, dtype=torch.float64), "y": torch.zeros(1, dtype=torch.float64)}
    path = variance_along(tx, TURNED, STEPS, params)
    want = T * torch.linalg.inv(TURNED)
    assert (path - want).abs().max() < 1e-9


CURVATURES = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
WARM = 60  # updates after which Adam's bias correction, 0.5^60, is gone


DIAGONAL_PRECISION = precision.Diagonal(
    torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), torch.tensor(1.0)
).factorised()
ADAM = dict(betas=(0.5, 0.9), temperature=T, freeze_after=20)
EXACT = {  # name, variant -> chain of a learning rate, whose preconditioner is frozen by now
    "sgd": lambda lr: bc.sgd(lr, 0.9, nesterov=True, temperature=T),
    "samplers.sgld": lambda lr: bc.sgld(lr, temperature=T),
    "samplers.sghmc": lambda lr: bc.sghmc(lr, 0.9, temperature=T),
    "samplers.langevin_with_precision": lambda lr: bc.samplers.langevin_with_precision(
        DIAGONAL_PRECISION, lr, 0.8, temperature=T
    ),
    "links.inject_langevin_noise": lambda lr: bc.chain(bc.inject_langevin_noise(T), bc.scale_by_neg_lr(lr)),
    "links.scale_by_neg_lr": lambda lr: bc.chain(bc.inject_langevin_noise(T), bc.scale_by_neg_lr(lr)),
    "adam": lambda lr: bc.adam(lr, **ADAM),
    "adamw": lambda lr: bc.adamw(lr, weight_decay=0.0, **ADAM),
    "adamax": lambda lr: bc.adamax(lr, **ADAM),
    "radam": lambda lr: bc.radam(lr, **ADAM),
    "adagrad": lambda lr: bc.adagrad(lr, temperature=T, freeze_after=20),
    "rmsprop": lambda lr: bc.rmsprop(lr, 0.9, momentum=0.8, temperature=T, freeze_after=20),
    "rmsprop, centred": lambda lr: bc.rmsprop(lr, 0.9, centered=True, temperature=T, freeze_after=20),
    "links.inject_langevin_noise, behind running_rms": lambda lr: bc.chain(
        bc.scale_by_preconditioner(bc.links.running_rms(0.9, freeze_after=20)), bc.sgd(lr, 0.8, temperature=T)
    ),
    "samplers.psgld": lambda lr: bc.samplers.psgld(lr, 0.9, temperature=T, freeze_after=20),
    "samplers.adam_sghmc": lambda lr: bc.samplers.adam_sghmc(lr, **ADAM),
    "samplers.adaptive_sghmc": lambda lr: bc.samplers.adaptive_sghmc(lr, 0.8, temperature=T, burn_in=20),
}
FOLLOWS = {  # name -> chain of a temperature, whose variance stays between that of the old one and of the new one
    "sgd": lambda t: bc.sgd(0.1, 0.9, nesterov=True, temperature=t),
    "samplers.sgld": lambda t: bc.sgld(0.1, temperature=t),
    "samplers.sghmc": lambda t: bc.sghmc(0.1, 0.9, temperature=t),
    "samplers.baoab": lambda t: bc.samplers.baoab(0.2, friction=1.0, temperature=t),
    "samplers.obabo": lambda t: bc.samplers.obabo(0.2, friction=1.0, temperature=t),
    "samplers.ubu": lambda t: bc.samplers.ubu(0.2, friction=1.0, temperature=t),
    "samplers.palindromic_ubu": lambda t: bc.samplers.palindromic_ubu(0.2, friction=1.0, temperature=t),
    "samplers.sghmc_euler": lambda t: bc.samplers.sghmc_euler(0.01, 0.9, temperature=t),
}
SAYS = {  # name -> what its docstring says of a schedule, where no closed form can be asked for
    "adadelta": "T > 0 is refused when ``init`` is called",
    "samplers.badodab": "the thermostat follows",
    "samplers.sgnht": "the thermostat follows",
    "samplers.contour_sgld": "along a schedule",
    "samplers.scale_by_contour": "along a schedule",
    "samplers.cyclical": "as lr falls",
    "samplers.lattice_walk": "remembers nothing of the last one",
    "samplers.sgfs": "remembers nothing of the last one",
    "samplers.mclmc": "remembers no temperature",
    "samplers.samadams": "stays between the old and the",
    "samplers.scale_by_stein_kernel": "flow towards",
    "samplers.svgd": "flow towards",
    "vi.dense": "as in",
    "vi.low_rank": "as in",
    "vi.mean_field": "a schedule of the update count",
    "vi.ivon": "a schedule of the update count",
    "vi.von": "as in",
}


def public(module: Any, prefix: str = "") -> dict[str, Any]:
    """Functions of the package and its namespaces, by the longest name."""
    found = {}
    for name in module.__all__:
        x = getattr(module, name)
        if isinstance(x, types.ModuleType) and not prefix:
            found.update(public(x, f"{name}."))
        elif inspect.isfunction(x):
            found[f"{prefix}{name}"] = x
    return found


def takers() -> set[str]:
    """The names of functions with an argument that may be a schedule; of several names of one function the longest."""
    names: dict[int, str] = {}
    for name, f in public(bc).items():
        kinds = [str(p.annotation) for p in inspect.signature(f).parameters.values() if p.name in ("lr", "temperature")]
        if any("Schedule" in kind for kind in kinds):
            names[id(f)] = max(name, names.get(id(f), ""), key=len)
    return set(names.values())


def test_every_function_that_takes_a_schedule_stands_in_a_table():
    assert takers() == {name.split(",")[0] for name in (*EXACT, *FOLLOWS, *SAYS)}


def warm(tx: Any) -> Any:
    """The state after updates whose gradients wobble, so that preconditioners differ from one and are frozen."""
    p = torch.zeros(3, dtype=torch.float64)
    state = tx.init(p)
    for k in range(WARM):
        _, state = tx.update(torch.sin(torch.arange(3.0).double() + k) + 1.5, state, params=p, inplace=False)
    return state


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", EXACT)
def test_along_a_rate_that_falls_it_is_exact_at_every_step(name):
    tx = EXACT[name](S.piecewise([WARM + 2, WARM + 5], [0.05, 0.02, 0.003]))
    path = variance_along(tx, TURNED, 8, torch.zeros(3, dtype=torch.float64), state=warm(tx))
    assert (path @ TURNED / T - torch.eye(3)).abs().max() < 1e-9


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FOLLOWS)
@pytest.mark.parametrize("temperatures", [[1.0, 0.4, 0.1], [0.1, 0.4, 1.0]], ids=["falls", "rises"])
def test_along_a_temperature_the_variance_goes_from_one_to_the_other(name, temperatures):
    """Without turning, but for OBABO, whose noise is white."""
    tx = FOLLOWS[name](S.piecewise([4, 9], temperatures))
    ends = CURVATURES[::2]
    path = variance_along(tx, ends.diag(), 16).diagonal(dim1=-2, dim2=-1) * ends
    up = temperatures[-1] == 1.0
    ends = path[0], path[0] * temperatures[-1] / temperatures[0]
    assert (path > min(ends, key=torch.sum) - 1e-12).all() and (path < max(ends, key=torch.sum) + 1e-12).all()
    change = path.diff(dim=0) * (1 if up else -1)
    assert change.max() > 1e-3
    if name != "samplers.obabo":
        assert change.min() > -1e-12


@pytest.mark.parametrize("name", SAYS)
def test_what_can_not_be_exact_says_what_it_does(name):
    assert SAYS[name] in " ".join((inspect.getdoc(public(bc)[name]) or "").split())


DIAGONAL = {
    "w": torch.tensor([0.2, 1.0, 7.0], dtype=torch.float64),
    "b": torch.tensor([[3.0, 0.5]], dtype=torch.float64),
}
UPDATES = 12
MOVES = {
    "SGD": lambda lr: bc.sgld(lr, temperature=0.7),
    "heavy ball": lambda lr: bc.sghmc(lr, 0.9, temperature=0.7),
    "Nesterov": lambda lr: bc.sgd(lr, 0.9, nesterov=True, temperature=0.7),
}


def falling(name, lr=0.1):
    """At a rate that falls by steps of 1 to 0.01, and smoothly in between, and stops for a step."""

    def schedule(count):
        count = torch.as_tensor(count)
        fall = torch.where(count < 3, 1.0, torch.where(count < 7, 0.1, 0.01))
        return lr * 0.9 ** count.double() * torch.where(count == 5, 0.0, fall)

    return MOVES[name](schedule)


def gradient(params):
    return {name: DIAGONAL[name] * x for name, x in params.items()}


def loss(params, batch):
    return sum((x * g).sum() / 2 for x, g in zip(params.values(), gradient(params).values()))


def by_step(step, params, state):
    """The parameters after each step."""
    path = []
    for _ in range(UPDATES):
        params, state, _ = step(params, state, None)
        path.append({name: x.clone() for name, x in params.items()})
    return path


INDUCTOR = [pytest.mark.slow, pytest.mark.skipif(not replays.compiler_found(), reason="needs a C++ compiler")]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "name, backend",
    [
        *((name, "eager") for name in MOVES),
        pytest.param("Nesterov", "inductor", marks=INDUCTOR),
        *((name, form) for name in MOVES for form in ("step", "step in place")),
    ],  # both kinds of branch
)
def test_steps_of_make_step_captured_or_not_are_those_of_update(name, backend):
    torch.manual_seed(0)
    tx, params = falling(name), {name: torch.randn_like(k) for name, k in DIAGONAL.items()}
    state = tx.init(params)
    want = [now for now, _ in walk(tx, params, gradient, UPDATES, state)]
    step = bc.make_step(loss, tx, inplace=backend == "step in place")
    fast = step if backend.startswith("step") else bc.capture(step, params, state, None, backend=backend)
    torch.testing.assert_close(by_step(fast, params, state), want, rtol=1e-12, atol=1e-12)
