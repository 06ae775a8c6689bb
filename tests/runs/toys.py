"""One chain on a quadratic loss: the run that others interrupt, cut off, damage and go on with."""

import torch

import bayesopt_chain as bc

TX = bc.sghmc(0.1, temperature=0.05)


def loss(params, batch):
    return (params["w"] ** 2).sum()


def started(fn=loss, size=3, batches=None):
    torch.manual_seed(0)
    params = {"w": torch.ones(size)}
    return bc.make_step(fn, TX), params, TX.init(params), batches


def sampled(path=None, steps=6, seconds=0.0, fn=loss, size=3, batches=None, **more):
    return bc.sample(*started(fn, size, batches), steps=steps, path=path, checkpoint_seconds=seconds, **more)
