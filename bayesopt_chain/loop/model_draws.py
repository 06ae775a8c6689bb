r"""What a model draws while a step evaluates it (dropout and its like), as a function of the key and count in the state.

In plain code on a CPU torch's default generator is seeded with ``seed_of(key + SALT, count)`` around the model
and set back to its own state after it: whatever the model draws is then a function of the chain's state, and the draws of other
code are the same as without the model.

Where tensors are transformed, traced or on a device, no generator can be seeded for one chain. There the calls that draw are
intercepted, and take their numbers from the same generator, whose state is carried along as a tensor, one for each chain:

    (mask, generator) = model_draw(key, count, generator, kind, shape, ...)

so that a chain among many, or in a captured step, drops the units that it would drop alone. On a device, in plain code too, a
call takes its numbers from Philox instead, under its place among the step's calls. Operations that draw inside themselves
(fused attention, the dropout of an LSTM) and other functions that draw (``torch.normal``, ``F.alpha_dropout``,
``x.uniform_()``) are not intercepted and are refused there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bayesopt_chain import tracing
from bayesopt_chain._torch import mark_generator
from bayesopt_chain.random.philox import draw_elements, parts_of_leaves
from bayesopt_chain.random.stream import draw_number, seed_of

SALT = 0x6D6F64656C  # keeps the model's draws apart from the noise of the same key


def model_draws(stream: tuple[Tensor, Tensor] | None) -> AbstractContextManager[Any]:
    """A context in which what a model draws is a function of a key and a count.

    Args:
        stream: key and count, both 0-d int64; ``None`` for a context that changes nothing.

    Returns:
        The context: a seeded generator in plain code on a CPU, intercepted calls everywhere else.
    """
    if stream is None:
        return nullcontext()
    key, count = stream
    if key.device.type == "cpu" and tracing.is_plain(key, count):
        return seeded(seed_of(int(key) + SALT, int(count)))
    return Keyed(key, count)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed torch's default CPU generator for a block, and restore its state at the end."""
    saved = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(saved)


class Keyed(TorchFunctionMode):
    """Intercept the calls by which a model draws, and give them numbers that follow from a key and a count.

    How many calls have drawn is written on torch's default generator, in the place of the seed that it once had: activation
    checkpointing sets that generator back before it computes a part of the model again, so that the part draws what it drew.
    """

    def __init__(self, key: Tensor, count: Tensor) -> None:
        super().__init__()
        self.key, self.count = key, count
        # of the carried generator, by how many calls have drawn before
        self.states = {0: torch.empty(0, dtype=torch.uint8, device="cpu")}

    def __enter__(self) -> Self:
        self.position, self.seed = self._position(), mark_generator(0)
        return super().__enter__()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        """Leave the context.

        Raises:
            RuntimeError: something has drawn from the generator of the key's device: fused attention with dropout,
                ``torch.normal``, ``x.uniform_()``. Under ``vmap`` torch refuses these, in a captured step ``capture`` does.
        """
        super().__exit__(kind, *rest)  # pyright: ignore[reportUnknownMemberType]
        mark_generator(self.seed)
        if kind is None and self._position() != self.position:
            raise RuntimeError(f"make_step: the model, or its loss, {_REFUSED}")

    def _position(self) -> int:
        """How far the generator of the key's device has come, where that is a CUDA device and nothing is traced."""
        if self.key.device.type != "cuda" or not tracing.is_plain(self.key) or tracing.is_hidden(self.key):
            return 0
        return torch.cuda.default_generators[self.key.get_device()].get_offset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caught = CAUGHT.get(func)
        return func(*args, **(kwargs or {})) if caught is None else caught(self, func, *args, **(kwargs or {}))

    def draw(self, kind: str, shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw the next numbers of this step.

        Args:
            kind: ``"bernoulli"`` (ones with probability ``p``), ``"uniform"`` or ``"normal"``.
            shape, dtype, device: those of the result.
            p: the probability of a one, for ``"bernoulli"`` only.
        """
        calls = torch.default_generator.initial_seed()
        mark_generator(calls + 1)
        if self.key.device.type == "cpu" and device.type == "cpu":
            state = self.states.get(calls, next(reversed(self.states.values())))
            x, self.states[calls + 1] = model_draw(self.key, self.count, state, kind, list(shape), p, dtype)
            return x
        key, elements = self.key ^ SALT, parts_of_leaves((((0, math.prod(shape)),),), (draw_number(0, calls + 1),))
        if kind == "normal":
            (flat,) = draw_elements(key, self.count, elements, dtype)
        else:
            (flat,) = draw_elements(key, self.count, elements, torch.float32, "uniform")
            flat = (flat < p) if kind == "bernoulli" else flat
        return flat.to(device, dtype).reshape(tuple(shape))

    def require_own_key(self, who: str, *inputs: Any) -> None:
        """Refuse draws under a ``vmap`` that does not map over the key: every lane would get the same numbers.

        Raises:
            RuntimeError: naming what draws.
        """
        if tracing.is_transformed():
            mine = tracing.batch_levels(self.key)
            if any(tracing.batch_levels(x) - mine for x in inputs if isinstance(x, Tensor)):
                raise RuntimeError(
                    f"{who}: the model draws once for many data or particles at a time, which have no key of their "
                    "own, so that all would get the same numbers; call module.eval(), or leave the dropout out"
                )


@torch.library.custom_op("bayesopt_chain::model_draw", mutates_args=())
def model_draw(
    key: Tensor, count: Tensor, generator: Tensor, kind: str, shape: Sequence[int], p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The next numbers of a generator, and its state after them.

    Args:
        key, count: the seed of the first draw of a step, as in :func:`seeded`.
        generator: the state before the draw as bytes; empty at the first draw.
        kind, shape, p, dtype: as in :meth:`Keyed.draw`.
    """
    source = torch.Generator()
    if generator.numel():
        source.set_state(generator.clone())  # torch reads a row of a larger tensor wrongly
    else:
        source.manual_seed(seed_of(int(key) + SALT, int(count)))
    x = torch.empty(shape, dtype=dtype, device="cpu")
    x = x.bernoulli_(p, generator=source) if kind == "bernoulli" else getattr(x, f"{kind}_")(generator=source)
    return x, source.get_state()


@model_draw.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    key: Tensor, count: Tensor, generator: Tensor, kind: str, shape: Sequence[int], p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    state = torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu")
    return torch.empty(shape, dtype=dtype, device="cpu"), state


@model_draw.register_vmap  # pyright: ignore[reportUnknownMemberType]
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """Draw for one lane of ``vmap`` after the other."""
    n = info.batch_size
    lanes = [x.expand(n, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(args[:3], in_dims)]
    made = [model_draw(*lane, *args[3:]) for lane in zip(*lanes)]
    return tuple(map(torch.stack, zip(*made))), (0, 0)


STATE_BYTES = torch.Generator().get_state().numel()


def _dropout(
    keyed: Keyed, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Take the place of torch's dropouts, with the numbers and the arithmetic that torch has on a CPU."""
    if not training or not 0 < p < 1 or not input.numel():
        return func(input, p, training, inplace)
    keyed.require_own_key(func.__name__, input)
    shape = input.shape
    if func in FEATURES:
        axes = 1 if input.ndim == FEATURES[func] else 2  # one datum comes without the axis that numbers data
        if input.ndim < axes:
            raise RuntimeError(f"{func.__name__}: input of {input.ndim} axes has no features to drop")
        shape = (*shape[:axes], *[1] * (input.ndim - axes))
    noise = keyed.draw("bernoulli", shape, 1 - p, input.dtype, input.device).div(1 - p)
    # noise with a ``vmap`` axis that the input lacks does not fit into the input's memory
    into = inplace and not (tracing.batch_levels(noise) - tracing.batch_levels(input))
    return input.mul_(noise) if into else input.mul(noise)


def _numbers(keyed: Keyed, func: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    """Take the place of ``torch.rand``, ``torch.randn`` and the two with ``_like``.

    Raises:
        RuntimeError: arguments that name another source of numbers, or another place for them.
    """
    name = func.__name__
    if generator is not None or kwargs.get("out") is not None or kwargs.get("requires_grad"):
        raise RuntimeError(f"torch.{name}: with generator=, out= or requires_grad= it takes no key of the chain's")
    # of the shape, dtype and device that are asked for, in whatever form
    like = (torch.empty_like if name.endswith("_like") else torch.empty)(*args, **kwargs)
    keyed.require_own_key(name, like)
    kind = "normal" if name.startswith("randn") else "uniform"
    return keyed.draw(kind, like.shape, 0.5, like.dtype, like.device)


def _recurrent(keyed: Keyed, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call recurrent layers without dropout; with dropout they draw inside one fused operation, and are refused.

    By name, since cuDNN has a generator of its own, which :meth:`Keyed.__exit__` does not see.
    """
    # torch.lstm and its kin take many tensors, then dropout as their only float, with `train` right behind it
    at = next((i for i, x in enumerate(args) if isinstance(x, float)), len(args))
    if args[at + 1 : at + 2] == (True,) and args[at] > 0:
        raise RuntimeError(f"{func.__name__} with dropout {args[at]} {_REFUSED}")
    return func(*args, **kwargs)


_REFUSED = (
    "draws inside one fused operation, which takes no key of the chain's; give the layer dropout=0, with dropout layers beside "
    "it, or, on a CPU, run the chains one after the other (bc.parallel(step, n, loop=True), uncaptured)"
)
# how many axes an input has that is one datum without an axis for data; 0 where torch takes no such input
FEATURES = {F.dropout1d: 2, F.dropout2d: 0, F.dropout3d: 4}
_T: Any = torch
CAUGHT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([F.dropout, *FEATURES], _dropout),
    **dict.fromkeys([torch.rand_like, torch.randn_like, torch.rand, torch.randn], _numbers),
    **dict.fromkeys([_T.lstm, _T.gru, _T.rnn_tanh, _T.rnn_relu], _recurrent),
}
