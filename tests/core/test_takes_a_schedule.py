"""Every public function that takes a schedule samples exactly along a rate that falls, or its docstring says what it does.

A function is known by its annotations, so that a new one turns this red until it stands in one of the two tables.
"""

import inspect
import types
from typing import Any

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import variance_along

S, T = bc.schedules, 0.7
CURVATURES = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
WARM = 60  # updates after which Adam's bias correction, 0.5^60, is gone


class Diagonal:
    """The precision of a preconditioner, as ``langevin_with_precision`` takes it."""

    def solve(self, x):
        return x / torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)

    def sqrt_solve(self, x):
        return x / torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64).sqrt()


ADAM = dict(betas=(0.5, 0.9), temperature=T, freeze_after=20)
EXACT = {  # name, variant -> chain of a learning rate, whose preconditioner is frozen by now
    "sgd": lambda lr: bc.sgd(lr, 0.9, nesterov=True, temperature=T),
    "samplers.sgld": lambda lr: bc.sgld(lr, temperature=T),
    "samplers.sghmc": lambda lr: bc.sghmc(lr, 0.9, temperature=T),
    "samplers.langevin_with_precision": lambda lr: bc.samplers.langevin_with_precision(
        Diagonal(), lr, 0.8, temperature=T
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
    torch.manual_seed(0)
    path = variance_along(tx, CURVATURES.diag(), 8, torch.zeros(3, dtype=torch.float64), state=warm(tx))
    assert (path * CURVATURES / T - torch.eye(3)).abs().max() < 1e-9


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FOLLOWS)
@pytest.mark.parametrize("temperatures", [[1.0, 0.4, 0.1], [0.1, 0.4, 1.0]], ids=["falls", "rises"])
def test_along_a_temperature_the_variance_goes_from_one_to_the_other(name, temperatures):
    """Without turning, but for OBABO, whose noise is white."""
    tx = FOLLOWS[name](S.piecewise([4, 9], temperatures))
    path = variance_along(tx, CURVATURES.diag(), 16).diagonal(dim1=-2, dim2=-1) * CURVATURES
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
