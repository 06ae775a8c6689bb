"""Rademacher, three-point and uniform draws: moments, streams, and refusals."""

import pytest
import torch

from bayesopt_chain.random.stream import KINDS, Variables

KEY, STEP = torch.tensor(12345), torch.tensor(7)


def draw(kind: str, step: torch.Tensor = STEP, n: int = 240_000) -> torch.Tensor:
    return Variables(kind=kind).draw(KEY, step, [torch.empty(1, n, dtype=torch.float64)])[0][0]


@pytest.mark.parametrize(
    ("kind", "values", "probabilities"),
    [("rademacher", (-1.0, 1.0), (0.5, 0.5)), ("three_point", (-(3.0**0.5), 0.0, 3.0**0.5), (1 / 6, 2 / 3, 1 / 6))],
)
def test_values_and_frequencies(kind, values, probabilities):
    """Counts within 5 standard errors; a false alarm has probability below 6e-7 for each value."""
    x = draw(kind)
    assert sorted(x.unique().tolist()) == pytest.approx(sorted(values))
    for value, p in zip(values, probabilities):
        share = (torch.isclose(x, torch.tensor(value, dtype=x.dtype))).double().mean().item()
        assert abs(share - p) < 5 * (p * (1 - p) / len(x)) ** 0.5


def test_uniforms_are_uniform():
    """Each of 16 cells within 5 standard errors, a false alarm of 1e-5 in all; the interval is half open."""
    x = draw("uniform")
    assert x.min() >= 0.0 and x.max() < 1.0
    share = torch.histc(x, 16, 0.0, 1.0) / len(x)
    assert ((share - 1 / 16).abs() < 5 * (15 / 256 / len(x)) ** 0.5).all()


@pytest.mark.parametrize("kind", ["rademacher", "three_point", "uniform"])
def test_neighbours_and_steps_are_uncorrelated(kind):
    """Correlations within 5 standard errors: of neighbours up to 64 apart, and of consecutive steps."""
    x, y = ((z - z.mean()) / z.std() for z in (draw(kind), draw(kind, STEP + 1)))
    bound = 5 / len(x) ** 0.5
    for lag in (1, 2, 4, 7, 8, 63, 64):
        assert abs((x[lag:] * x[:-lag]).mean().item()) < bound
    assert abs((x * y).mean().item()) < bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_shape_are_the_leafs(kind, dtype):
    like = [torch.empty(1, 3, dtype=dtype), torch.empty(1, dtype=dtype)]
    (a, b), (c,) = Variables(each=(2, 1), kind=kind).draw(KEY, STEP, like)
    assert a.shape == b.shape == (3,) and c.shape == () and {a.dtype, b.dtype, c.dtype} == {dtype}
