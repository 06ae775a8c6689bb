"""torch's optimizers for which no matched noise is known: theirs at temperature 0, refused by name above."""

from __future__ import annotations

import torch

from bayesopt_chain.optim._sampling import Sampling

_COMMON = """

    Args:
        params and the others: torch's, in torch's order.
        temperature: 0.

    Raises:
        ValueError: a temperature above 0.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> w = torch.zeros(2, 2, requires_grad=True)
        >>> isinstance(bc.optim.{0}([w]), torch.optim.{0})
        True
    """


class Adadelta(Sampling, torch.optim.Adadelta):
    __doc__ = (
        "``torch.optim.Adadelta``; a temperature above 0 is refused: its scale is fed by its own updates, noise included."
        + _COMMON.format("Adadelta")
    )

    refusal = "Adadelta's scale is fed by its own updates, noise included, and would heat itself; use bc.optim.RMSprop or Adam"


class Adafactor(Sampling, torch.optim.Adafactor):
    __doc__ = (
        "``torch.optim.Adafactor``; a temperature above 0 is refused: its step depends on the parameters and is clipped."
        + _COMMON.format("Adafactor")
    )

    refusal = (
        "Adafactor's step size depends on the parameters and clips its update, which is no linear function of the gradient; "
        "use bc.optim.Adam"
    )


class ASGD(Sampling, torch.optim.ASGD):
    __doc__ = (
        "``torch.optim.ASGD``; a temperature above 0 is refused: its average of the iterates would miss the noise."
        + _COMMON.format("ASGD")
    )

    refusal = (
        "ASGD averages its iterates inside its step, before noise could enter; use bc.optim.SGLD and average the draws"
    )


class LBFGS(Sampling, torch.optim.LBFGS):
    __doc__ = (
        "``torch.optim.LBFGS``; a temperature above 0 is refused: a line search has no stationary law."
        + _COMMON.format("LBFGS")
    )

    refusal = "LBFGS searches along lines and evaluates the loss several times a step; use bc.optim.SGHMC"


class Muon(Sampling, torch.optim.Muon):
    __doc__ = (
        "``torch.optim.Muon``; a temperature above 0 is refused: momentum stands before a non-linear map."
        + _COMMON.format("Muon")
    )

    refusal = (
        "Muon orthogonalises its momentum: memory before a non-linear map, behind which no noise can be matched; "
        "use bc.optim.SGHMC"
    )


class Rprop(Sampling, torch.optim.Rprop):
    __doc__ = (
        "``torch.optim.Rprop``; a temperature above 0 is refused: only the gradient's sign enters."
        + _COMMON.format("Rprop")
    )

    refusal = "Rprop uses the gradient's sign alone, which no temperature belongs to; use bc.optim.RMSprop"


class SparseAdam(Sampling, torch.optim.SparseAdam):
    __doc__ = (
        "``torch.optim.SparseAdam``; a temperature above 0 is refused: rows without a gradient would have to move too."
        + _COMMON.format("SparseAdam")
    )

    refusal = (
        "SparseAdam moves only rows that have a gradient, while a sample moves all; use bc.optim.Adam with sparse=False"
    )
