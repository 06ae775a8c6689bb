"""``posterior_ensemble``: one call from a module to a posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bayesopt_chain import batches, checks, kinds
from bayesopt_chain.distributed.ranks import world
from bayesopt_chain.ensemble.data import read
from bayesopt_chain.ensemble.ensemble import Ensemble
from bayesopt_chain.ensemble.ivon import ivon
from bayesopt_chain.ensemble.laplace import laplace
from bayesopt_chain.ensemble.members import described, members_of
from bayesopt_chain.ensemble.plan import batch_size_for, rate, steps_for, training_likelihood
from bayesopt_chain.ensemble.problem import Problem
from bayesopt_chain.ensemble.progress import Progress
from bayesopt_chain.ensemble.ranks import is_first, require_ranks
from bayesopt_chain.ensemble.recipe import Plan, ensemble, sghmc
from bayesopt_chain.ensemble.stages import Stages, checksum
from bayesopt_chain.ensemble.swag import swag
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.runs.describe import describe

Method = Literal["sghmc", "ensemble", "swag", "laplace", "ivon"]
LEAST_SCORED = 4  # data of a fold
MOST = 2**53  # of whole numbers
MOST_PRECISE = 1e12  # of priors
METHODS: dict[str, Callable[[Plan], Ensemble]] = {
    "sghmc": sghmc,
    "ensemble": ensemble,
    "swag": swag,
    "laplace": laplace,
    "ivon": ivon,
}


def posterior_ensemble(
    make_model: nn.Module | Callable[[], nn.Module],
    data: Any,
    likelihood: Likelihood,
    *,
    members: int = 4,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    prior_precision: float | Literal["held out"] | None = None,
    held_out: float = 0.15,
    temperatures: Sequence[float] = (1.0,),
    seed: int = 0,
    path: str | Path | None = None,
    progress: bool = True,
    method: Method = "sghmc",
    mesh: Any = None,
    capture: bool = False,
) -> Ensemble:
    """From a module to networks that know what they do not know, in one call.

    Members train, each without one of two folds; the folds say where to stop, how large the noise is and how much each level
    counts; short chains at rising temperatures start from modes of all data. ``print(ensemble.report)`` says what was chosen
    and why, and what it cost. Short draws at T > 0 are an ensemble around each mode, not an equilibrated posterior, unless
    :func:`bayesopt_chain.diagnostics.doctor` agrees.

    Args:
        make_model: a function that returns a new module; or one module, whose trained weights are drawn anew for each member
            (frozen ones are shared with it, not copied: leave them as they are while the result is in use). Outputs are
            ``[B, *event]``, or have them as ``logits``. Dropout and BatchNorm work: chains at a temperature run in ``eval``
            mode.
        data: tensors ``(inputs, targets)`` with one entry a datum on axis 0, a Dataset, a DataLoader, a list of batches, or
            ``bc.epochs``. They are read once and kept in memory. Standardise them: the prior is on the weights.
        likelihood: of :mod:`bayesopt_chain.likelihoods`. Of ``gaussian`` noise of a known variance the number given is not
            used: training takes 0.02 of the targets' variance, and the variance of predictions is found on held-out data.
        members: how many networks, at least 1. Default 4.
        steps: of the first training of each member. Default: 300 passes over the data, from 4,000 to 20,000 steps.
        batch_size: of training. Default: that of a loader or ``bc.epochs``; else all data up to 128, and beyond that the power
            of two nearest to N / 16, from 32 to 256.
        lr: of Adam. Default: the largest of 0.01, 0.003 and 0.001 that is within 5 % of the best descent in a trial on one
            network for a tenth of the steps.
        prior_precision: of each trained weight, of a Gaussian prior about 0, in all (not per datum). "held out": members
            begin with 1, and train on with stronger priors while held-out data ask for it. Default: "held out" for
            ``method="sghmc"``, 1 for the others.
        held_out: share of the data in each of the two folds, above 0 and at most 0.4. Default 0.15.
        temperatures: of the levels above the mode, in units of the posterior's, ``1 / N``, ascending. Default: 1 alone.
        seed: of the starts, orders and streams: a whole number from 0.
        path: a directory. A call that was killed at any point goes on from there with the same results, bit for bit; a complete
            one returns at once. Another call under the same path is refused, naming what differs.
        progress: show one bar for all stages (where tqdm is installed). Default True.
        method: "sghmc" (default), the recipe above; "ensemble", the same without chains: a deep ensemble with held-out stop and
            scale; "swag", MultiSWAG from the modes; "laplace", :func:`bayesopt_chain.fit_laplace` of the last layer of every
            mode; "ivon", variational networks.
        mesh: a DeviceMesh of one axis whose ranks share out the members. Every rank makes the same call with all data, and gets
            the whole ensemble. Members are those of one process to the rounding of their matrix products, and bit for bit where
            ``vmap`` refuses the network. With ``path=`` the first rank writes, and any number of ranks goes on. Default: one
            process; under ``torchrun`` each rank then makes a call of its own, with a folder of its own under ``path``.
        capture: compile the step of every run of 5,000 steps and more (:func:`bayesopt_chain.capture`), in one process. Members
            are the same to rounding. Default False: on a CPU a program takes some 20 to 30 seconds to compile.

    Returns:
        :class:`Ensemble`, with ``predict``, ``report``, ``more``, ``save``, ``open``, ``draws`` and ``to_arviz``.

    Raises:
        TypeError: neither a module nor a function; data that hold no tensors.
        ValueError: an argument out of range; layers whose weights cannot be drawn anew; targets that the likelihood cannot
            have; training that diverges; ``path`` of another call; fewer members than ranks, or ranks with other calls.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(60, 2)
        >>> y = (x.sum(1, keepdim=True)).sin() + 0.1 * torch.randn(60, 1)
        >>> make = lambda: torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> ensemble = bc.posterior_ensemble(
        ...     make, (x, y), bc.likelihoods.gaussian(), members=2, steps=60, lr=0.01, progress=False
        ... )
        >>> prediction = ensemble.predict(torch.zeros(3, 2))
        >>> prediction.mean.shape, prediction.quantile(0.95).shape, bool((prediction.epistemic >= 0).all())
        (torch.Size([3, 1]), torch.Size([3, 1]), True)
    """
    who = "posterior_ensemble: "
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"{who}method={method!r}: pass one of {', '.join(map(repr, METHODS))}")
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"{who}likelihood is {type(likelihood).__name__}: pass one of bc.likelihoods, such as bc.likelihoods.gaussian()"
        )
    for name, number, least in (
        ("members", members, 1),
        ("steps", steps, 20),
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
    ):
        fits = isinstance(number, int) and not isinstance(number, bool) and least <= number <= MOST
        if not fits and not (number is None and name in ("steps", "batch_size")):
            raise ValueError(f"{who}{name}={number!r:.40}: pass a whole number from {least} to 2**53")
    kinds.require(
        who.strip(": "),
        path=(path, kinds.FOLDER.or_none()),
        progress=(progress, kinds.BOOL),
        capture=(capture, kinds.BOOL),
    )
    if lr is not None:
        checks.positive(f"{who}lr", lr)
    given = prior_precision if isinstance(prior_precision, str) else ""
    searched = given == "held out" or (prior_precision is None and method == "sghmc")
    if searched and method == "ivon":
        raise ValueError(
            f"{who}prior_precision='held out' is not for method='ivon', whose prior is in its rule: pass a number"
        )
    if isinstance(prior_precision, str) and not searched:
        raise ValueError(f"{who}prior_precision={prior_precision!r}: pass a positive number, 'held out', or nothing")
    if not isinstance(prior_precision, str) and prior_precision is not None:
        checks.positive(f"{who}prior_precision", prior_precision)
        if prior_precision > MOST_PRECISE:
            raise ValueError(
                f"{who}prior_precision={prior_precision!r}: weights with a standard deviation below 1e-6 cannot be "
                "sampled: pass a smaller one"
            )
    if not (isinstance(held_out, (int, float)) and 0 < held_out <= 0.4):
        raise ValueError(f"{who}held_out={held_out!r}: pass the share of a fold, above 0 and at most 0.4")
    levels = _levels(temperatures)
    held, loaders = read(data)
    n = held.size
    fold = max(LEAST_SCORED, int(held_out * n))
    if 2 * fold >= n:
        raise ValueError(f"{who}{n} data are too few for two folds of {fold}: pass more data")
    size = min(n, batch_size or loaders or batch_size_for(n))
    steps = steps or steps_for(n, size)
    epochs = steps * size / n
    device = batches.flatten(held.inputs)[0][0].device
    networks = members_of(make_model, members, seed, device)
    held, moved = held.of(networks.still.module)
    _require_targets(networks, held, likelihood)
    trained = training_likelihood(likelihood, held.targets)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed), device="cpu")
    pair = [order[:fold].sort().values, order[fold : 2 * fold].sort().values]
    for rows in pair:
        _require_scores(likelihood, held.take(rows)[1])
    folds = [pair[0] if i < members / 2 else pair[1] for i in range(members)]
    precision = 1.0 if searched or prior_precision is None else float(prior_precision)
    # what the bar foresees: pilot and modes, one prior that is tried, the levels twice
    foreseen = int((1.45 if searched else 1.3) * steps + len(levels) * 2 * max(20, 0.1 * steps))
    size = min(size, n - fold)
    chosen = {
        "members": members,
        "steps": steps,
        "batch_size": size,
        "prior_precision": precision,
        "held_out": held_out,
        "temperatures": levels,
        "seed": seed,
        **({"labels": "those of the next token"} if moved else {}),
    }
    about = {
        **chosen,
        "method": method,
        "searched": searched,
        "lr": lr,
        "capture": capture,
        "data": checksum((held.inputs, held.targets)),
        "starts": checksum(networks.params),
        "frozen": checksum(networks.frozen()),
        "network": described(networks.training.module),
        "likelihood": [likelihood.name, describe(trained)],
    }
    if mesh is not None:
        require_ranks(mesh, members, about)
    elif path is not None and world().size > 1:
        path = Path(path) / f"rank-{world().rank:05d}-of-{world().size:05d}"
    stages = Stages(path, about, device, mesh)
    bar = Progress(foreseen, progress and is_first(mesh))
    problem = Problem(
        held, trained, networks, members, size, precision, folds, seed, bar, mesh=mesh, captured=capture
    ).vmappable()
    try:
        found = stages.once("rate", lambda: rate(problem, lr, steps))
        plan = Plan(
            problem,
            found["lr"],
            steps,
            epochs,
            levels,
            stages,
            {**chosen, "method": method, "lr": found["lr"]},
            dict(found["passes"]),
            searched,
        )
        return METHODS[method](plan)
    finally:
        bar.close()


def _levels(temperatures: Any) -> list[float]:
    try:
        levels = [-1.0] if isinstance(temperatures, str) else [float(t) for t in temperatures]
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor without values
        levels = [-1.0]
    if any(not 0 < t < float("inf") for t in levels) or levels != sorted(set(levels)):
        raise ValueError(
            f"posterior_ensemble: temperatures={temperatures!r}: pass positive numbers, ascending, such as (0.3, 1.0)"
        )
    return levels


def _require_scores(likelihood: Likelihood, targets: Any) -> None:
    """Refuse a fold on which nothing could be scored."""
    weights = likelihood.weights(targets)
    if weights is not None and int((weights.reshape(len(weights), -1) > 0).any(1).sum()) < LEAST_SCORED:
        raise ValueError(
            f"posterior_ensemble: a held-out fold has fewer than {LEAST_SCORED} data whose targets count (weights above 0, "
            "classes that are not ignored): leave data without targets out, or pass a larger held_out="
        )


def _require_targets(networks: Any, held: Any, likelihood: Likelihood) -> None:
    """Raise for outputs and targets that do not belong together, before anything is trained."""
    inputs, _ = held.take(torch.arange(min(2, held.size), device="cpu"))
    params, buffers = ({k: x[0] for k, x in t.items()} for t in (networks.params, networks.buffers))
    kinds = {x.dtype for x in batches.flatten(inputs)[0] if x.is_floating_point()}
    own = {p.dtype for p in params.values() if p.is_floating_point()}
    try:
        with torch.no_grad():
            outputs = networks.still.with_buffers(params, (inputs, None), buffers)[0]
    except RuntimeError as err:
        if kinds and own.isdisjoint(kinds):
            raise TypeError(
                f"posterior_ensemble: inputs are {kinds.pop()} and the module's weights {own.pop()}: convert the inputs, or "
                "return module.double() from make_model"
            ) from err
        raise
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(
            f"posterior_ensemble: the module returns {type(outputs).__name__}: it must return a tensor, or something with "
            "logits"
        )
    if outputs.shape[:1] != (min(2, held.size),):
        raise ValueError(
            f"posterior_ensemble: the module returns {tuple(outputs.shape)} for {min(2, held.size)} data: outputs are [B, "
            "*event]"
        )
    likelihood.require(outputs[:1].expand(held.size, *outputs.shape[1:]), held.targets, wait=True)
