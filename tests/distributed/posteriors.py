"""Gaussian posteriors of parameters that are spread over ranks: what every case of test_posteriors.py gives on this rank."""

import optree
import torch
import torch.distributed as dist
import torchopt
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bayesopt_chain as bc
from tests.distributed.layouts import layouts, leaves, local, parts, spread
from tests.distributed.ranks import Messages, mesh_of, message_of

STEPS = 4


def families():
    """Transformations that carry a diagonal Gaussian."""
    adam, decay = torchopt.adam(1e-2), {"weight_decay": 0.1}
    return {
        "mean field": bc.vi.mean_field(adam, temperature=0.1),
        "mean field, clipped": bc.vi.mean_field(bc.chain(torchopt.clip_grad_norm(0.3), bc.adam(1e-2)), temperature=0.1),
        "mean field, four draws": bc.vi.mean_field(adam, temperature=0.1, n_samples=4, antithetic=True, **decay),
        "ivon": bc.vi.ivon(0.1, temperature=0.1, betas=(0.9, 0.9), **decay),
        "ivon, two draws": bc.vi.ivon(0.1, temperature=0.1, betas=(0.9, 0.9), n_samples=2, **decay),
    }


def inferred(tx, params, seed=3):
    """Parameters, state and last draw after some steps on a loss whose gradient is elementwise."""
    torch.manual_seed(seed)
    state, draw = tx.init(params), None
    for _ in range(STEPS):
        draw = tx.sample(state, params)
        grads = {name: x.sin() + 0.3 * x for name, x in draw.params.items()}
        updates, state = tx.update(grads, state, params=params, draw=draw, inplace=False)
        params = {name: p + updates[name] for name, p in params.items()}
    return params, state, draw


def off(whole, mine, layout):
    """The largest difference between what this rank holds and its part of the whole."""
    pairs = zip(*(optree.tree_leaves(x) for x in (parts(whole, layout), local(mine))))
    return max([(a - b).abs().max().item() for a, b in pairs if a.numel()], default=0.0)


def compared():
    """By family and layout: differences of means and variances to one process, and the messages of draws and updates."""
    found = {}
    for name, tx in families().items():
        params, state, draw = inferred(tx, leaves(0))
        variance = tx.posterior(state, params).marginal_variance
        for way, layout in layouts().items():
            if way not in ("Shard(0), uneven and empty", "FSDP x TP") and name not in ("mean field", "ivon"):
                continue
            mine, here, drawn = inferred(tx, spread(leaves(0), layout), 3 + dist.get_rank())
            q = tx.posterior(here, mine)
            differ = off(params, mine, layout), off(variance, q.marginal_variance, layout)
            if draw.params["weight"].ndim == 2:
                differ += (off(draw.params, drawn.params, layout),)
            with CommDebugMode() as messages:
                again = tx.sample(here, mine)
                grads = {leaf: x.sin() for leaf, x in again.params.items()}
                tx.update(grads, here, params=mine, draw=again, inplace=False)
            whole = [x for x in optree.tree_leaves(here) if x.ndim > 1 and not isinstance(x, DTensor)]
            plain = {tuple(x.shape) for x in whole} & {(10, 6), (3, 7)}
            found[name, way] = max(differ), messages.get_total_counts(), plain
    return found


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(n=8):
    g = torch.Generator().manual_seed(5)
    return torch.randn(n, 3, generator=g).double(), torch.randint(2, (n,), generator=g)


def whole(tree):
    """DTensors gathered."""
    return optree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def curved():
    """Diagonal Laplace of a sharded model: its variances, log evidence and a draw, and those of one process."""
    likelihood, (x, y) = bc.likelihoods.categorical(), data()
    alone = network()
    params = {name: p.detach() for name, p in alone.named_parameters()}
    forward = lambda p, batch: torch.func.functional_call(alone, p, (batch[0],))  # noqa: E731
    increment = bc.curvature.ggn(forward, likelihood, "diagonal")(params, (x, y))
    tx = bc.laplace()
    _, state = tx.update(params, tx.init(params), curvature=increment, inplace=False)
    wanted = tx.posterior(state, params, prior_precision=2.0), tx.log_evidence(state, params, -3.0, prior_precision=2.0)
    found = {}
    for way in ("fsdp", "tp"):
        model = network()
        if way == "fsdp":
            mesh = mesh_of(4)
            fully_shard(model, mesh=mesh)
            batch = x[dist.get_rank() :: 4], y[dist.get_rank() :: 4]
        else:
            line, mesh, batch = mesh_of(4), None, (x, y)
            parallelize_module(model, line, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model(batch[0]).sum().backward()  # a gradient that stays
        before = [p.grad for p in model.parameters()]
        increment = bc.curvature.diagonal_by_backward(model, likelihood, mesh=mesh)(batch)
        assert all(p.grad is g for p, g in zip(model.parameters(), before))
        mine = {name: p.detach() for name, p in model.named_parameters()}
        state = tx.init(mine)
        _, state = tx.update(mine, state, curvature=increment, inplace=False)
        with CommDebugMode() as messages:
            tx.update(mine, state, curvature=increment, inplace=False)
        q = tx.posterior(state, mine, prior_precision=2.0)
        evidence = tx.log_evidence(state, mine, -3.0, prior_precision=2.0)
        off = optree.tree_map(lambda a, b: (a - b).abs().max(), whole(q.marginal_variance), wanted[0].marginal_variance)
        differ = max(x.item() for x in optree.tree_leaves(off)), (evidence - wanted[1]).abs().item()
        torch.manual_seed(7 + dist.get_rank())  # the first rank's key is all ranks'
        draws = whole(q.sample((2,)))
        density = q.log_prob({name: x.detach() for name, x in mine.items()})
        differ += ((density - wanted[0].log_prob(params)).abs().item(),)
        probed = bc.curvature.diagonal_by_backward(
            model,
            likelihood,
            probes=100,
            mesh=mesh,
            generator=torch.Generator().manual_seed(dist.get_rank() if way == "fsdp" else 0),
        )(batch)
        ratio = optree.tree_map(lambda a, b: (a / b - 1).abs().max(), whole(probed.values), whole(increment.values))
        count = increment.count.item(), probed.count.item()
        most = max(x.item() for x in optree.tree_leaves(ratio))
        found[way] = differ, messages.get_total_counts(), draws, most, count
    return found


def under(way, model, rank):
    """The model spread over four ranks; the mesh over which its data differ, and this rank's part of 5 data."""
    if way == "tp":
        parallelize_module(model, mesh_of(4), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return None, slice(None)
    mesh = mesh_of(4) if way == "fsdp" else mesh_of(2, 2)
    fully_shard(model, mesh=mesh)
    return mesh, slice((0, 2, 3, 4)[rank], (2, 3, 4, 5)[rank])  # other numbers of data on other ranks


def observed(tx, estimate, model, batches, move=0.0):
    """A filter over the parameters of a module, fed one batch after the other: means, state, and messages of the updates."""
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    state, sent = tx.init(params), 0
    for batch in batches:
        draw = {"draw": tx.predict(state, params)} if move else {}
        if move:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(draw["draw"].params[name])
        increment = estimate(batch)
        with CommDebugMode() as messages:
            updates, state = tx.update(params, state, params=params, curvature=increment, inplace=False, **draw)
        sent += messages.get_total_counts()
        params = {name: p + updates[name] for name, p in params.items()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(params[name])
    return params, state, sent


def filtered():
    """By filter and way: the largest difference of means, variances and evidence to one process, and an update's messages."""
    x, y = (tensor[:5] for tensor in data())
    likelihoods = {
        "categorical": (bc.likelihoods.categorical(), y),
        "gaussian": (bc.likelihoods.gaussian(0.5), torch.stack([x[:, 0].sin(), x[:, 1]], 1)),
        "bernoulli": (bc.likelihoods.bernoulli(), torch.stack([y, 1 - y], 1).double()),
    }
    found = {}
    for name, linearisation, move, ways in (
        ("categorical", "tangent", 0.0, ("fsdp", "tp")),
        ("categorical", "statistical", 0.0, ("hsdp",)),
        ("gaussian", "tangent", 0.9, ("fsdp", "hsdp", "tp")),
        ("gaussian", "empirical", 0.0, ("fsdp",)),
        ("bernoulli", "tangent", 0.0, ("tp",)),
    ):
        (likelihood, targets), options = likelihoods[name], {"linearisation": linearisation}
        motion = {"transition": move, "forgetting": 0.95} if move else {}
        tx = bc.ekf.diagonal(prior_precision=2.0, transition_noise=0.01, **motion)
        alone, batches = network(), [(x, targets), (x + 0.3, targets)][: 2 if move else 1]
        forward = lambda p, batch, alone=alone: torch.func.functional_call(alone, p, (batch[0],))  # noqa: E731
        one = bc.ekf.observe(forward, likelihood, **options)
        estimate = lambda batch, one=one, alone=alone: one(dict(alone.named_parameters()), batch)  # noqa: E731
        params, state, _ = observed(tx, estimate, alone, batches, move)
        wanted = [*params.values(), *tx.posterior(state, params).marginal_variance.values(), tx.log_evidence(state)]
        for way in ways:
            model = network()
            mesh, mine = under(way, model, dist.get_rank())
            estimate = bc.ekf.observe_by_backward(model, likelihood, mesh=mesh, **options)
            params, state, sent = observed(tx, estimate, model, [(a[mine], b[mine]) for a, b in batches], move)
            posterior = tx.posterior(state, params)
            got = [*params.values(), *posterior.marginal_variance.values(), tx.log_evidence(state)]
            off = [(a - b).abs().max().item() for a, b in zip(whole(got), wanted, strict=True)]
            found[name, linearisation, way] = max(off), sent / len(batches)
    return found


class Tower(nn.Module):
    """A convolution, an embedding's table beside it, norms, and two linear layers: what Kronecker factors describe."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.lift, self.norm = nn.Conv1d(1, 2, 2), nn.LayerNorm(4)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(self.norm(self.lift(x[:, None]).flatten(1)))))


def layered():
    """Laplace with Kronecker factors of a sharded model, by way: how far it is off one process, messages, and who owns what."""
    (x, y), likelihood, tx = (tensor[:5] for tensor in data()), bc.likelihoods.categorical(), bc.laplace()
    found = {}
    for way, build, wrapped in (("fsdp", network, ("0",)), ("fsdp", Tower, ("first", "lift")), ("hsdp", network, ())):
        alone, model = build(), build()
        known = {name: p.detach() for name, p in alone.named_parameters()}
        forward = lambda p, batch, alone=alone: torch.func.functional_call(alone, p, (batch[0],))  # noqa: E731
        increment = bc.curvature.ggn(forward, likelihood, "kronecker")(known, (x, y))
        _, there = tx.update(known, tx.init(known), curvature=increment.add(increment), inplace=False)
        wanted = tx.posterior(there, known, prior_precision=2.0)
        evidence = tx.log_evidence(there, known, -3.0, prior_precision=2.0)

        mesh, mine = (
            (mesh_of(4) if way == "fsdp" else mesh_of(2, 2)),
            (slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)),
        )
        for name in wrapped:
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        params = {name: p.detach() for name, p in model.named_parameters()}
        batch = x[mine[dist.get_rank()]], y[mine[dist.get_rank()]]
        estimate = bc.curvature.kronecker_by_backward(model, likelihood, mesh=mesh)
        with Messages() as messages:
            increment = estimate(batch)
        asked = dict(messages.counts)
        assert all(p.grad is None for p in model.parameters())
        state = tx.init(params)
        for _ in range(2):
            with Messages() as messages:
                _, state = tx.update(params, state, curvature=increment, inplace=False)
        asked["update"] = dict(messages.counts)
        posterior = tx.posterior(state, params, prior_precision=2.0)
        moved = {name: p + 0.1 for name, p in params.items()}
        noise = {name: torch.randn(3, *p.shape, dtype=p.dtype) for name, p in known.items()}
        dist.broadcast_object_list(box := [noise])
        spread_noise = {
            name: DTensor.from_local(z, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
                mesh, [Shard(q.dim + 1) if isinstance(q, Shard) else q for q in params[name].placements]
            )
            for name, z in box[0].items()
        }
        with Messages() as messages:
            solved = posterior.precision.solve(spread_noise)
        asked["solve"] = dict(messages.counts)
        # a draw is R z with R R^T the covariance: of all unit vectors z, whatever signs the eigenvectors have
        sizes = [p.numel() for p in known.values()]
        units = torch.eye(sum(sizes)).double().split(sizes, 1)
        drawn = posterior.precision.sqrt_solve(
            {
                name: DTensor.from_local(u.reshape(-1, *p.shape), mesh, [Replicate()] * mesh.ndim).redistribute(
                    mesh, [Shard(q.dim + 1) if isinstance(q, Shard) else q for q in p.placements]
                )
                for (name, p), u in zip(params.items(), units)
            }
        )
        root = torch.cat([whole(drawn)[name].flatten(1) for name in sorted(params)], 1)
        pairs = {
            "variances": (posterior.marginal_variance, wanted.marginal_variance),
            "solve": (solved, wanted.precision.solve(box[0])),
            "draws": (root.mT @ root, torch.linalg.inv(wanted.precision.to_dense())),
            "evidence": (tx.log_evidence(state, params, -3.0, prior_precision=2.0), evidence),
            "density": (posterior.log_prob(moved), wanted.log_prob({k: p + 0.1 for k, p in known.items()})),
            "diagonal": (increment.diag(), bc.curvature.ggn(forward, likelihood, "kronecker")(known, (x, y)).diag()),
            "next task": (
                tx.posterior(state, params, prior=posterior).marginal_variance,
                tx.posterior(there, known, prior=wanted).marginal_variance,
            ),
            "tempered": (
                tx.posterior(state, params, prior_precision=2.0, temperature=0.1).marginal_variance,
                tx.posterior(there, known, prior_precision=2.0, temperature=0.1).marginal_variance,
            ),
        }
        off = {
            question: max((a - b).abs().max().item() for a, b in zip(*map(optree.tree_leaves, (whole(got), want))))
            for question, (got, want) in pairs.items()
        }
        draw = whole(posterior.sample((2,)))
        found[way, build.__name__] = off, asked, sorted(increment.mine.like), sorted(known), draw
    return found


def unlayered():
    """What is said of sharded models that Kronecker factors by layers cannot describe; the fault is on one rank in some."""
    (x, y), likelihood, said = data(), bc.likelihoods.categorical(), {}
    mesh, rank = mesh_of(4), dist.get_rank()
    batch = x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]

    def sharded(model):
        fully_shard(model, mesh=mesh)
        return bc.curvature.kronecker_by_backward(model, likelihood, mesh=mesh)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.shape = network(), nn.Parameter(torch.ones(3, 3).double())

        def forward(self, x):
            return self.net(x @ torch.linalg.matrix_exp(self.shape))

    estimate = sharded(network())
    labels = torch.where(torch.arange(2) < (rank == 3), -100, batch[1])
    said["weights"] = message_of(estimate, (batch[0], labels))
    said["one rank"] = message_of(estimate, (batch[0], batch[1].double()[:1] if rank == 1 else batch[1]))
    said["untapped"] = message_of(sharded(Scaled()), batch)
    said["plain"] = message_of(lambda: bc.curvature.kronecker_by_backward(network(), likelihood, mesh=mesh))
    parallel = network()
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    said["tensor parallel"] = message_of(bc.curvature.kronecker_by_backward(parallel, likelihood), (x, y))
    return said


def begun(model):
    """A filter that starts from a Laplace posterior of a model, and one update of it; its parts, and what it moved to."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    laplace, values = bc.laplace(), {name: 1.0 + p.square() for name, p in params.items()}
    curvature = bc.precision.Diagonal(values, torch.tensor(4.0))
    _, state = laplace.update(params, laplace.init(params), curvature=curvature, inplace=False)
    tx = bc.ekf.diagonal(prior=laplace.posterior(state, params, prior_precision=0.5), transition_noise=values)
    rows = bc.precision.Root({k: torch.stack([p, 2 * p.cos()]) for k, p in params.items()}, torch.tensor(2.0))
    moves, state = tx.update(params, tx.init(params), params=params, curvature=rows, inplace=False)
    out = optree.tree_leaves(whole((moves, tx.posterior(state, params).marginal_variance)))
    return params, values, tx, state, torch.cat([x.flatten() for x in out])


def priors():
    """The difference of a filter that starts from a sharded posterior to one process; and what refusals say."""
    *_, alone = begun(network())
    model = network()
    under("fsdp", model, dist.get_rank())
    params, values, tx, state, found = begun(model)
    wrong, plain = (
        {name: x.clone() for name, x in values.items()},
        {k: torch.ones(p.shape) for k, p in params.items()},
    )
    if dist.get_rank() == 2:
        wrong["0.weight"].to_local().neg_()

    def fed(curvature):
        tx.update(params, state, params=params, curvature=curvature, inplace=False)

    one = torch.tensor(1.0)
    said = {
        "negative": message_of(bc.ekf.diagonal(prior_precision=wrong).init, params),
        "plain prior": message_of(bc.ekf.diagonal(prior_precision=plain).init, params),
        "plain rows": message_of(fed, bc.precision.Root({k: x[None] for k, x in plain.items()}, one)),
        "no rows": message_of(fed, bc.precision.Diagonal(values, one)),
        "smooth": message_of(tx.smooth, [(params, state)]),
    }
    return (found - alone).abs().max().item(), said


def last_layer():
    """The head's variances from the features of a sharded model, and from those of one process, as the page has it."""
    x, y = data()
    found = []
    for sharded in (False, True):
        model, mine = network().eval(), slice(None)
        if sharded:
            fully_shard(model, mesh=mesh_of(4))
            mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        features = []
        handle = model[-1].register_forward_hook(lambda module, args, out, features=features: features.append(args[0]))
        with torch.no_grad():
            model(x[mine])
        handle.remove()
        every = [[(features[0], y[mine])]] * (4 if sharded else 1)
        if sharded:
            dist.all_gather_object(every, [(features[0], y[mine])])
        head = nn.Linear(4, 2).double().eval()
        head.load_state_dict(whole(dict(model[-1].state_dict())))
        batches = [batch for rank in every for batch in rank]
        fitted = bc.fit_laplace(head, bc.likelihoods.categorical(), batches, tune=None)
        found.append(optree.tree_leaves(fitted.posterior.marginal_variance))
    return [(a - b).abs().max().item() for a, b in zip(*found)]


def refused():
    """What is said where whole leaves are needed."""
    params = spread(leaves(0), layouts()["HSDP"])
    said = {}
    for name, tx in {
        "vi.dense": bc.vi.dense(bc.sgd(0.1), temperature=0.1),
        "vi.low_rank": bc.vi.low_rank(bc.sgd(0.1), temperature=0.1, rank=2),
        "vi.kronecker": bc.vi.kronecker(bc.sgd(0.1), temperature=0.1),
        "vi.von": bc.vi.von(0.1, temperature=0.1),
        "vi.vogn": bc.vi.vogn(0.1, temperature=0.1),
        "ekf.dense": bc.ekf.dense(lr=1.0, prior_precision=1.0),
        "ekf.low_rank": bc.ekf.low_rank(lr=1.0, rank=2),
        "swag": bc.swag(rank=2),
    }.items():
        try:
            tx.init(params)
        except ValueError as err:
            said[name] = str(err)
    tx = bc.laplace()
    state = tx.init(params)
    rows = bc.precision.Root(leaves(0), torch.tensor(1.0, dtype=torch.float64))
    plain = bc.precision.Diagonal(leaves(0), torch.tensor(1.0, dtype=torch.float64))
    for name, increment in {"laplace, rows": rows, "laplace, plain": plain}.items():
        try:
            tx.update(params, state, curvature=increment, inplace=False)
        except ValueError as err:
            said[name] = str(err)
    return said


def regression():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=g).double()
    return x, x @ torch.randn(6, 4, generator=g).double() + torch.randn(64, 4, generator=g).double()


def line(sharded, steps=280, kept=200):
    """IVON on a regression: the last mean and variances on this rank, and their averages over the last steps."""
    (x, y), model, mine = regression(), nn.Linear(6, 4, bias=False).double(), slice(None)
    nn.init.zeros_(model.weight)
    if sharded:
        fully_shard(model, mesh=mesh_of(4))
        mine = slice(dist.get_rank(), None, 4)
    optimizer = bc.optim.IVON(
        model.named_parameters(),
        0.05,
        temperature=1 / 64,
        betas=(0.9, 0.99),
        weight_decay=1 / 64,
        generator=bc.distributed.generator(0),
    )
    means, variances = [], []
    for step in range(steps):
        optimizer.zero_grad()
        with optimizer.sampled():
            ((model(x[mine]) - y[mine]) ** 2).sum(1).mean().mul(0.5).backward()
        optimizer.step()
        if step >= steps - kept:
            held = local({"mean": model.weight.detach(), **optimizer.variances()})
            means.append(held["mean"].clone())
            variances.append(held["weight"].clone())
    averages = [torch.stack(kept).mean(0) for kept in (means, variances)]
    return means[-1], variances[-1], *averages
