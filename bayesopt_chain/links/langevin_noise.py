r"""``inject_langevin_noise``: the link that turns an optimizer into a sampler.

Its noise is matched to the chain around it (:mod:`bayesopt_chain.core.law`), so that the parameters sample
``exp(-loss / temperature)``. The state holds the key and step count of the random stream and the draws that the next
step still needs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from numbers import Real

import torch

from bayesopt_chain import checks
from bayesopt_chain.arguments import checked
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.injection import Injection, Strength
from bayesopt_chain.core.link import NoiseLink
from bayesopt_chain.core.scalar_or_schedule import ScalarOrSchedule
from bayesopt_chain.core.update import Update
from bayesopt_chain.random.stream import STREAMS, Stream
from bayesopt_chain.tracing import is_plain

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LangevinNoise(NoiseLink):
    """The link behind :func:`inject_langevin_noise`."""

    def started(self, injection: Injection, strength: Strength, update: Update) -> None:
        """Say so where the first step's noise is smaller than half the spacing of the parameters' numbers.

        Learned preconditioners are not known yet and count as one.
        """
        leaves = update.params or []
        for site, (coefficients, _, after) in zip(injection.sites, strength.by_site):
            low = [(n, j) for n, j in enumerate(site.leaves) if leaves[j].dtype in LOW and is_plain(leaves[j])]
            for n, j in low[:1]:
                ones = [torch.ones(()).double() for _ in range(site.process.draws)]
                e, _ = site.process.step(ones, [torch.zeros(()).double()] * site.process.memory, coefficients[n])
                (e,) = update.coloured(site, [j], [e.float().expand(leaves[j].shape).clone()])
                behind = 1.0 if after is None else float(after[n, 2].sqrt() / after[n, 1])
                step = float(e.float().abs().mean()) * site.gain * behind
                size = float(leaves[j].detach().abs().float().mean())
                if 0 < step < torch.finfo(leaves[j].dtype).eps * size / 2:
                    warnings.warn(
                        f"inject_langevin_noise: leaf {j} is {leaves[j].dtype} with entries near {size:.2g}, and a step's "
                        f"noise of about {step:.2g} would round away; keep float32 master parameters",
                        stacklevel=4,
                    )
                    return

    def __str__(self) -> str:
        words = [checks.show(self.temperature)]
        words += [f"order={self.order}"] if self.order != 2 else []
        words += [f"lr={self.lr}, momentum={self.momentum}"] if self.lr is not None else []
        words += [f"noise={self.noise!r}"] if self.noise != "gaussian" else []
        words += [f"stream={self.stream!r}"] if self.stream is not None else []
        return f"inject_langevin_noise({', '.join(words)})"


@checked
def inject_langevin_noise(
    temperature: ScalarOrSchedule,
    *,
    order: int = 2,
    lr: float | None = None,
    momentum: float = 0.0,
    generator: torch.Generator | None = None,
    noise: str = "gaussian",
    stream: Stream | None = None,
) -> Chain:
    r"""Inject the noise that makes the chain sample ``exp(-loss / temperature)``.

    With a loss that is a mean over ``N`` data, ``temperature = 1 / N`` samples the Bayesian posterior; an unnormalised
    loss takes ``temperature = 1``. The noise is derived from the links around it when ``init`` is called, so the
    position among linear links does not matter; it must stand behind non-linear ones (clipping, Adam's scaling).

    Args:
        temperature: number, 0-d tensor (read at every update) or schedule ``count -> temperature``. The number 0 makes
            this the identity, without state or draw; a tensor or schedule that is 0 leaves the gradient's bits alone.
        order: 2 (default): exact for quadratic losses at every stable lr, bias of second order in lr otherwise. 1: white
            noise of the same level (SGLD, SGHMC), bias of first order.
        lr: only inside plain ``torchopt.chain``, whose links cannot see each other: the chain's learning rate. The
            noise then acts where it is written, which must be before the momentum.
        momentum: likewise, the chain's momentum.
        generator: source of the stream's key, drawn once by ``init`` (default: torch's global generator).
        noise: ``"gaussian"``; ``"three_point"`` (0 or +-sqrt(3), keeps order 2); or ``"rademacher"`` (signs,
            cheapest, keeps order 1; with ``order=2`` still exact in mean and covariance on quadratic losses).
        stream: ``"philox"`` draws counter-based noise on every device, the same in eager, compiled, captured and stacked
            steps, a function of each leaf's path; Gaussian noise then costs about a third of torch's generator where a C++
            compiler is found, and many times as much where none is. ``"generator"`` is torch's (CPU only): leaves draw one
            after the other, and the engine keeps 32 bits of each step's seed, so that among a million steps (of all chains
            together) about a hundred pairs draw the same normals; take ``"philox"`` for so many. Default: the generator on a
            CPU, Philox elsewhere.

    Returns:
        A link. With ``order=2`` its state holds one draw for each parameter, or none where heavy-ball momentum (of 1/16
        and more) follows at constant lr and temperature: there the velocity carries the half of the noise that acts in
        the next step.

    Raises:
        ValueError: negative, NaN or infinite temperature; an order other than 1 or 2.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.inject_langevin_noise(0.5), bc.scale_by_neg_lr(0.1))
        >>> tx
        chain(
            inject_langevin_noise(0.5),  # acts here, matched to F = 0.1
            scale_by_neg_lr(0.1),
        )
    """
    checks.temperature(temperature)
    if order not in (1, 2) or isinstance(order, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"inject_langevin_noise: order must be 1 (white noise) or 2 (matched noise), got {order!r}")
    if noise not in ("gaussian", "rademacher", "three_point"):
        raise ValueError(
            f"inject_langevin_noise: noise must be 'gaussian', 'three_point' or 'rademacher', got {noise!r}"
        )
    if lr is not None:
        checks.positive("inject_langevin_noise: lr", lr)
        checks.momentum("inject_langevin_noise: momentum", momentum)
    elif momentum:
        raise ValueError("inject_langevin_noise: momentum= goes with lr=, both for plain torchopt.chain only")
    if stream is not None and stream not in STREAMS:
        raise ValueError(f"inject_langevin_noise: stream must be one of {STREAMS} or None, got {stream!r}")
    if isinstance(temperature, Real):
        temperature = float(temperature)
    return Chain((LangevinNoise(temperature, order, lr, momentum, noise, generator=generator, stream=stream),))
