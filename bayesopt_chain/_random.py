r"""Noise that is a function of the state: one key, one step counter, and nothing hidden.

``init`` draws one int64 key; from then on the normals depend on (key, step, leaf, element) alone, so that the same
state gives the same noise, a copied state continues exactly, and stacked chains differ by their keys.

Two streams, chosen by where the state lives:

* **CPU**: a fresh generator seeded with ``splitmix64(key + step)`` feeds ``normal_`` once for all leaves, in optree
  order. The engine behind it keeps 32 bits of a seed. Under ``vmap`` every chain is seeded from its own key, so
  stacked chains draw what each would draw alone, bit for bit.
* **Elsewhere**: Philox-4x32-10 (Salmon et al., 2011) in integer tensor operations and Box-Muller: no
  synchronisation, safe to capture. Counter words are (element // 4, draw, step low, step high).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def new_key(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One random int64 key, 0-d, from ``generator`` or from torch's global generator."""
    source = generator.device if generator is not None else "cpu"
    return torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator, device=source).to(device)


def normals(key: Tensor, step: Tensor, templates: Sequence[Tensor], draws: Sequence[int]) -> list[list[Tensor]]:
    """Standard normals: ``draws[i]`` tensors for every leaf ``i``, each like one slice ``templates[i][0]`` along
    axis 0.
    """
    out: list[list[Tensor]] = [[] for _ in templates]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (t, n) in enumerate(zip(templates, draws)):
        if n:
            groups.setdefault((t.device, t.dtype), []).append(i)
    for salt, ((device, dtype), members) in enumerate(groups.items()):
        sizes = [templates[i].shape[1:].numel() for i in members for _ in range(draws[i])]
        flat = _flat_normals(key, step, salt, sizes, dtype, device)
        pieces = iter(flat.split(sizes) if len(sizes) > 1 else (flat,))
        for i in members:
            out[i] = [next(pieces).view(templates[i].shape[1:]) for _ in range(draws[i])]
    return out


def _flat_normals(key, step, salt: int, sizes: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        key, step = key.to(device), step.to(device)
        return torch.cat([philox_normal(key, step, n, (salt << 24) | i, dtype) for i, n in enumerate(sizes)])
    if torch._C._functorch.peek_interpreter_stack() is None and not torch.compiler.is_compiling():
        return _seeded_normal(int(key), int(step), salt, sum(sizes), dtype)
    return _stacked_normal(key, step, salt, sum(sizes), dtype)


def _seeded_normal(key: int, step: int, salt: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(splitmix64(splitmix64(key + salt) + step))
    return torch.empty(size, dtype=dtype).normal_(generator=generator)


@torch.library.custom_op("bayesopt_chain::seeded_normal", mutates_args=())
def _stacked_normal(key: Tensor, step: Tensor, salt: int, size: int, dtype: torch.dtype) -> Tensor:
    return _seeded_normal(int(key), int(step), salt, size, dtype)


@_stacked_normal.register_fake
def _(key, step, salt, size, dtype):
    return torch.empty(size, dtype=dtype)


@_stacked_normal.register_vmap
def _(info, in_dims, key, step, salt, size, dtype):
    keys = key.movedim(in_dims[0], 0) if in_dims[0] is not None else key.expand(info.batch_size, *key.shape)
    steps = step.movedim(in_dims[1], 0) if in_dims[1] is not None else step.expand(info.batch_size, *step.shape)
    return torch.stack([_stacked_normal(k, s, salt, size, dtype) for k, s in zip(keys, steps)]), 0


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood's 64-bit mixer."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words; returns four words of the broadcast shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def philox_normal(key: Tensor, step: Tensor, size: int, draw: int, dtype: torch.dtype) -> Tensor:
    """``size`` standard normals of the stream (key, step, draw), computed in float32 or float64."""
    block = torch.arange((size + 3) // 4, dtype=torch.int64, device=key.device)
    counter = (
        block & _MASK,
        torch.full_like(block, draw),
        (step & _MASK) + 0 * block,
        (step >> 32 & _MASK) + 0 * block,
    )
    words = philox(counter, (key & _MASK, key >> 32 & _MASK))
    real = torch.float64 if dtype == torch.float64 else torch.float32
    uniform = [(w.to(torch.float64) + 0.5) * 2.0**-32 for w in words]
    out = []
    for u, v in (uniform[:2], uniform[2:]):
        radius, angle = (-2.0 * u.log()).sqrt(), 2.0 * torch.pi * v
        out += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(out, dim=-1).flatten()[:size].to(real).to(dtype)
