"""The optimizers of torch for which no matched noise is known.

At temperature 0 they make torch's own steps. A temperature above 0 raises ValueError, with the reason and an alternative:

| class | why no temperature above 0 | what to use instead |
| --- | --- | --- |
| Adadelta | its scale is computed from its own updates, noise included, which would heat the chain | RMSprop, Adam |
| Adafactor | its step size depends on the parameters, and it clips its update: the step is not linear in the gradient | Adam |
| ASGD | it averages its iterates inside its step, before noise could enter | SGLD, and average the draws |
| LBFGS | it searches along lines and evaluates the loss several times a step | SGHMC |
| Muon | it orthogonalises its momentum, and no matched noise is known for a non-linear map of a memory | SGHMC |
| Rprop | it uses only the sign of the gradient, so that its steps sample no temperature | RMSprop |
| SparseAdam | it moves only rows that have a gradient, while noise has to move all rows | Adam with ``sparse=False`` |
"""

from __future__ import annotations

from typing import Any

import torch

from bayesopt_chain.optim._sampling import Sampling


def _refused(theirs: type[torch.optim.Optimizer], reason: str, hint: str) -> Any:
    """Make a subclass of a torch optimizer that refuses every temperature but 0.

    Args:
        theirs: the class of ``torch.optim``.
        reason: why no noise is known, as the rest of a sentence that begins with the name of the class.
        hint: what to use instead.
    """
    name = theirs.__name__
    doc = f"""``torch.optim.{name}`` at temperature 0; a temperature above 0 is refused: {name} {reason}.

    Args:
        params and the others: torch's, in torch's order.
        temperature: 0.

    Raises:
        ValueError: a temperature above 0.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> w = torch.zeros(2, 2, requires_grad=True)
        >>> isinstance(bc.optim.{name}([w]), torch.optim.{name})
        True
    """
    body = {"__doc__": doc, "__module__": __name__, "refusal": f"{name} {reason}; use {hint}"}
    return type(name, (Sampling, theirs), body)


Adadelta = _refused(
    torch.optim.Adadelta,
    "scales by its own updates, noise included, and would heat itself",
    "bc.optim.RMSprop or Adam",
)
Adafactor = _refused(
    torch.optim.Adafactor,
    "has a step size that depends on the parameters and clips its update, which is no linear function of the gradient",
    "bc.optim.Adam",
)
ASGD = _refused(
    torch.optim.ASGD,
    "averages its iterates inside its step, before noise could enter",
    "bc.optim.SGLD and average the draws",
)
LBFGS = _refused(
    torch.optim.LBFGS,
    "searches along lines and evaluates the loss several times a step",
    "bc.optim.SGHMC",
)
Muon = _refused(
    torch.optim.Muon,
    "orthogonalises its momentum: memory before a non-linear map, behind which no noise can be matched",
    "bc.optim.SGHMC",
)
Rprop = _refused(
    torch.optim.Rprop,
    "uses the gradient's sign alone, which no temperature belongs to",
    "bc.optim.RMSprop",
)
SparseAdam = _refused(
    torch.optim.SparseAdam,
    "moves only rows that have a gradient, while a sample moves all",
    "bc.optim.Adam with sparse=False",
)
