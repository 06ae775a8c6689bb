"""Five posteriors of one network with BatchNorm and dropout, on scikit-learn's digits.

python examples/digits.py [epochs]    prints the table of docs/howto/digits.md
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc

torch.manual_seed(0)
images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
images, order = images.float().reshape(-1, 1, 8, 8) / 16, torch.randperm(len(labels))
N = 1000
train, test = ((images[rows], labels[rows]) for rows in (order[:N], order[N:]))
data = bc.epochs(train, 100, seed=0)
steps = int(sys.argv[1] if len(sys.argv) > 1 else 20) * len(data)


class Network(nn.Sequential):
    def __init__(self):
        first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        second = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        last = [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10)]
        super().__init__(*first, nn.MaxPool2d(2), *second, *last)


net = Network()
forward, start, buffers = bc.make_functional(net)
inits = bc.stack([bc.make_functional(Network()).params for _ in range(5)])


def loss(params, batch, buffers):
    logits, buffers = forward.with_buffers(params, batch, buffers)
    return cross_entropy(logits, batch[1]), buffers


# Deep ensemble and MultiSWAG: five trainings at once, their second half collected.
swag = bc.swag(rank=10, start=steps // 2, every=len(data))
tx = bc.chain(bc.sgd(0.05, 0.9, weight_decay=1 / N), swag)
chains = bc.parallel(bc.make_step(loss, tx, buffers=buffers), 5)
state = chains.init(tx, inits)
ensemble = bc.sample(chains, inits, state, data, steps=steps, burn_in=steps - 1)
members = list(zip(*map(bc.unstack, ensemble.last)))
gaussians = [swag.posterior(state.inner, params) for params, state in members]
swags = [draw for g in gaussians for draw in bc.unstack(g.sample((4,)))]

# Parallel SGHMC: that chain at a temperature, from the ensemble's ends. At this rate
# batches heat it beyond T = 0.1 / N: bc.suggest_lr finds one at which they do not.
tx = bc.sgd(0.05, 0.9, weight_decay=1 / N, temperature=0.1 / N)
chains = bc.parallel(bc.make_step(loss, tx, buffers=buffers), 5)
params, state = ensemble.last[0], chains.init(tx, ensemble.last[0])
options = {"steps": steps, "burn_in": steps // 2, "thinning": max(1, steps // 40)}
sghmc = bc.sample(chains, params, state, data, **options)

# IVON: a diagonal Gaussian, learned by training.
tx = bc.vi.ivon(0.1, temperature=0.1 / N, weight_decay=1 / N, init_hessian=0.1)
step = bc.make_step(loss, tx, buffers=buffers)
run = bc.sample(step, start, step.init(start), data, steps=steps, burn_in=steps - 1)
ivons = bc.unstack(tx.posterior(run.last[1].inner, run.last[0]).sample((20,)))

# Last-layer Laplace of one member. Draws without statistics get them from the data.
bc.write_back(net.eval(), members[0][0], members[0][1].buffers)
laplace = bc.fit_laplace(net, bc.likelihoods.categorical(), [train])
found = {"one network": net(test[0]).softmax(-1).detach()}
found["last-layer Laplace"] = laplace.predict([test])
runs = {"deep ensemble": ensemble, "parallel SGHMC": sghmc}
for name, draws in {"MultiSWAG": swags, "IVON": ivons}.items():
    runs[name] = bc.refresh_batch_norm(net, bc.Draws.from_trees(draws), data)
for name, draws in runs.items():
    found[name] = draws.predict(forward, [test], transform=lambda f: f.softmax(-1))
print("| | accuracy | NLL | calibration error |\n| --- | --- | --- | --- |")
for name, p in found.items():
    m = bc.posterior.classification_metrics(p.log(), test[1])
    print(f"| {name} | {m['accuracy']:.3f} | {m['nll']:.3f} | {m['ece']:.3f} |")
