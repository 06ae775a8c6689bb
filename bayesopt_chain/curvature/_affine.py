"""A model whose Jacobian is known: a linear layer on given features, for which nothing has to be differentiated.

    f = W x + b,    d f_o / d W_oi = x_i,    d f_o / d b_o = 1

at every position. The layer's output is the model's, so that a column s of the root of the output Hessian is itself the
gradient of the layer's output, and (x, s) is the pair that a tap on the layer would record (``_taps.py``). No forward pass has
to be watched or checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor
from torch.nn.functional import linear

from bayesopt_chain.curvature._kinds import Matrix, Vector
from bayesopt_chain.curvature._taps import Use, linear_canonical, shift_canonical


@dataclass(frozen=True)
class Affine:
    """``affine(params, batch) -> batch[0] @ params[weight].T + params[bias]``, its Jacobian known to every estimator here.

    Attributes:
        weight: the name of the weight, ``[O, I]``.
        bias: the name of the bias, ``[O]``; None for a layer without one.
    """

    weight: str
    bias: str | None = None

    def __call__(self, params: Mapping[str, Tensor], batch: Any) -> Tensor:
        return linear(batch[0], params[self.weight], None if self.bias is None else params[self.bias])

    def uses(self, params: Any, x: Tensor) -> tuple[list[Use], list[Tensor]]:
        """The uses of the parameters, all in the model's only layer (tap 0), and for each use the layer's inputs ``[b, *, I]``.

        A bias sees no inputs: it gets zeros ``[b]``, which say how many data there are.
        """
        numbers = {id(leaf): number for number, leaf in enumerate(optree.tree_leaves(params))}
        weight = params[self.weight]
        uses = [
            Use(numbers[id(weight)], 0, Matrix(False, (weight.shape[0], weight.shape[1])), linear_canonical(), True)
        ]
        seen = [x]
        if self.bias is not None:
            outputs = weight.shape[0]
            canonical = shift_canonical((outputs,))
            uses.append(Use(numbers[id(params[self.bias])], 0, Vector((outputs, 1)), canonical, True))
            seen.append(x.new_zeros(x.shape[0]))
        return uses, seen
