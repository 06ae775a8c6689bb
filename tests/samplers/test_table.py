"""The table of samplers in the docs says what the code does."""

import re
from pathlib import Path

import optree
import pytest
import torch

import bayesopt_chain as bc
from tests.registry import SAMPLERS

DOCS = Path(__file__).parents[2] / "docs" / "samplers.md"


def table() -> dict[str, list[str]]:
    """Cells of each row by the names in its first column."""
    rows = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 6 and cells[0].startswith("`"):
            names = re.findall(r"`([^`]+)`", cells[0])
            buffers = [cell.strip() for cell in cells[4].split(",")]
            for n, name in enumerate(names):
                rows[name] = [*cells[:4], buffers[min(n, len(buffers) - 1)], cells[5]]
    return rows


SPELLINGS = {
    "sgld, order 1": "sgld(order=1)",
    "sghmc, order 1": "sghmc(order=1)",
    "sgnht, per parameter": "sgnht(per_parameter=True)",
    "badodab, per parameter": "badodab(per_parameter=True)",
    "cyclical, lr inside": "cyclical(lr_inside=True)",
}


def docs_name(name: str) -> str:
    """The name in the table: ``sgld, order 1`` is ``sgld(order=1)``."""
    return SPELLINGS.get(name, name)


TWO_CHAINS = ("svgd", "replica_exchange")  # their rows in the registry are dressed as one chain


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_its_row_has_the_buffers_of_the_state_the_fitted_order_and_its_optimizer(sampler):
    _, _, optimizer, order, buffers, _ = table()[docs_name(sampler.name)]
    params = torch.zeros(500) if sampler.function in TWO_CHAINS else torch.zeros(2, 500)
    held = optree.tree_leaves(sampler.build(0.3).init(params))
    assert sum(t.numel() for t in held if t.is_floating_point()) // 1000 == int(buffers)
    if sampler.order:
        assert order.startswith(str(sampler.order.slope)) and (" in `h`" in order) == sampler.order.in_time
    assert optimizer.startswith("none") == (sampler.limit is None and sampler.name != "svgd")


def test_the_examples_run():
    for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S):
        if not code.startswith(">>>"):  # those are doctests
            exec(compile(code, str(DOCS), "exec"), {})


def test_every_name_in_the_table_is_public():
    for name in table():
        name = name.split("(")[0]
        assert hasattr(bc.samplers, name) or hasattr(bc.gradients, name), name
