"""The networks of the members: made by a function, or by drawing one module's weights anew.

Frozen parameters are neither copied nor drawn: all members, and the module that was passed, share the same tensors, so that an
ensemble of adapters holds their base once. Drawn anew are those that are trained, by the
``reset_parameters`` of the layer that holds them (of a LoRA layer ``reset_lora_parameters``); a layer that has trained
parameters and no such method is refused, for starts that are equal are no ensemble.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bayesopt_chain import batches, checks
from bayesopt_chain._torch import is_wrapped
from bayesopt_chain.ensemble.data import Data, Scale
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.modules import (
    BatchNorm,
    Forward,
    Tensors,
    arguments_of,
    copied,
    in_mode,
    inner_of,
    make_functional,
    one_by_one,
    reset_adapters,
)
from bayesopt_chain.runs.run import describe

MAKER = checks.Kind(callable, "a torch.nn.Module, or a function (or class) without arguments that makes one")
COLLINEAR = 1e4  # times that inputs vary more along the first of their principal axes than along half of them
FORWARDS = 2**24  # numbers of inputs and parameters that one batched forward may hold
MOST_AXES = 512  # columns; to turn a weight [O, D] costs D / b of its product with a batch of b


class Members(NamedTuple):
    """Starts of all members, and the network as a function.

    Attributes:
        params, buffers: stacked, ``[M, *]``, by name.
        training: the network as it is trained, its dropout on and BatchNorm on the batch.
        still: the network in ``eval`` mode, a function of parameters and data alone.
        inputs: two data of zeros, which make lazy layers again.
        loop: whether ``vmap`` refuses the network, so that members run one after the other.
    """

    params: Tensors
    buffers: Tensors
    training: Forward
    still: Forward
    inputs: Any = None
    loop: bool = False

    def within(self, scale: Scale) -> Members:
        """The networks between these affine maps."""
        training, still = (
            make_functional(f.module, inputs=scale.into, outputs=scale.out).forward for f in (self.training, self.still)
        )
        return self._replace(training=training, still=still)

    @property
    def first(self) -> tuple[Tensors, Tensors]:
        """The parameters and buffers of one member at its start, by name."""
        return {n: x[0] for n, x in self.params.items()}, {n: x[0] for n, x in self.buffers.items()}

    def outputs(self, inputs: Any, forward: Forward | None = None) -> Any:
        """What one member returns at its start, in ``eval`` mode by default."""
        params, buffers = self.first
        return (forward or self.still).with_buffers(params, (inputs, None), buffers)[0]

    @torch.no_grad()
    def predict(self, params: Tensors, buffers: Tensors, inputs: Any) -> Tensor:
        """Outputs ``[S, n, *event]`` for stacked parameters and buffers ``[S, *]``, for as many data at once as fit."""
        leaves, spec = batches.flatten(inputs)
        size = next(iter(params.values())).shape[0]
        width = max(sum(x[0].numel() for x in leaves), sum(p.shape[1] if p.ndim > 1 else 1 for p in params.values()))
        at_once, parts = max(1, FORWARDS // max(1, size * width)), list[Tensor]()
        for some in map(spec.unflatten, zip(*(x.split(at_once) for x in leaves))):

            def one(p: Any, b: Any, some: Any = some) -> Tensor:
                return self.still.with_buffers(p, (some, None), b)[0]

            parts.append(mapped(one, self.loop, params, buffers))
        self.forget()
        return torch.cat(parts, 1)

    def forget(self) -> None:
        """Drop what the networks kept of their calls as attributes: tensors with a graph, or without memory, as under ``vmap``.
        Neither can be copied."""
        for layer in (*self.training.module.modules(), *self.still.module.modules()):
            own = {name: x for name, x in vars(layer).items() if isinstance(x, Tensor)}
            vars(layer).update({name: None for name, x in own.items() if is_wrapped(x) or x.grad_fn is not None})

    def require_start(self, written: Tensors) -> None:
        """Refuse starts that were written before and are others; drawn on other threads, or another processor, they may be
        rounded otherwise.

        Raises:
            ValueError: they are others.
        """
        if any((x - written[k]).norm() > 1e-3 * x.norm() for k, x in self.params.items()):
            raise ValueError(
                "posterior_ensemble: path holds another call: its networks start from other weights; give this one a directory "
                "of its own"
            )

    def products(self, inputs: Any) -> Products:
        """The products with parameters that one member makes of these inputs."""
        with torch.no_grad(), Products(self.first[0]) as found:
            self.outputs(inputs)
        return found


class Products(TorchDispatchMode):
    """Products of matrices and convolutions with parameters while it is on: a parameter is known by its memory, so that views
    of it are too, and copies are followed.

    Attributes:
        sizes: the most numbers that a product with it sums up, by name.
        left: the left factors of the products of matrices with it, by name.
    """

    def __init__(self, params: Tensors) -> None:
        super().__init__()
        # tensors are held beside their names, so that nothing else takes their memory
        self.known = {x.untyped_storage().data_ptr(): (name, x) for name, x in params.items()}
        self.sizes, self.left = dict[str, float](), dict[str, list[Tensor]]()

    def name_of(self, x: Any) -> str | None:
        """Of the parameter whose memory this is."""
        return self.known.get(x.untyped_storage().data_ptr(), (None,))[0] if isinstance(x, Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what the operation sums up, and do it."""
        kind, out = func._schema.name.removeprefix("aten::"), func(*args, **(kwargs or {}))
        size, factors = 1, list[Any]()
        if kind in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"):
            factors = args[1:3] if "add" in kind else args[:2]
            size = factors[0].shape[-1]
        elif kind == "convolution":
            (_, weight, _, strides, *_, transposed, _, groups), factors = args, args[1:2]
            size = weight[:, 0].numel() // groups // math.prod(strides) if transposed else weight[0].numel()
        elif kind in ("clone", "_to_copy") and (name := self.name_of(args[0])):
            self.known[out.untyped_storage().data_ptr()] = name, out
        for name in filter(None, map(self.name_of, factors)):
            self.sizes[name] = max(size, self.sizes.get(name, 1))
            self.left.setdefault(name, []).append(factors[0])
        return out


def described(members: Members, likelihood: Likelihood) -> dict[str, Any]:
    """Networks and likelihood as JSON that compares.

    Of every layer it has the class, what it shows, and, of one's own, its code. A variance of Gaussian noise does not count.
    """
    network = members.still.module
    layers = {
        name: [
            type(layer).__name__,
            layer.extra_repr(),
            None if type(layer).__module__.startswith("torch.nn") else describe(type(layer).forward),
        ]
        for name, layer in network.named_modules()
    }
    return {
        "parameters": {name: list(x.shape[1:]) for name, x in members.params.items()},
        "likelihood": [likelihood.name, None if likelihood.has_noise_scale else describe(likelihood)],
        "network": layers,
        "frozen": describe(frozen_of(network)),
    }


def members_of(
    make_model: nn.Module | Callable[[], nn.Module],
    members: int,
    seed: int,
    device: Any,
    inputs: Any = None,
) -> Members:
    """Make the members; torch's global generator is left as it was.

    Args:
        make_model: a function, or a module whose weights are drawn anew.
        members: how many.
        seed: of their weights.
        device: where they are to be; ``None`` for where ``make_model`` makes them.
        inputs: two data, which make the weights of lazy layers.

    Raises:
        TypeError: a function that returns no module.
        ValueError: starts that are equal, frozen parameters that differ, or complex parameters.
    """
    first = _made(make_model, 1000 * seed, inputs, device)
    if any(p.is_complex() for p in first.parameters()):
        raise ValueError(
            "posterior_ensemble: the module has complex parameters, which have no prior here: make it of real ones"
        )
    parts = [make_functional(first)[1:]]
    for i in range(1, members):
        network = _made(make_model, 1000 * seed + i, inputs, device)
        parts.append(make_functional(network)[1:])  # a base that make_model made again goes with its network
        if any(
            {n: x.shape for n, x in a.items()} != {n: x.shape for n, x in b.items()}
            for a, b in zip(parts[0], parts[-1])
        ):
            raise ValueError(
                f"posterior_ensemble: make_model returned other parameters or buffers for member {i} than for member 0"
            )
        own = frozen_of(network)
        if any(x is not own[n] and not torch.equal(x, own[n]) for n, x in frozen_of(first).items()):
            raise ValueError(
                "posterior_ensemble: the members' frozen parameters differ, but they share one network: load the same "
                "pretrained weights in every call of make_model"
            )
        if all(torch.equal(x, parts[-1][0][n]) for n, x in parts[0][0].items()):
            raise ValueError(
                "posterior_ensemble: member 0 and another start from the same weights: make_model must draw new ones "
                "(return a new module), or pass one module, whose weights are drawn anew"
            )
    training, still = copy_of(first).train(), copy_of(first).eval()
    for name, layer in first.named_modules():
        # the map of torch.nn.utils.parametrizations.orthogonal that rounds the diagonal of its weight to whole numbers
        if getattr(getattr(layer, "orthogonal_map", None), "name", "") == "householder":
            raise ValueError(
                f"posterior_ensemble: {name} (orthogonal, householder) rounds entries of its weight, so that no gradient "
                'holds them where a prior moves them: make it with orthogonal_map="cayley"'
            )
        if (
            isinstance(layer, BatchNorm)
            and layer.weight is not None
            and not (layer.training or layer.weight.requires_grad)
        ):
            training.get_submodule(name).eval()
    params, buffers = ({k: torch.stack([x[k] for x in trees]) for k in trees[0]} for trees in zip(*parts))
    return Members(
        params,
        buffers,
        make_functional(training).forward,
        make_functional(still).forward,
        batches.tree_map(torch.zeros_like, inputs),
    ).within(Scale())


def principal_axes(members: Members, data: Data, scale: Scale) -> Tensors:
    r"""Principal axes ``[D, D]`` of standardised inputs that are collinear, by the name of each weight ``[O, D]`` on them.

    Adam divides the gradient of each weight by its own size. Where inputs are collinear, as spectra, curves and windows of a
    sequence are, all columns of W have nearly the same gradient, and what differs between them is hardly learnt. With
    ``C = U diag(l) U^T`` of the inputs, steps of ``W U`` in the place of W go along each axis by itself. A Gaussian prior of
    one precision for all of W is the same for both. Weights are those of linear layers that see the inputs as they are.
    Inputs are collinear where the median of l is below 1e-4 of the largest. Weaker collinearity is left as it is: there the
    slow axes also hold back what would be fitted to few data, and as many tables were predicted worse as better without it.
    """
    first, layers = data.inputs_of(2), dict(members.still.module.named_modules())
    left = {
        name: factors
        for name, factors in members.products(first).left.items()
        if isinstance(layers[name.rpartition(".")[0]], nn.Linear)
    }
    found: Tensors = {}
    scaled = (batches.flatten(scale.into((x, None)))[0] for x in (first, data.inputs))
    seen = [(few, x) for few, x, moments in zip(*scaled, scale.inputs) if moments and x.ndim > 1]
    for few, x in seen:
        used, rows = few.flatten(0, -2), x.flatten(0, -2).double()
        names = [name for name, factors in left.items() if any(torch.equal(factor, used) for factor in factors)]
        if names and rows.shape[1] < min(len(rows), MOST_AXES):
            variances, axes = torch.linalg.eigh(rows.mT @ rows / len(rows))
            if variances[-1] > COLLINEAR * variances.median():
                found |= {name: axes.to(members.params[name]) for name in names}
    return found


def frozen_of(module: nn.Module) -> Tensors:
    """The parameters that all members share, by name."""
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


def copy_of(module: nn.Module) -> nn.Module:
    """A copy that shares the frozen parameters."""
    return copied(module, {id(p): p for p in frozen_of(module).values()})


@torch.random.fork_rng(devices=[])
def _made(make_model: Any, seed: int, inputs: Any, device: Any) -> nn.Module:
    """A network of these weights, on a device; frozen weights that it shares with a user's module stay where they are there."""
    torch.manual_seed(seed)
    anew = isinstance(make_model, nn.Module)
    network: Any = copy_of(make_model) if anew else make_model()
    if not isinstance(network, nn.Module):
        raise TypeError(f"posterior_ensemble: make_model returned {type(network).__name__}, not a torch.nn.Module")
    network = inner_of(network)
    if inputs is not None and any(isinstance(p, nn.UninitializedParameter) for p in network.parameters()):
        torch.manual_seed(seed)
        arguments, keywords = arguments_of(network, inputs)
        with torch.no_grad(), in_mode(network, training=False):  # so that no norm takes statistics
            network(*arguments, **keywords)
    if anew:
        _draw_anew(network)
    elsewhere = device and any(p.device != torch.device(device) for p in frozen_of(network).values())
    return (copied(network) if elsewhere else network).to(device)


def _draw_anew(module: nn.Module) -> None:
    done = set[int]()
    for name, layer in module.named_modules():
        if reset_adapters(layer):
            done |= {id(p) for n, p in layer.named_parameters() if "lora_" in n}
        every = [*layer.parameters(recurse=False)]
        if all(id(p) in done for p in every if p.requires_grad):
            continue
        reset: Any = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
        if not callable(reset) or not all(p.requires_grad for p in every):
            raise ValueError(
                f"posterior_ensemble: the weights of {name or 'the module'} ({type(layer).__name__}) cannot be drawn anew "
                "(no reset_parameters, or some of them are frozen): pass make_model=, a function that returns a new module"
            )
        reset()


def mapped(function: Callable, loop: bool, *stacked: Any) -> Any:
    """What a function makes of every member's part of stacked trees: under ``vmap``, or of one member after the other."""
    return one_by_one(function, *stacked) if loop else torch.vmap(function, randomness="error")(*stacked)
