"""Uniform draws: moments and streams."""

import pytest
import torch

from bayesopt_chain.random.stream import Variables

KEY, STEP = torch.tensor(12345), torch.tensor(7)


def draw(kind: str, step: torch.Tensor = STEP, n: int = 240_000) -> torch.Tensor:
    return Variables(kind=kind).draw(KEY, step, [torch.empty(1, n, dtype=torch.float64)])[0][0]


def test_uniforms_are_uniform():
    """Each of 16 cells within 5 standard errors, a false alarm of 1e-5 in all; the interval is half open."""
    x = draw("uniform")
    assert x.min() >= 0.0 and x.max() < 1.0
    share = torch.histc(x, 16, 0.0, 1.0) / len(x)
    assert ((share - 1 / 16).abs() < 5 * (15 / 256 / len(x)) ** 0.5).all()


def test_neighbours_and_steps_of_uniforms_are_uncorrelated():
    """Correlations within 5 standard errors: of neighbours up to 64 apart, and of consecutive steps."""
    x, y = ((z - z.mean()) / z.std() for z in (draw("uniform"), draw("uniform", STEP + 1)))
    bound = 5 / len(x) ** 0.5
    for lag in (1, 2, 4, 7, 8, 63, 64):
        assert abs((x[lag:] * x[:-lag]).mean().item()) < bound
    assert abs((x * y).mean().item()) < bound


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_shape_are_the_leafs(kind, dtype):
    like = [torch.empty(1, 3, dtype=dtype), torch.empty(1, dtype=dtype)]
    (a, b), (c,) = Variables(each=(2, 1), kind=kind).draw(KEY, STEP, like)
    assert a.shape == b.shape == (3,) and c.shape == () and {a.dtype, b.dtype, c.dtype} == {dtype}
