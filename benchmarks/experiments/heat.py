r"""What minibatches do to a sampler, and what each cure does about it, on three posteriors.

    laws      regression with three curvatures, 1,000 data, batches of 20, momentum 0.9, at four kappas: ``kappa`` columns
    linear    regression with 1,000 data and 5 parameters, batches of 32, lr 0.1, momentum 0.9: the covariance solved exactly
    pima      logistic regression on features of scales from 3 to 0.1, stiffest direction at ``kappa`` relaxations an epoch
    mnist     an MLP 196-20-10 on 1,000 digits, prior N(0, 1) of every weight

``pima`` and ``mnist`` are compared with Hamiltonian Monte Carlo (Metropolis-corrected, many chains), whose draws are kept in
the folder of the run and whose R-hat stands in the table. Chains start at draws of the reference and are looked at after
``burn_in`` epochs, at all phases of an epoch. A function is a coordinate along an eigenvector of the Hessian (pima) or a
logit of a test image (mnist, where the Hessian is too large for mclmc's precision). Measures:

    gradients       gradients of a batch a step
    log variance    mean over functions of log(variance / that of the reference), and its root mean square
    stiffest        variance / that of the reference along the stiffest direction, minus 1 (linear: the mean over directions)
    test NLL        of the mean of the predictive probabilities, minus that of the reference
    energy          mean of ``N loss``, minus that of the reference, in nats, and its standard error
    training        the part of the energy that is not the prior's: mean negative log likelihood of all data, likewise
    ESS             effective draws an epoch, median over functions, from all chains, over the number of chains
    left            of the noise by a control variate at a draw of the reference, 1 without it; the method is refused at 1

On pima the chain of a method is paired with one on full gradients of the same rate and momentum, from the same draws and with
the same injected noise. The posterior is log-concave, so that the two stay together, and what differs between them is what the
batches do; the Monte Carlo error of their difference is a fraction of that of either:

    batches         variance / that of the paired chain along the stiffest direction, minus 1, and its standard error
    worst           the same where it is furthest from 0, over all directions
    law             what ``bc.diagnostics.heating`` predicts of ``batches``, from noise and curvature at the mode
    rate            variance of the paired chain along the stiffest direction / the exact one, minus 1: what a full gradient
                    leaves at this rate; the exact one by importance sampling from the Laplace approximation

The standard errors are over groups of chains: ``sequences`` of batches, each shared by ``chains / sequences`` chains. Where a
direction needs more than ``burn_in`` epochs to relax, the batches' noise has not reached it in full; there it is small.

A method that the library refuses stands there with what it measured. ``--workers`` cells run at once, a file each, and a second
call goes on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

import bayesopt_chain as bc
from benchmarks.experiments import mnist, pima
from benchmarks.experiments.cells import folder_of, kept, slug, spent
from benchmarks.experiments.common import Experiment, Table

METHODS = (
    "full batch",
    "independent",
    "reshuffled",
    "reshuffled, long memory",
    "palindrome",
    "palindrome, long memory",
    "control variates",
    "svrg",
    "mclmc",
    "mclmc, full batch",
    "mclmc, precision",
)


class Task(NamedTuple):
    """A posterior: the mean negative log posterior of a vector of parameters, its data, and what is looked at."""

    loss: Callable[[Tensor, Any], Tensor]
    data: tuple[Tensor, Tensor]
    start: Tensor  # near the mode
    functions: Callable[[Tensor], Tensor]  # [n, P] -> [n, F]
    log_predictive: Callable[[Tensor], Tensor]  # [n, P] -> [n, test data]

    @property
    def n(self) -> int:
        return len(self.data[0])

    def energies(self, draws: Tensor) -> Tensor:
        """``N loss`` of draws ``[n, P]``, and the part of the likelihood in it: ``[2, n]``."""
        total = self.n * torch.stack([self.loss(w, self.data) for w in draws]).double()
        return torch.stack([total, total - draws.double().square().sum(1) / 2])


def pima_task(s: Mapping[str, Any]) -> Task:
    x, y = pima.read()
    x = x * torch.logspace(0.5, -1.0, 8, dtype=torch.float64)
    x = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)

    def loss(w: Tensor, batch: Any) -> Tensor:
        z = batch[0] @ w
        return (softplus(z) - batch[1] * z).mean() + w.square().sum() / (2 * len(x))

    w = torch.zeros(9, dtype=torch.float64)
    for _ in range(20):
        w = w - torch.linalg.solve(torch.func.hessian(loss)(w, (x, y)), torch.func.grad(loss)(w, (x, y)))
    vectors = torch.linalg.eigh(torch.func.hessian(loss)(w, (x, y))).eigenvectors.flip(1)
    signs = 2 * y - 1
    return Task(
        loss,
        (x, y),
        w,
        lambda draws: (draws - w) @ vectors,
        lambda draws: torch.nn.functional.logsigmoid(draws @ x.T * signs),
    )


def mnist_task(s: Mapping[str, Any]) -> Task:
    x, y, x_test, y_test = mnist.read(2)
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, x_test, y_test = x[rows[: s["data"]]], y[rows[: s["data"]]], x_test[:1000], y_test[:1000]
    sizes = (196 * 20, 20, 20 * 10, 10)

    def forward(w: Tensor, x: Tensor) -> Tensor:
        a, b, c, d = w.split(sizes)
        return torch.tanh(x @ a.view(196, 20) + b) @ c.view(20, 10) + d

    def loss(w: Tensor, batch: Any) -> Tensor:
        return cross_entropy(forward(w, batch[0]), batch[1]) + w.square().sum() / (2 * len(x))

    w = 0.1 * torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1))
    tx = bc.adam(0.01)
    step, state = bc.make_step(loss, tx), tx.init(w)
    for _ in range(s["descent"]):
        w, state, _ = step(w, state, (x, y))

    def log_predictive(draws: Tensor) -> Tensor:
        logits = torch.stack([forward(w, x_test) for w in draws])
        return logits.log_softmax(-1)[:, torch.arange(len(y_test)), y_test]

    return Task(
        loss,
        (x, y),
        w,
        lambda draws: torch.stack([forward(w, x_test[:50]).flatten() for w in draws]),
        log_predictive,
    )


TASKS = {"pima": pima_task, "mnist": mnist_task}


def hmc(task: Task, s: Mapping[str, Any], seed: int) -> Tensor:
    """One chain of Hamiltonian Monte Carlo, ``[draws, P]``; the step follows the acceptance during the first fifth."""
    g = torch.Generator().manual_seed(1000 + seed)
    n, w = task.n, task.start.clone()

    def value(w: Tensor) -> tuple[Tensor, Tensor]:
        w = w.detach().requires_grad_()
        energy = n * task.loss(w, task.data)
        return torch.autograd.grad(energy, w)[0], energy.detach()

    grad, energy = value(w)
    step, kept_draws, leaps, new = s["hmc_step"], [], s["leaps"], energy
    for t in range(s["hmc_draws"] * 5 // 4):
        p = torch.randn(w.shape, generator=g, dtype=w.dtype)
        size = step * float(0.8 + 0.4 * torch.rand((), generator=g))
        q, momentum, force = w, p - size / 2 * grad, grad
        for leap in range(leaps):
            q = q + size * momentum
            force, new = value(q)
            momentum = momentum - (size if leap < leaps - 1 else size / 2) * force
        log_ratio = float(energy - new + (p.square().sum() - momentum.square().sum()) / 2)
        accepted = math.log(float(torch.rand((), generator=g)) + 1e-12) < log_ratio
        if accepted:
            w, grad, energy = q, force, new
        if t < s["hmc_draws"] // 4:
            rate = min(1.0, math.exp(min(log_ratio, 0.0))) if math.isfinite(log_ratio) else 0.0
            step *= math.exp(0.1 * (rate - 0.8))
        else:
            kept_draws.append(w)
    return torch.stack(kept_draws)


class Setting(NamedTuple):
    """A method: the chain, how its gradients are made, and its batches."""

    tx: Any
    estimate: Any
    data: Any
    gradients: float
    left: float | None = None
    steps: int | None = None  # an epoch on full batches
    paired: Any = None  # the chain on full gradients at the same rate
    law: float | None = None


def settings_of(task: Task, method: str, s: Mapping[str, Any], reference: Tensor, curvature: float) -> Setting:
    """The setting of a method; a refusal of the library is raised.

    ``curvature`` is the largest of the mean loss at a draw.
    """
    n, b, T, chains = task.n, s["batch"], 1 / task.n, s["sequences"]
    steps, kappa, memory = n / b, s["kappa"], "long memory" in method
    friction = (0.1 if "palindrome" in method else 0.3) / steps if memory else 0.1
    lr = min(kappa * friction / (steps * curvature), 1.0 / curvature)
    if memory:
        lr = min(lr, 1.0 / (steps**2 * curvature))  # K sqrt(lr k) of 1
    order: Any = {"independent": "independent", "palindrome": "palindrome"}.get(method.split(",")[0], "reshuffled")
    make = lambda: bc.sghmc(lr, 1 - friction, temperature=T)  # noqa: E731
    if method == "full batch":
        lr = 0.3 / curvature
        return Setting(make(), task.loss, [task.data], steps, steps=max(round(steps), 1))
    if method.startswith("mclmc"):
        precision = None
        if "precision" in method:
            hessian = n * torch.func.hessian(task.loss)(task.start, task.data)
            precision = bc.precision.Dense(hessian, task.start, torch.tensor(float(n))).factorised()
        found = bc.diagnostics.tune_mclmc(
            task.loss, reference[0], task.data, temperature=T, precision=precision, steps=s["tune"]
        )
        tx = bc.samplers.mclmc(found.lr, found.length, temperature=T, precision=precision)
        if "full batch" in method:
            return Setting(tx, task.loss, [task.data], steps, steps=max(round(steps), 1))
        return Setting(tx, task.loss, bc.epochs(task.data, b, chains=chains), 1.0)
    if method in ("control variates", "svrg"):
        one = bc.epochs(task.data, b)
        some = [one.batch(0, k) for k in range(len(one))]
        about_the_mode = method == "control variates"
        estimate = (
            bc.gradients.control_variates(task.loss, some, task.start)
            if about_the_mode
            else bc.gradients.svrg(task.loss, some)
        )
        place = task.start if about_the_mode else reference[-2]  # of a snapshot: any other draw
        left, gradients = bc.gradients.noise_left(estimate, reference[-1], some, memory=estimate.init(place)), 2.0
    else:
        estimate, left, gradients = task.loss, None, 1.0
    law = None
    data = bc.epochs(task.data, b, order=order, chains=chains)
    if s["paired"] and estimate is task.loss:
        noise = bc.diagnostics.gradient_noise(task.loss, task.start, bc.epochs(task.data, b), rank=s["rank"])
        product = bc.diagnostics.hessian_product(task.loss, task.start, [task.data])
        law = float(bc.diagnostics.heating(make(), noise, order=order, curvature=product).excess[0])
    return Setting(make(), estimate, data, gradients, left, paired=make() if s["paired"] else None, law=law)


def draws_of(setting: Setting, s: Mapping[str, Any], reference: Tensor) -> Tensor:
    """Draws ``[draws, chains, P]`` of one method, at all phases of the epochs.

    Two settings with the same chain get the same starts and the same injected noise.
    """
    chains = s["chains"]
    full = setting.steps is not None
    alone = bc.make_step(setting.estimate, setting.tx)
    step = bc.parallel(alone, chains, batch_dim=None if full else 0)
    params = reference[torch.linspace(0, len(reference) - 1, chains).long()].clone()
    torch.manual_seed(0)
    state, out, t = step.init(setting.tx, params), [], 0
    every = setting.steps or len(setting.data)
    stride = max(every // s["per_epoch"] + 1, 1)
    for epoch in range(s["epochs"]):
        if getattr(setting.estimate, "refresh", None) is not None:
            state = torch.vmap(alone.refresh)(params, state)
        for batch in setting.data * every if full else setting.data:
            if not full:
                batch = optree.tree_map(lambda x: x.repeat_interleave(chains // s["sequences"], 0), batch)
            params, state, _ = step(params, state, batch)
            t += 1
            if epoch >= s["burn_in"] and t % stride == 0:
                out.append(params)
        if hasattr(state, "watch"):
            bc.gradients.check_noise(state)
    return torch.stack(out)


def measured(task: Task, draws: Tensor, reference: Tensor, epochs: int) -> dict[str, float]:
    """How draws ``[draws, chains, P]`` differ from those of the reference ``[draws, P]``."""
    flat = draws.flatten(0, 1)
    functions, known = task.functions(flat), task.functions(reference)
    logs = (functions.var(0) / known.var(0)).log()
    nll = lambda w: -(task.log_predictive(w).double().logsumexp(0) - math.log(len(w))).mean()  # noqa: E731
    some = draws[:: max(draws.shape[0] * draws.shape[1] // 4000, 1)]
    energies = task.energies(some.flatten(0, 1)).unflatten(1, some.shape[:2]).mean(1)  # of each chain
    theirs = task.energies(reference[:: max(len(reference) // 4000, 1)]).mean(1)
    energy, training = (energies.mean(1) - theirs).tolist()
    by_chain = functions.unflatten(0, draws.shape[:2])[:, :, :20].double()
    return {
        "log variance": float(logs.mean()),
        "rms": float(logs.square().mean().sqrt()),
        **({} if len(flat[0]) > 100 else {"stiffest": float((functions[:, 0].var() / known[:, 0].var()) - 1)}),
        "test NLL": float(nll(flat[:: max(len(flat) // 2000, 1)]) - nll(reference[:: max(len(reference) // 2000, 1)])),
        "energy": energy,
        "energy s.e.": float(energies[0].std() / draws.shape[1] ** 0.5),
        "training": training,
        "ESS": float(bc.diagnostics.ess({"f": by_chain})["f"].median()) / draws.shape[1] / epochs,
    }


def against_pair(task: Task, draws: Tensor, pair: Tensor, groups: int, exact: Tensor) -> dict[str, float]:
    """What batches do to the variances of a chain: its draws against those of the paired chain on full gradients.

    With ``A`` and ``B`` the sums of squares of a group of chains about the mean of all, the ratio of variances is ``sum A /
    sum B``, and its standard error that of the mean of ``A - ratio B``, over the mean of ``B``.
    """

    def squares(w: Tensor) -> Tensor:
        f = task.functions(w.flatten(0, 1))
        return (f - f.mean(0)).square().unflatten(0, (len(w), groups, -1)).mean((0, 2))  # [groups, F]

    def ratio(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        r = a.mean(0) / b.mean(0)
        return r - 1, (a - r * b).std(0) / groups**0.5 / b.mean(0)

    a, b = squares(draws), squares(pair)
    (batches, error), (rate, rate_error) = ratio(a, b), ratio(b, exact.expand_as(b))
    worst = int(batches.abs().argmax())
    return {
        "batches": float(batches[0]),
        "batches s.e.": float(error[0]),
        "worst": float(batches[worst]),
        "worst s.e.": float(error[worst]),
        "rate": float(rate[0]),
        "rate s.e.": float(rate_error[0]),
    }


def importance(task: Task, draws: int) -> tuple[Tensor, float]:
    """The variances of the functions, by importance sampling from the Laplace approximation, a twentieth wider; the ESS."""
    g = torch.Generator().manual_seed(0)
    hessian = task.n * torch.func.hessian(task.loss)(task.start, task.data)
    root = 1.05 * torch.linalg.cholesky(torch.linalg.inv(hessian))
    functions, logs = [], []
    for _ in range(draws // 10_000):
        z = torch.randn(10_000, len(root), generator=g, dtype=root.dtype)
        w = task.start + z @ root.T
        logs.append(z.square().sum(1) / 2 - task.n * torch.vmap(task.loss, (0, None))(w, task.data))
        functions.append(task.functions(w))
    weights, f = torch.cat(logs).softmax(0)[:, None], torch.cat(functions)
    mean = (weights * f).sum(0)
    return (weights * (f - mean).square()).sum(0), float(1 / weights.square().sum())


def reference_of(task: str, s: Mapping[str, Any], folder: Path) -> tuple[Task, Tensor]:
    """The task and the draws of its reference ``[chains, draws, P]``, from the folder."""
    made = TASKS[task](s)
    paths = [folder / f"{task}-hmc-{i}.pt" for i in range(s["hmc_chains"])]
    return made, torch.stack([torch.load(path) for path in paths])


def one_cell(task: str, method: str, s: Mapping[str, Any], folder: Path) -> None:
    """Make one cell and keep it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    s = {**s, **s[task]}

    def make(_: Path) -> dict[str, float]:
        if method.startswith("HMC "):
            i = int(method.split()[1])
            torch.save(hmc(TASKS[task](s), s, i), folder / f"{task}-hmc-{i}.pt")
            return {"gradients": float(s["hmc_draws"] * 5 // 4 * s["leaps"])}
        if method == "exact":
            exact, effective = importance(TASKS[task](s), s["importance"])
            torch.save(exact, folder / f"{task}-exact.pt")
            return {"ESS": effective}
        made, chains = reference_of(task, s, folder)
        reference = chains.flatten(0, 1)
        if method == "HMC":
            f = torch.stack([made.functions(x) for x in chains], 1)[:, :, :20].double()
            row = {
                "R-hat": float(bc.diagnostics.r_hat({"f": f})["f"].max()),
                "ESS of all draws": float(bc.diagnostics.ess({"f": f})["f"].median()),
            }
            if not s["paired"]:
                return row
            known, exact = made.functions(reference).var(0), torch.load(folder / f"{task}-exact.pt")
            return {**row, "stiffest": float(known[0] / exact[0]) - 1}
        value = torch.func.grad(made.loss)
        w, v = reference[0], torch.randn(reference[0].shape, dtype=reference.dtype)
        for _power in range(40):
            v = torch.func.jvp(lambda w: value(w, made.data), (w,), (v / v.norm(),))[1]
        try:
            setting = settings_of(made, method, s, reference, float(v.norm()))
            draws = draws_of(setting, s, reference)
        except ValueError as refusal:
            (folder / f"{task}-{slug(method)}.refused").write_text(str(refusal))
            return {"refused": 1.0}
        row = {"gradients": setting.gradients, **measured(made, draws, reference, s["epochs"] - s["burn_in"])}
        if setting.paired is not None:
            path = folder / f"{task}-pair-{slug(repr(setting.paired))}.pt"  # several methods have the same
            if not path.exists():
                full = setting._replace(
                    tx=setting.paired, estimate=made.loss, data=[made.data], steps=len(setting.data)
                )
                written = path.with_suffix(f".{os.getpid()}")
                torch.save(draws_of(full, s, reference), written)
                written.replace(path)
            pair = torch.load(path)
            row |= against_pair(made, draws, pair, s["sequences"], torch.load(folder / f"{task}-exact.pt"))
        row |= {} if setting.law is None else {"law": setting.law}
        return row if setting.left is None else {**row, "left": setting.left}

    kept(folder, f"{task} {method}", make)


def variance(x: Tensor, lr: float, mu: float, b: int, left: Tensor) -> Tensor:
    """The covariance of ``bc.sghmc`` on a regression on ``x`` with independent batches, over that of the posterior: its map.

    The second moments of parameters, velocity and last draw are solved exactly; the Hessian of a batch is a random matrix, so
    that the noise grows with the distance from the mode.

    Args:
        x: features ``[n, d]``.
        lr, mu, b: learning rate, momentum, batch size.
        left: gradients of the data at the mode, less what a control variate takes from them, ``[n, d]``.

    Returns:
        ``V H / T``, ``[d, d]``.
    """
    n, d = x.shape
    H = x.T @ x / n
    eye, zero = torch.eye(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    a = lr * math.sqrt(2 / n * (1 - mu) / lr) / 2
    M = torch.cat(
        [
            torch.cat([eye - lr * H, -mu * eye, -a * eye], 1),
            torch.cat([lr * H, mu * eye, a * eye], 1),
            torch.zeros(d, 3 * d, dtype=torch.float64),
        ]
    )
    L, F, R = torch.cat([-lr * eye, lr * eye, zero]), torch.cat([-a * eye, a * eye, eye]), torch.cat([eye, zero, zero])
    A = torch.einsum("ni,nj->nij", x, x) - H
    share = (n - b) / (n - 1) / b
    AA = torch.einsum("nij,nkl->ikjl", A, A).reshape(d * d, d * d) / n * share
    pair = torch.kron(M, M) + torch.kron(L, L) @ AA @ torch.kron(R, R).T
    Q = F @ F.T + L @ (left.T @ left / n * share) @ L.T
    V = torch.linalg.solve(torch.eye(len(pair), dtype=torch.float64) - pair, Q.reshape(-1)).reshape(3 * d, 3 * d)
    return V[:d, :d] @ H * n


def squared_error(w: Tensor, batch: Any) -> Tensor:
    """Half the mean squared error of a regression."""
    return (batch[0] @ w - batch[1]).square().mean() / 2


def linear() -> Table:
    """The regression of docs/minibatches.md, solved exactly: plain, and with control variates at the mode."""
    n, d, b = 1000, 5, 32
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = x.sum(1) + torch.randn(n, generator=g, dtype=torch.float64)
    mode = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    each = x * (x @ mode - y)[:, None]
    return {
        f"linear: {name}": {"gradients": gradients, "stiffest": float(variance(x, 0.1, 0.9, b, left).trace() / d) - 1}
        for name, gradients, left in (
            ("independent", 1.0, each),
            ("control variates", 2.0, torch.zeros_like(each)),
        )
    }


KAPPAS = (0.3, 1.0, 1.8, 5.0)


def laws() -> Table:
    """A regression with the curvatures 1, 0.1 and 0.01 in rotated directions: the worst error of a variance at four kappas.

    Independent batches and control variates are solved exactly (:func:`variance`), the other orders by
    ``bc.diagnostics.heating`` for the noise at the mode.
    """
    n, b, mu = 1000, 20, 0.9
    g = torch.Generator().manual_seed(0)
    z, e = torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randn(n, generator=g, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=g, dtype=torch.float64)).Q
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(z.T @ z / n), z.T, upper=False).T
    x = white * torch.logspace(0, -1, 3, dtype=torch.float64) @ turn.T
    y = x.sum(1) + e
    mode, H = torch.linalg.lstsq(x, y[:, None]).solution[:, 0], x.T @ x / n
    each = x * (x @ mode - y)[:, None]
    one = bc.diagnostics.gradient_noise(squared_error, mode, bc.epochs((x, y), 1), max_batches=n)
    of_size = lambda b: one._replace(rows=one.rows / b**0.5)  # noqa: E731
    far = lambda of: float(of[of.abs().argmax()])  # noqa: E731
    worst = lambda ratio: far(torch.linalg.eigvals(ratio).real - 1)  # noqa: E731
    table: Table = {}
    for kappa in KAPPAS:
        lr = kappa * (1 - mu) * b / n
        tx = bc.sghmc(lr, mu, temperature=1 / n)
        reports = {
            order: bc.diagnostics.heating(tx, of_size(b), order=order, steps_per_epoch=n / b, curvature=H)
            for order in ("independent", "reshuffled", "palindrome")
        }
        rows = {
            "independent": worst(variance(x, lr, mu, b, each)),
            "reshuffled": far(reports["reshuffled"].excess),
            "reshuffled, epoch ends": far(reports["reshuffled"].at_end),
            "palindrome": far(reports["palindrome"].excess),
            "control variates": worst(variance(x, lr, mu, b, torch.zeros_like(each))),
        }
        for name, error in rows.items():
            table.setdefault(f"laws: {name}", {})[f"kappa {kappa:g}"] = error
    return table


def run(settings: Mapping[str, Any], seed: int) -> Table:
    """All cells, and the table of what is kept of them."""
    folder, workers = folder_of("heat", settings) / f"seed-{seed}", int(os.environ.get("BAYESOPT_CHAIN_WORKERS") or 1)
    folder.mkdir(parents=True, exist_ok=True)
    table = linear() | laws()
    first = [(task, f"HMC {i}") for task in settings["tasks"] for i in range(settings[task]["hmc_chains"])]
    first += [(task, "exact") for task in settings["tasks"] if settings[task]["paired"]]
    second = [(task, method) for task in settings["tasks"] for method in ("HMC", *settings["methods"])]
    second.remove(("mnist", "mclmc, precision")) if ("mnist", "mclmc, precision") in second else None
    for cells in (first, second):
        if workers == 1:
            for cell in cells:
                one_cell(*cell, settings, folder)
            continue
        with ProcessPoolExecutor(workers) as pool:
            for done in [pool.submit(one_cell, *cell, settings, folder) for cell in cells]:
                done.result()
    for task, method in second:
        table[f"{task}: {method}"] = kept(folder, f"{task} {method}", lambda _: {})
    return table


def says(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """One sentence on what came out."""
    plain, varied = (table[f"linear: {name}"]["stiffest"]["mean"] + 1 for name in ("independent", "control variates"))
    refused = [name for name, row in table.items() if "refused" in row]
    paired = [
        f"{name.removeprefix('pima: ')} {row['batches']['mean']:+.1%} +- {row['batches s.e.']['mean']:.1%} at "
        f"{row['gradients']['mean']:.0f}"
        for name, row in table.items()
        if "batches" in row
    ]
    return (
        f"In the regression a variance {plain:.3g} times too large comes down to {varied:.3g} times with control variates. "
        f"What batches add to the variance of the stiffest direction of pima, at so many gradients a step: "
        f"{', '.join(paired) or 'not in this record'}. "
        f"Refused by the library after measuring: {', '.join(refused) or 'nothing'}."
    )


def scale(**more: Any) -> dict[str, Any]:
    common = {"tasks": ["pima", "mnist"], "methods": list(METHODS), "tune": 1500, "per_epoch": 5}
    return {
        **common,
        "pima": {
            "batch": 24, "kappa": 1.0, "chains": 512, "sequences": 32, "epochs": 60, "burn_in": 15, "rank": 9,
            "hmc_chains": 4, "hmc_draws": 4000, "hmc_step": 0.03, "leaps": 20, "paired": True, "importance": 200_000,
        },
        "mnist": {
            "data": 1000, "descent": 1500, "batch": 20, "kappa": 20.0, "chains": 8, "sequences": 8, "epochs": 150,
            "burn_in": 50, "rank": 16, "hmc_chains": 4, "hmc_draws": 800, "hmc_step": 0.02, "leaps": 60, "paired": False,
        },
        **more,
    }  # fmt: skip


def smoke() -> dict[str, Any]:
    tiny = {"epochs": 3, "burn_in": 1, "hmc_chains": 2, "hmc_draws": 20, "leaps": 3, "chains": 2, "sequences": 2}
    small = scale(tune=20)
    few = ["independent", "control variates", "svrg", "mclmc"]
    return {
        **small,
        "methods": few,
        "pima": {**small["pima"], **tiny, "chains": 4, "importance": 10_000},
        "mnist": {**small["mnist"], **tiny, "descent": 20},
    }


EXPERIMENT = Experiment(
    name="heat",
    title="Minibatch heating: what it does, and which cure for which posterior",
    paper="none; the exact laws are in docs/minibatches.md",
    settings={"smoke": smoke(), "small": scale(), "full": scale()},
    seeds={"smoke": 1, "small": 1, "full": 3},
    run=run,
    says=says,
    shown=(
        "gradients",
        "batches",
        "batches s.e.",
        "law",
        "worst",
        "worst s.e.",
        "rate",
        "rate s.e.",
        "stiffest",
        "log variance",
        "rms",
        "test NLL",
        "energy",
        "energy s.e.",
        "training",
        "ESS",
        "left",
        "R-hat",
        "refused",
        *(f"kappa {kappa:g}" for kappa in KAPPAS),
    ),
    seconds=lambda settings, seeds: spent("heat", settings, seeds),
)
