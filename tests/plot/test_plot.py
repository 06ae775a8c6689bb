"""Pictures show the numbers that they say they show, and refuse what they cannot draw."""

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from torchmetrics.functional.classification import multiclass_calibration_error

import bayesopt_chain as bc

matplotlib.use("agg")


def probabilities(n=400, classes=3):
    torch.manual_seed(1)
    p = (2 * torch.randn(n, classes)).softmax(-1)
    return p, torch.randint(classes, (n,))


def gaussian(means, variance=1.0):
    """A Gaussian prediction at known means."""
    return bc.likelihoods.gaussian(variance).predictive(means[:, None], torch.zeros(len(means), 1, 1))


def test_a_band_is_the_interval_of_the_prediction_in_the_order_of_the_inputs():
    x = torch.tensor([2.0, 0.0, 1.0])
    prediction = gaussian(x**2)
    ax = bc.plot.bands(x, prediction, levels=(0.9,))
    (band,) = ax.collections
    low, high = (end[:, 0] for end in prediction.interval(0.9))
    corners = torch.as_tensor(band.get_paths()[0].vertices)
    for place in (0, 1, 2):
        at = corners[corners[:, 0] == x[place]][:, 1]
        assert at.min() == pytest.approx(float(low[place]), abs=1e-5)
        assert at.max() == pytest.approx(float(high[place]), abs=1e-5)
    assert ax.lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]


def test_the_calibration_error_in_the_legend_is_that_of_torchmetrics():
    p, targets = probabilities()
    want = multiclass_calibration_error(p, targets, 3, n_bins=10).item()
    label = bc.plot.reliability(p, targets, bins=10).get_legend_handles_labels()[1][-1]
    assert label == f"ECE {want:.3f}"


def test_intervals_that_are_too_narrow_lie_below_the_diagonal():
    targets = 2 * torch.randn(500, 1)
    for variance, below in ((1.0, True), (16.0, False)):
        ax = bc.plot.coverage(gaussian(torch.zeros(500), variance), targets)
        level, share = (torch.as_tensor(x) for x in ax.lines[-1].get_data())
        middle = (level > 0.3) & (level < 0.7)
        assert bool((share < level)[middle].all()) == below


def test_methods_are_compared_on_one_axes_with_one_diagonal():
    ax = Figure().subplots()
    p, targets = probabilities()
    for label in ("a", "b"):
        assert bc.plot.reliability(p, targets, label=label, ax=ax) is ax
    assert len(ax.lines) == 3


@pytest.mark.parametrize(
    "call, error, says",
    [
        (
            lambda: bc.plot.bands(torch.zeros(3, 2), gaussian(torch.zeros(3))),
            ValueError,
            "x must hold inputs of one variable",
        ),
        (lambda: bc.plot.bands(torch.zeros(4), gaussian(torch.zeros(3))), ValueError, "4 inputs x and 3 predictions"),
        (
            lambda: bc.plot.bands(torch.zeros(3), gaussian(torch.zeros(3)), levels=(90,)),
            ValueError,
            "levels must be a list of numbers in",
        ),
        (lambda: bc.plot.bands(torch.zeros(3), gaussian(torch.zeros(3)), output=1), ValueError, "no output 1"),
        (
            lambda: bc.plot.bands(torch.zeros(3), gaussian(torch.zeros(3)), ax="here"),
            TypeError,
            "ax must be matplotlib axes",
        ),
        (lambda: bc.plot.reliability(torch.randn(4, 3), torch.zeros(4).long()), ValueError, "pass softmax values"),
        (
            lambda: bc.plot.reliability(torch.ones(4, 1), torch.zeros(3).long()),
            ValueError,
            r"\[N, C\] and targets \[N\]",
        ),
        (lambda: bc.plot.coverage(gaussian(torch.full((3,), torch.nan)), torch.zeros(3, 1)), ValueError, "hold NaN"),
        (lambda: bc.plot.heat("hot"), TypeError, "bc.diagnostics.heating"),
        (lambda: bc.plot.reliability(torch.ones(4, 1), torch.ones(4).long()), ValueError, "class numbers from 0 to 0"),
        (
            lambda: bc.plot.traces(bc.Draws.from_trees([{"w": torch.zeros(2000)}] * 3)),
            ValueError,
            r"2000 .* choose leaves, names=\['w'\]",
        ),
        (lambda: bc.plot.traces([torch.zeros(2)]), TypeError, "must be a bc.Draws"),
        (lambda: bc.plot.traces(bc.Draws.from_trees([{"w": torch.zeros(2)}] * 3), ["v"]), ValueError, "there are w"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, error, says):
    with pytest.raises(error, match=says):
        call()
