"""The rows of the comparison that need no GPU. Each returns its times and the ratios that have a target."""

# JAX may be absent.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.random.philox import in_tensors, parts_of_leaves
from bayesopt_chain.random.philox_cpu import normals_kernel
from benchmarks import contestants as c
from benchmarks.against import FORMS, LARGE, SIZES, at_hand, leaves
from benchmarks.measure import carried, from_start, one_by_one, ratio, stepping, take_turns, threads


class Row(NamedTuple):
    """``targets`` maps a pair (ours, theirs) to the largest ratio wanted."""

    work: str
    times: dict[str, list[float]]
    targets: dict[tuple[str, str], float]

    def report(self) -> list[dict]:
        return [
            {"work": self.work, "ours": a, "theirs": b, "target": t, **ratio(self.times, a, b)}
            for (a, b), t in self.targets.items()
        ]


def optimizer() -> Row:
    params, grads = leaves(LARGE), leaves(LARGE)
    tx = bc.sgd(c.LR, c.MOMENTUM)
    return Row(
        "SGD with momentum, T = 0, 1e7 parameters in 10 leaves, update only",
        take_turns(
            {
                "fused": c.fused(tx, params, grads),
                "update + apply": c.update_and_apply(tx, params, grads),
                "torchopt": c.update_and_apply(torchopt.sgd(c.LR, c.MOMENTUM), params, grads),
                "torch.optim fused": c.torch_optim(params, grads, fused=True),
                "torch.optim foreach": c.torch_optim(params, grads, foreach=True),
            },
            rounds=201,
        ),
        {
            ("fused", "torchopt"): 0.45,
            ("fused", "torch.optim fused"): 1.25,
            ("update + apply", "torchopt"): 0.70,
        },
    )


def samplers(shapes: Sequence[Any], rounds: int, **more: Callable[..., Callable]) -> dict[str, list[float]]:
    """Times of SGHMC of order 2, in every form, by torch and by posteriors."""
    params, grads = leaves(shapes), leaves(shapes)
    tx = bc.sghmc(c.LR, c.MOMENTUM, temperature=c.TEMPERATURE)
    contestants = {
        "fused": c.fused(tx, params, grads),
        "captured": c.captured(tx, params, grads),
        "normal_ + torch.optim fused": c.normal_and_fused(params, grads),
        "posteriors": c.posteriors_sghmc(params, grads),
    }
    return take_turns(contestants | {name: make(tx, params, grads) for name, make in more.items()}, rounds)


def sampler() -> Row:
    return Row(
        "SGHMC of order 2, 1e7 parameters in 10 leaves, update only",
        samplers(LARGE, 25),
        {
            ("fused", "normal_ + torch.optim fused"): 1.0,
            ("fused", "posteriors"): 0.5,
            ("captured", "posteriors"): 0.5,
            ("captured", "normal_ + torch.optim fused"): 1.0,
        },
    )


def sampler_on_all_threads() -> Row:
    with threads(torch.get_num_interop_threads() if torch.get_num_threads() > 1 else 2):
        row = sampler()
    return Row(
        "SGHMC of order 2, 1e7 parameters in 10 leaves, update only, two threads",
        row.times,
        {("fused", "posteriors"): 0.5, ("captured", "posteriors"): 0.5},
    )


def sixty_leaves() -> Row:
    return Row(
        "SGHMC, 60 leaves, 1e5 parameters, update only",
        samplers([1667] * 60, 41, **{"update + apply": c.update_and_apply}),
        {
            ("update + apply", "posteriors"): 0.4,
            ("fused", "normal_ + torch.optim fused"): 1.3,
            ("fused", "posteriors"): 0.35,
            ("captured", "fused"): 1.0,
        },
    )


def adam(work: str, shapes: list[tuple[int, ...]]) -> Row:
    """Adam and its kin with a temperature against torch's fused kernel and a draw of the same parameters.

    In seconds of this process, which other work on the machine does not count into.
    """
    hot: dict[str, Any] = {"lr": c.LR, "temperature": c.TEMPERATURE, "heat_guard": None}
    torchs = partial(torch.optim.Adam, lr=c.LR, fused=True)
    kinds = {f"bc.optim.{kind}": getattr(bc.optim, kind) for kind in ("Adam", "AdamW", "RMSprop")}
    return Row(
        f"{work}, update only",
        take_turns(
            {
                "torch.optim.Adam fused + draw": c.adaptive(torchs, shapes, draws=True),
                "torch.optim.Adam fused": c.adaptive(torchs, shapes),
                **{name: c.adaptive(partial(kind, **hot), shapes) for name, kind in kinds.items()},
                "bc.optim.Adam, torch's loop": c.adaptive(partial(bc.optim.Adam, foreach=False, **hot), shapes),
            },
            rounds=41,
            clock=time.process_time,
        ),
        {(name, "torch.optim.Adam fused + draw"): 1.1 for name in kinds},
    )


N, D, STEPS = 768, 8, 8


def regression_data():
    x = torch.randn(N, D)
    return x, (torch.rand(N) < torch.sigmoid(x @ torch.linspace(-1, 1, D))).float()


def logistic(params, batch):
    x, y = batch
    prior = (params**2).sum() / (2 * N)
    return F.binary_cross_entropy_with_logits(x @ params, y) + prior


def logistic_step() -> tuple[Any, Any, Any, Any]:
    """SGHMC's step on it, parameters, state, and all data as the batch."""
    batch, params = regression_data(), torch.zeros(D)
    tx = bc.sghmc(0.05, 0.9, temperature=1 / N)
    return bc.make_step(logistic, tx), params, tx.init(params), batch


def small_model() -> Row:
    step, *given = logistic_step()
    batch = given[-1]
    jax_step, jax_scan = jax_sghmc(batch)
    return Row(
        f"logistic regression {N} x {D}, one chain, whole step with gradient",
        take_turns(
            {
                "captured": stepping(bc.capture(step, *given), *given),
                f"captured, {STEPS} steps": stepping(bc.capture(step, *given, steps=STEPS, draws=True), *given),
                "eager": stepping(step, *given),
                "posteriors": posteriors_step(batch),
                "BlackJAX, jitted": jax_step,
                f"lax.scan of {STEPS}": jax_scan,
            },
            rounds=31,
        ),
        {
            ("captured", "posteriors"): 1 / 15,
            ("captured", "BlackJAX, jitted"): 1 / 5,
            (f"captured, {STEPS} steps", f"lax.scan of {STEPS}"): 0.5,
        },
    )


def jax_logistic(x, y) -> Callable:
    """Minus :func:`logistic`, in JAX, of parameters and (default: all) rows."""
    import jax.numpy as jnp

    x, y = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

    def log_density(p, rows=slice(None)):
        logits = x[rows] @ p
        return -(jnp.logaddexp(0.0, logits) - y[rows] * logits).mean() - (p**2).sum() / (2 * N)

    return log_density


def posteriors_step(batch) -> Callable:
    transform = c.posteriors().sgmcmc.sghmc.build(
        lambda p, b: (-logistic(p, b), torch.zeros(())), lr=0.2, alpha=0.5, temperature=1 / N
    )
    start = transform.init(torch.zeros(D), momenta=0.0)
    return carried(lambda state: transform.update(state, batch, inplace=True), start)


def jax_sghmc(batch) -> tuple[Callable, ...]:
    """BlackJAX's SGHMC: jitted once a step, and inside one scan with every draw."""
    import jax

    first, *programs = c.blackjax_sghmc(jax_logistic(*batch), torch.zeros(D), 0.2, 0.5, 1 / N, STEPS)
    return tuple([carried(lambda carry, run=run: jax.block_until_ready(run(carry)), first) for run in programs])


def captured_chains(data, chains: int, steps: int, size: int) -> Callable[[], None]:
    """So many steps of chains in one program, each on minibatches of its own, drawn with replacement outside of it."""
    tx, (x, y) = bc.sghmc(0.05, 0.9, temperature=1 / N), data

    def loss(params, batch):
        x, y, rows = batch
        return logistic(params, (x[rows], y[rows]))

    many = bc.parallel(bc.make_step(loss, tx), chains, batch_dim=(None, None, 0))
    params = torch.zeros(chains, D)
    state = many.init(tx, params)
    fast = bc.capture(many, params, state, (x, y, torch.zeros(chains, size, dtype=torch.int64)))
    return from_start(fast, params, state, lambda: (x, y, torch.randint(N, (chains, size))), steps)


def chains_by_hand(data, chains: int, size: int) -> Callable[[], None]:
    """A step of SGHMC of many chains in batched operations, in place."""
    (x, y), level = data, (0.1 / (2 * 0.05 * N)) ** 0.5
    p, v, kept = (torch.zeros(chains, D, device=x.device) for _ in range(3))

    def step():
        rows = torch.randint(N, (chains, size), device=x.device)
        mine = x[rows]
        residual = torch.sigmoid(torch.bmm(mine, p.unsqueeze(2)).squeeze(2)) - y[rows]
        g = torch.bmm(residual.unsqueeze(1), mine).squeeze(1) / size
        g.add_(p, alpha=1 / N)
        fresh = torch.randn(chains, D, device=x.device).mul_(level)
        v.mul_(0.9).add_(g).add_(fresh).add_(kept)
        kept.copy_(fresh)
        p.add_(v, alpha=-0.05)

    return step


def five_thousand_chains(chains: int = 5000, steps: int = 2000, size: int = 32, rounds: int = 2) -> Row:
    data = regression_data()
    by_hand = one_by_one(*[chains_by_hand(data, chains, size)] * steps)
    runs = {"captured parallel": captured_chains(data, chains, steps, size), "batched torch by hand": by_hand}
    return Row(
        f"{chains} chains x {steps} steps, minibatches of {size} of their own",
        take_turns(runs, rounds, seconds=0.0),
        {("captured parallel", "batched torch by hand"): 1.1},
    )


SIZE = 32  # of a minibatch
LR, MOMENTUM = 0.05, 0.9
JAX = "JAX, scan of vmap"
CLOCKS = {"wall time": time.perf_counter, "process time": time.process_time}


def jax_chains(data: tuple[torch.Tensor, torch.Tensor], chains: int, steps: int, whole: bool = False) -> Callable:
    """A call that runs ``steps`` steps of ``chains`` chains in JAX as one program, ``lax.scan`` of ``vmap``.

    It is BlackJAX's SGHMC with our learning rate ``lr`` and momentum ``mu``: its step ``h`` moves ``theta`` by ``h r`` and then
    sets ``r`` to ``(1 - alpha h) r - h g`` plus noise, so that ``h = sqrt(lr)`` and ``alpha = (1 - mu) / h``. As ``g`` is taken
    where ``theta`` was before the move, its variance at curvature ``k`` is about ``1 / (1 - lr k / (1 - mu))`` times ours.

    Rows of the minibatches are drawn on both sides: by JAX inside the program, with replacement; by us outside with replacement
    (``torch.randint``), and inside by ``bc.epochs``, as fresh subsets and in reshuffled epochs.

    Args:
        whole: every batch is all data.
    """
    import jax
    import jax.numpy as jnp
    from blackjax.sgmcmc import diffusions

    log_density, step_size = jax_logistic(*data), LR**0.5
    integrate = diffusions.sghmc((1 - MOMENTUM) / step_size, 0.0)

    def one(key, p, m):
        for_rows, for_noise = jax.random.split(key)
        rows = slice(None) if whole else jax.random.randint(for_rows, (SIZE,), 0, N)
        return integrate(for_noise, p, m, jax.grad(log_density)(p, rows), step_size, 1 / N)

    def advance(carry, _):
        key, p, m = carry
        key, now = jax.random.split(key)
        p, m = jax.vmap(one)(jax.random.split(now, chains), p, m)
        return (key, p, m), None

    scan = jax.jit(lambda carry: jax.lax.scan(advance, carry, None, length=steps))
    start = jax.random.key(0), jnp.zeros((chains, D)), jnp.zeros((chains, D))
    return carried(lambda carry: jax.block_until_ready(scan(carry)), start)


def five_thousand_chains_and_jax(clock: str, chains: int = 5000, steps: int = 500, rounds: int = 7) -> Row:
    """All chains. In wall time both libraries have all cores, in process time ours has one thread and JAX what it takes."""
    with threads(torch.get_num_threads() if clock == "process time" else os.cpu_count() or 1):
        data, tx, params = regression_data(), bc.sghmc(LR, MOMENTUM, temperature=1 / N), torch.zeros(chains, D)
        contestants = {"torch.randint": captured_chains(data, chains, steps, SIZE)}
        inside = bc.parallel(bc.make_step(logistic, tx), chains, batch_dim=0)
        state = inside.init(tx, params)
        for order in ("independent", "reshuffled"):
            source: Any = bc.epochs(data, SIZE, order=order, chains=chains)
            whole = bc.capture(inside, params, state, source)
            again = partial(lambda source: source, source)
            contestants[f"bc.epochs, {order}"] = from_start(whole, params, state, again, steps)
        targets = {(name, JAX): 0.6 for name in contestants}
        contestants[JAX] = jax_chains(data, chains, steps)
        times = take_turns(contestants, rounds, seconds=0.0, clock=CLOCKS[clock])
    where = "wall time on all cores" if clock == "wall time" else clock
    return Row(f"{chains} chains x {steps} steps, minibatches of {SIZE} of their own, {where}", times, targets)


def one_chain(steps: int = 500) -> Row:
    """The shape of Pima: 768 data of 8 numbers, every step all of them."""
    step, *given = logistic_step()
    ours = stepping(bc.capture(step, *given, steps=steps), *given)
    contestants = {"captured": ours, JAX: jax_chains(given[-1], 1, steps, whole=True)}
    return Row(
        f"logistic regression {N} x {D}, one chain x {steps} steps, process time",
        take_turns(contestants, 15, clock=time.process_time),
        {("captured", JAX): 1.0},
    )


def noise(n: int = 1_000_000) -> Row:
    out, key, step = torch.empty(n), torch.tensor(7), torch.tensor(3)
    generator, kernel = torch.Generator(), normals_kernel()
    if kernel is None:
        raise RuntimeError("the row of noise needs a C++ compiler")
    elements = parts_of_leaves((((0, n),),), (0,))
    return Row(
        "1e6 float32 normals",
        take_turns(
            {
                "Philox kernel": lambda: kernel(out, key, step, (), (n,), (0,)),
                "Philox by tensor operations": lambda: in_tensors(key, step, elements, torch.float32),
                "normal_": lambda: out.normal_(generator=generator),
            },
            rounds=31,
        ),
        {("Philox kernel", "normal_"): 0.5},
    )


def dispatch() -> Row:
    p, g = leaves([100_000]), leaves([100_000])
    tx = bc.chain(
        bc.links.add_decayed_weights(1e-3),
        bc.links.scale(2.0),
        bc.add_momentum(c.MOMENTUM),
        bc.inject_langevin_noise(c.TEMPERATURE),
        bc.scale_by_neg_lr(c.LR),
    )
    generator = torch.Generator()
    (theta,), (grad,), velocity, kept = p, g, torch.zeros(100_000), torch.zeros(100_000)

    def by_hand():
        generator.manual_seed(1)
        grad.add_(theta, alpha=1e-3).mul_(2.0)
        fresh = torch.empty(100_000).normal_(generator=generator).mul_(1e-3)
        noise = fresh + kept
        kept.copy_(fresh)
        velocity.mul_(c.MOMENTUM).add_(grad.add_(noise))
        torch.mul(velocity, -c.LR, out=grad)
        theta.add_(grad)

    return Row(
        "dispatch: a chain of 5 links, 1e5 parameters",
        take_turns({"chain of 5 links": c.update_and_apply(tx, p, g), "by hand": by_hand}, rounds=41),
        {("chain of 5 links", "by hand"): 1.1},
    )


def whole_step(
    kind: str,
    target: float,
    rounds: int = 101,
    in_place: float | None = None,
    pure: float | None = None,
    captured: float | None = None,
) -> Row:
    """A training step with its gradient, as a class and in place, against torch's class and the stream's draw alone.

    In seconds of this process, which other work on the machine does not count into.
    """
    draw, sample = c.draw_alone(kind), bc.sghmc(c.LR, c.MOMENTUM, temperature=c.TEMPERATURE)
    torchs = c.training_step(kind, lambda p: torch.optim.SGD(p, c.LR, c.MOMENTUM, foreach=False))
    step, *given = c.functional_step(kind, sample, inplace=False)
    compiled = {} if captured is None else {"captured": stepping(bc.capture(step, *given), *given)}
    times = take_turns(
        {
            **compiled,
            "bc.optim.SGHMC": c.training_step(kind, lambda p: bc.optim.SGHMC(p, c.LR, temperature=c.TEMPERATURE)),
            "make_step in place": stepping(*c.functional_step(kind, sample, inplace=True)),
            "make_step": stepping(step, *given),
            "bc.optim.SGD, T = 0": c.training_step(kind, lambda p: bc.optim.SGD(p, c.LR, c.MOMENTUM, foreach=False)),
            "torch.optim.SGD": torchs,
            "torch.optim.SGD + draw": one_by_one(torchs, draw),
        },
        rounds,
        clock=time.process_time,
    )
    targets = {
        ("bc.optim.SGHMC", "torch.optim.SGD + draw"): target,
        ("make_step in place", "torch.optim.SGD + draw"): in_place or target,
        ("bc.optim.SGD, T = 0", "torch.optim.SGD"): 1.05,
    }
    if captured is not None:
        targets["captured", "torch.optim.SGD + draw"] = captured
    if pure is not None:  # new parameters and a new state at every step
        targets["make_step", "torch.optim.SGD + draw"] = targets["make_step", "torch.optim.SGD"] = pure
    return Row(f"{c.NETWORKS[kind][0]}, whole step with gradient", times, targets)


def falling_rate(size: str, chain: float, optim: float) -> Row:
    """SGHMC whose rate falls along a cosine over the same at a constant one, as a chain and as a class with torch's scheduler,
    whose own time counts. In seconds of this process, over contestants that are made four times, twice in either order.
    """
    forms = dict(zip(("update + apply", "make_step", "make_step in place"), FORMS))
    make = partial(bc.optim.SGHMC, lr=1e-3, temperature=1e-4)
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10**6)
    made = {
        **{
            f"{name}, {rate}": partial(at_hand(rate, form, SIZES[size]), bc)
            for name, form in forms.items()
            for rate in ("cosine", "constant")
        },
        "bc.optim.SGHMC, scheduler": partial(c.adaptive, make, SIZES[size], schedule=cosine),
        "bc.optim.SGHMC, constant": partial(c.adaptive, make, SIZES[size]),
    }
    times = {name: [] for name in made}
    for order in 2 * [
        list(made),
        list(made)[::-1],
    ]:  # where a contestant's memory lies is worth some hundredths: anew each time
        for name, turns in take_turns({n: made[n]() for n in order}, rounds=25, clock=time.process_time).items():
            times[name] += turns
    return Row(
        f"SGHMC on gradients at hand, {size}, falling rate over constant",
        times,
        {
            **{(f"{name}, cosine", f"{name}, constant"): chain for name in forms},
            ("bc.optim.SGHMC, scheduler", "bc.optim.SGHMC, constant"): optim,
        },
    )


def rows(quick: bool) -> dict[str, Callable[[], Row]]:
    """The rows by name, each measured when called."""
    plain = (optimizer, sixty_leaves, noise, dispatch, small_model, sampler, sampler_on_all_threads)
    mlp, sixty = [(1024, 784), (1024,), (256, 1024), (256,), (10, 256), (10,)], [(1667,)] * 60
    beside = partial(five_thousand_chains_and_jax, **({"steps": 20, "rounds": 5} if quick else {}))
    return {
        **{row.__name__: row for row in plain},
        "falling_rate_small": partial(falling_rate, "3 x 16x16", 1.3, 1.3),
        "falling_rate": partial(falling_rate, "30 x 64x64", 1.2, 1.05),
        "falling_rate_large": partial(falling_rate, "2 x 1e6", 1.05, 1.0),
        "adam_mlp": partial(adam, "Adam with noise, MLP 784-1024-256-10", mlp),
        "adam_sixty_leaves": partial(adam, "Adam with noise, 60 leaves, 1e5 parameters", sixty),
        "whole_step_cnn": partial(whole_step, "cnn", 1.10),
        "whole_step_cnn_lstm": partial(whole_step, "cnn_lstm", 1.10, rounds=25),
        "whole_step_mlp": partial(whole_step, "mlp", 1.25, in_place=1.15, pure=1.4, captured=0.4),
        "five_thousand_chains": partial(five_thousand_chains, **({"steps": 50, "rounds": 5} if quick else {})),
        **{f"five_thousand_chains_in_{clock.replace(' ', '_')}": partial(beside, clock) for clock in CLOCKS},
        "one_chain": one_chain,
    }
