"""Steps of an optimizer at gradients that are functions of each parameter."""

import io
from contextlib import nullcontext

import torch


def walk(optimizer, steps=1, gradient=lambda p: 0.5 * p):
    """All parameters behind some steps, in one vector."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        with getattr(optimizer, "sampled", nullcontext)():
            for p in params:
                p.grad = gradient(p.detach())
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in params])


def through_a_file(state):
    """What is loaded of a state without running code from the file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
