r"""Noise that is a function of the state: one key, one step counter, and nothing hidden.

``init`` draws one int64 key; from then on the normals depend on (key, step, leaf, element) alone, so that the same
state gives the same noise, a copied state continues exactly, and stacked chains differ by their keys.

Two streams, chosen by where the state lives:

* **CPU**: a fresh generator seeded with ``splitmix64(key + step)`` feeds ``normal_`` once for all leaves, in optree
  order. The engine behind it keeps 32 bits of a seed. Under ``vmap`` every chain is seeded from its own key, so
  stacked chains draw what each would draw alone, bit for bit.
* **Elsewhere**: Philox-4x32-10 (Salmon et al., 2011) in integer tensor operations and Box-Muller: no
  synchronisation, safe to capture. Counter words are (element // 4, draw, step low, step high).

Besides normals there are uniforms, and two cheap variables with the moments of a normal: ``rademacher`` (signs, moments
through the third) and ``three_point`` (0 with probability 2/3, else +-sqrt(3); moments through the fifth).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_SQRT3 = 3.0**0.5
KINDS = ("gaussian", "rademacher", "three_point", "uniform")


def new_key(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One random int64 key, 0-d, from ``generator`` or from torch's global generator."""
    source = generator.device if generator is not None else "cpu"
    return torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator, device=source).to(device)


def normals(
    key: Tensor, step: Tensor, templates: Sequence[Tensor], draws: Sequence[int], kind: str = "gaussian"
) -> list[list[Tensor]]:
    """Standard normals: ``draws[i]`` tensors for every leaf ``i``, each like one slice ``templates[i][0]`` along axis 0.

    ``kind`` gives another variable of ``KINDS`` instead: independent, of mean 0 and variance 1, or uniform on [0, 1).
    """
    out: list[list[Tensor]] = [[] for _ in templates]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (t, n) in enumerate(zip(templates, draws)):
        if n:
            groups.setdefault((t.device, t.dtype), []).append(i)
    for salt, ((device, dtype), members) in enumerate(groups.items()):
        sizes = [templates[i].shape[1:].numel() for i in members for _ in range(draws[i])]
        flat = _flat_normals(key, step, salt, sizes, dtype, device, kind)
        pieces = iter(flat.split(sizes) if len(sizes) > 1 else (flat,))
        for i in members:
            out[i] = [next(pieces).view(templates[i].shape[1:]) for _ in range(draws[i])]
    return out


def _flat_normals(key, step, salt: int, sizes: list[int], dtype: torch.dtype, device, kind: str) -> Tensor:
    if device.type != "cpu":
        key, step = key.to(device), step.to(device)
        philox_draw = partial(philox_normal, key) if kind == "gaussian" else partial(philox_other, kind, key)
        return torch.cat([philox_draw(step, n, (salt << 24) | i, dtype) for i, n in enumerate(sizes)])
    if torch._C._functorch.peek_interpreter_stack() is None and not torch.compiler.is_compiling():
        return _seeded(int(key), int(step), salt, sum(sizes), dtype, kind)
    return _stacked_draw(key, step, salt, sum(sizes), dtype, kind)


def _seeded(key: int, step: int, salt: int, size: int, dtype: torch.dtype, kind: str) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(splitmix64(splitmix64(key + salt) + step))
    if kind == "gaussian":
        return torch.empty(size, dtype=dtype).normal_(generator=generator)
    if kind == "uniform":
        return torch.empty(size, dtype=dtype).uniform_(generator=generator)
    if kind == "three_point":
        return _three_point(torch.empty(size, dtype=torch.int32).random_(0, 6, generator=generator)).to(dtype)
    words = torch.empty((size + 7) // 8, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return (words.view(torch.int8)[:size] & 2).to(dtype).sub_(1.0)


def _three_point(faces: Tensor) -> Tensor:
    """``-sqrt(3), sqrt(3), 0, 0, 0, 0`` for the six faces of a die."""
    return _SQRT3 * ((faces == 1).to(torch.float64) - (faces == 0).to(torch.float64))


@torch.library.custom_op("bayesopt_chain::seeded_draw", mutates_args=())
def _stacked_draw(key: Tensor, step: Tensor, salt: int, size: int, dtype: torch.dtype, kind: str) -> Tensor:
    return _seeded(int(key), int(step), salt, size, dtype, kind)


@_stacked_draw.register_fake
def _(key, step, salt, size, dtype, kind):
    return torch.empty(size, dtype=dtype)


@_stacked_draw.register_vmap
def _(info, in_dims, key, step, salt, size, dtype, kind):
    keys = key.movedim(in_dims[0], 0) if in_dims[0] is not None else key.expand(info.batch_size, *key.shape)
    steps = step.movedim(in_dims[1], 0) if in_dims[1] is not None else step.expand(info.batch_size, *step.shape)
    return torch.stack([_stacked_draw(k, s, salt, size, dtype, kind) for k, s in zip(keys, steps)]), 0


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


def _words(key: Tensor, step: Tensor, size: int, draw: int) -> list[Tensor]:
    block = torch.arange((size + 3) // 4, dtype=torch.int64, device=key.device)
    counter = (
        block & _MASK,
        torch.full_like(block, draw),
        (step & _MASK) + 0 * block,
        (step >> 32 & _MASK) + 0 * block,
    )
    return philox(counter, (key & _MASK, key >> 32 & _MASK))


def philox_normal(key: Tensor, step: Tensor, size: int, draw: int, dtype: torch.dtype) -> Tensor:
    """``size`` standard normals of the stream (key, step, draw), computed in float32 or float64."""
    words = _words(key, step, size, draw)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    uniform = [(w.to(torch.float64) + 0.5) * 2.0**-32 for w in words]
    out = []
    for u, v in (uniform[:2], uniform[2:]):
        radius, angle = (-2.0 * u.log()).sqrt(), 2.0 * torch.pi * v
        out += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(out, dim=-1).flatten()[:size].to(real).to(dtype)


def philox_other(kind: str, key: Tensor, step: Tensor, size: int, draw: int, dtype: torch.dtype) -> Tensor:
    """``size`` variables of another kind than normal, of the stream (key, step, draw)."""
    words = torch.stack(_words(key, step, size, draw), dim=-1).flatten()[:size]
    if kind == "uniform":
        return ((words >> 8).to(torch.float64) * 2.0**-24).to(dtype)
    if kind == "three_point":
        return _three_point(words * 6 >> 32).to(dtype)
    return (words & 2).to(dtype) - 1.0
