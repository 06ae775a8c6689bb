"""Loaders of dictionaries and dataclasses as pairs: the fits and predictions of the pairs themselves."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch

import bayesopt_chain as bc


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=g)
    return [(x[i : i + 20], (x[i : i + 20].sum(1) > 0).long()) for i in (0, 20, 40)]


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).eval()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", [lambda x, y: {"x": x, "y": y}, lambda x, y: UserDict(x=x, y=y), Batch])
@pytest.mark.parametrize("tune", ["evidence", "validation"])
def test_a_fit_of_other_batches_is_that_of_the_pairs(kind, tune):
    plain, model, likelihood = data(), module(), bc.likelihoods.categorical()
    loader = [kind(x, y) for x, y in plain]
    how = {"subset": "all", "tune": tune}
    validation = tune == "validation"
    wanted = bc.fit_laplace(model, likelihood, plain, **how, **({"validation": plain} if validation else {}))
    mine = bc.posterior.pairs(loader, "x", lambda batch: batch["y"] if not isinstance(batch, Batch) else batch.y)
    found = bc.fit_laplace(model, likelihood, mine, **how, **({"validation": mine} if validation else {}))
    torch.testing.assert_close(found.log_evidence, wanted.log_evidence, rtol=0, atol=0)
    inputs = bc.posterior.pairs(loader, "x")
    torch.testing.assert_close(found.predict(inputs), wanted.predict(plain), rtol=0, atol=0)
    assert len(inputs) == 3
    torch.testing.assert_close(found.refit(mine).log_evidence, wanted.refit(plain).log_evidence, rtol=0, atol=0)


def test_bad_input_is_refused():
    loader = [{"x": torch.zeros(2, 3), "y": torch.zeros(2).long()}]
    with pytest.raises(ValueError, match=r"got dict; make them of any other with bc\.posterior\.pairs"):
        bc.fit_laplace(module(), bc.likelihoods.categorical(), loader)
    with pytest.raises(ValueError, match="the batch has no 'z'"):
        bc.fit_laplace(module(), bc.likelihoods.categorical(), bc.posterior.pairs(loader, "x", "z"))
