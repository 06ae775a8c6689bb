"""Every function and class of TorchOpt is here, with its signature, and then a temperature."""

import inspect

import pytest
import torchopt

import bayesopt_chain as bc

FUNCTIONS = list(torchopt.alias.__all__)
CLASSES = [
    name
    for name in torchopt.__all__
    if inspect.isclass(getattr(torchopt, name))
    and issubclass(getattr(torchopt, name), (torchopt.Optimizer, torchopt.MetaOptimizer))
    and getattr(torchopt, name) not in (torchopt.Optimizer, torchopt.MetaOptimizer)
]


def described(parameters):
    return [(p.name, p.kind, p.default) for p in parameters]


def test_the_lists_are_complete():
    assert len(FUNCTIONS) == 8 and len(CLASSES) == 24


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_torchopts_signature_then_temperature(name):
    theirs = inspect.signature(getattr(torchopt, name)).parameters.values()
    ours = list(inspect.signature(getattr(bc, name)).parameters.values())
    assert described(ours[: len(theirs)]) == described(theirs)
    temperature, *rest = ours[len(theirs) :]
    assert (temperature.name, temperature.default, temperature.kind) == (
        "temperature",
        0.0,
        inspect.Parameter.KEYWORD_ONLY,
    )
    assert [p.name for p in rest] in ([], ["freeze_after"])


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_torchopts_signature_then_temperature(name):
    theirs = inspect.signature(getattr(torchopt, name)).parameters.values()
    ours = list(inspect.signature(getattr(bc, name, None) or getattr(bc.meta, name)).parameters.values())
    assert described(ours[: len(theirs)]) == described(theirs)
    assert ours[len(theirs)].name == "temperature" and ours[len(theirs)].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    "alias, name", [("Adagrad", "AdaGrad"), ("Adamax", "AdaMax"), ("RMSprop", "RMSProp"), ("Adadelta", "AdaDelta")]
)
def test_aliases_are_the_same_class(alias, name):
    for prefix in ("", "Meta"):
        assert getattr(bc.meta, prefix + alias) is (getattr(bc.meta if prefix else bc, prefix + name))
        assert getattr(torchopt, prefix + alias) is getattr(torchopt, prefix + name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_torchopt_refuses_we_refuse(name):
    for bad in ({"lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}, {"lr": 0.1, "eps": -1.0}):
        if "eps" in bad and name == "sgd":
            continue
        for library in (torchopt, bc):
            with pytest.raises(ValueError):
                getattr(library, name)(**bad)
