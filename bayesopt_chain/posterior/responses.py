"""Outputs that are derivatives of what the last layer gives: energies with forces, residuals of linear differential equations.

An interatomic potential has the energy ``e = sum_atoms w . phi(r) + b`` and the forces ``-de/dr``, taken by
``torch.autograd.grad`` inside ``forward``. Both are linear in the last layer theta = (w, b), with known responses:

    f(theta) = f(0) + R theta,          R_p = (f(s u_p) - f(0)) / s          for unit vectors u_p, exactly, for every s

So P + 1 forward passes of a batch give the Jacobian; nothing has to be differentiated twice, and the forces need no graph to
the parameters (``create_graph``). The size s, that of f(0), keeps a large constant energy from swamping the responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.modules.functional import Forward
from bayesopt_chain.posterior.last_layer import Body, HeadBatch, with_gradients
from bayesopt_chain.trees import flatten, unflatten

LINEAR = 1e3  # rounding units by which outputs may differ from a straight line


@dataclass(frozen=True)
class Responses:
    """``responses(batch)``: of every output its response to each parameter of the last layer, and its value without it.

    They are the features of a :class:`HeadBatch`, ``[B, *event, P + 1]``; such a batch is handed through.
    """

    forward: Forward
    params: Mapping[str, Tensor]
    names: tuple[str, ...]
    body: Body

    def __call__(self, batch: Any) -> HeadBatch:
        if isinstance(batch, HeadBatch):
            return batch
        theta = self._theta()
        alone = self.outputs(0 * theta, batch)
        s = float(alone.abs().amax().clamp_min(1))
        units = s * torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
        responses = [(self.outputs(u, batch) - alone) / s for u in units]
        return HeadBatch(torch.stack([*responses, alone], -1), batch[1])

    def outputs(self, theta: Tensor, batch: Any) -> Tensor:
        """The model's outputs with other parameters of the last layer, ``[B, *event]``."""
        kept = {name: self.params[name] for name in self.names}
        return with_gradients(self.forward)({**self.params, **unflatten(theta, kept)}, batch)

    def are_linear(self, batch: Any) -> bool:
        """Whether the outputs at twice the parameters lie on a straight line through those at once and at none."""
        theta = self._theta()
        none, once, twice = (self.outputs(k * theta, batch) for k in (0, 1, 2))
        scale = torch.stack([none, once, twice]).abs().amax()
        return bool((twice - 2 * once + none).abs().amax() <= LINEAR * torch.finfo(none.dtype).eps * scale)

    def _theta(self) -> Tensor:
        kept = {name: self.params[name].detach() for name in self.names}
        return flatten(kept, kept)


def respond(params: Mapping[str, Tensor], batch: HeadBatch) -> Tensor:
    """The outputs, from responses ``[B, *event, P + 1]``."""
    tree: Any = params
    theta = torch.cat([leaf.reshape(-1) for leaf in optree.tree_leaves(tree)])
    return batch[0][..., :-1] @ theta + batch[0][..., -1]
