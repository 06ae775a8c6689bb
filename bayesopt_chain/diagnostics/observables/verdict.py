r"""What a run says of itself: whether it is ground for an answer, and if not, what to change.

    beyond the limit   lr k / (2 (1 + mu)) >= 1 where a chain was seen
    too hot            the virial, or that of the stiffest directions, above its value by more than 5 % (10 %) and 3 errors
    not spread         the virial, or that of a leaf, below its value by more than 5 % and 3 errors: flat directions are
    still on their way drift              the loss of the last third against the first, in errors of the difference: 4.5 or
    more disagreement       chains that differ by more than their own errors allow

The virial is necessary and not sufficient: it is right in one of several wells too. By leaf and by stiff directions it
sees what cancels in the sum.
"""

from __future__ import annotations

import math
from typing import Any

DRIFT = 4.5


def findings(run: Any) -> list[str]:
    """What is wrong or doubtful of a run; ``"refused"`` stands before what leaves no answer.

    Args:
        run: an :class:`Observed`, whose findings are still to be made.
    """
    out = list[str]()
    if not run.complete:
        out.append(("refused: " if "interrupted" not in run.why else "") + f"the run has not ended: {run.why}")
    if run.record.count < 2:
        return [*out, "refused: there are no draws"]
    if not run.limit < 1:
        out.append(
            f"refused: lr is {run.limit:.2f} of the stability limit where the loss is steepest on the way; take "
            f"lr={0.1 * run.lr / max(run.limit, 1e-30):.2g}"
        )
    virial, stiff = run.mean("virial"), run.mean("virial of stiff")
    ratio, error = float(virial.value) / run.free, float(virial.error) / run.free
    top, top_error = float(stiff.value) / run.stiff, float(stiff.error) / run.stiff
    if math.isnan(error) and math.isfinite(ratio):
        few = f"refused: {run.record.count} draws of one chain are too few to tell an error"
        return [*out, f"{few}; run longer, or more chains, or take a smaller thinning"]
    if not ratio < 1.05 + 3 * error or ratio > 1.5:
        out.append(f"refused: too hot, virial {virial} of {run.free}; take half the lr, or larger batches")
    elif top > 1.1 + 3 * top_error:
        out.append(
            f"refused: the {run.stiff} stiffest directions are {top:.2f} times as hot as they should be "
            f"(+- {2 * top_error:.2g}), which the others hide; take half the lr, or larger batches"
        )
    longer = "" if math.isinf(run.relaxation) else f"; a flat direction relaxes in {_round(run.relaxation)} steps: run "
    longer += f"{_round(run.relaxation * 3)} or more, or take a stronger spring" if longer else "; it has no spring"
    if ratio < 0.95 - 3 * error:
        out.append(f"flat directions have not spread: virial {virial} of {run.free}{longer}")
    else:
        leaves = run.mean("virial by leaf")
        for (name, count), value, e in zip(run.leaves.items(), leaves.value.tolist(), leaves.error.tolist()):
            if value / count < 0.9 - 4 * e / count:
                out.append(f"flat directions of {name} have not spread: virial {value:.3g} of {count}{longer}")
                break
    if ratio == ratio and not error < 0.1:
        out.append(f"too short to judge: virial {virial} of {run.free}; run longer, or more chains")
    drift = run.record.drift("loss")
    if abs(drift) > DRIFT:
        out.append(
            f"refused: the loss still moves, {drift:+.1f} errors from the first to the last third; take a longer burn_in"
        )
    if not bool(run.mean("loss").agree):
        out.append("chains disagree by more than their own errors: the larger one is reported; run longer")
    return out


def _round(steps: float) -> str:
    digits = max(0, math.floor(math.log10(max(steps, 1))) - 1)
    return f"{round(steps, -digits):,.0f}"
