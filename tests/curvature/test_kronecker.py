"""Kronecker factors of layers beyond the plain ones: exact where K-FAC is exact, else against independent formulas.

A single datum that uses a weight at one position has the exact block ``x x^T (x) sum_k g_k g_k^T``; a linear network's shared
weights are exact under "expand" where every position has outputs of its own, under "reduce" where they are summed
(Eschenhagen et al., 2023). Under weights padding leaves nothing behind, a datum of weight 2 is two data, one of weight 0 none.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.posterior.gaussian import Gaussian
from tests.curvature.conftest import of_module
from tests.nets import Net

GAUSSIAN = likelihoods.gaussian(0.5)


def assert_same(mine, theirs, names):
    """The factors of parameters, by their two names."""
    for a, b in names.items():
        for side in ("left", "right"):
            torch.testing.assert_close(getattr(mine, side)[a], getattr(theirs, side)[b])


def per_datum(kfac, name):
    """The block of one parameter."""
    left, right = kfac.left[name], kfac.right[name]
    return torch.kron(left, right) / kfac.count


def factors(module, x, sharing="expand", **params):
    """The factors of each parameter, for flattened outputs and Gaussian noise."""
    forward, own = of_module(module)
    batch = (x, None)
    flat = lambda p, b: forward(p, b).flatten(1)  # noqa: E731
    return curvature.ggn(flat, GAUSSIAN, "kronecker", sharing=sharing)({**own, **params}, batch)


def block(module, x, name):
    """The exact block of one parameter."""
    forward, own = of_module(module)
    flat = lambda p, b: forward({**own, **p}, b).flatten(1)  # noqa: E731
    return curvature.ggn(flat, GAUSSIAN, "dense")({name: own[name]}, (x, None)).to_dense()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_factor_of_many_outputs_is_the_diagonal_of_the_whole_one(sharing, bias):
    """The hidden layer has five outputs at each of six positions."""
    module, x = nn.Sequential(nn.Linear(3, 5, bias), nn.Tanh(), nn.Linear(5, 2)), torch.randn(4, 6, 3)
    forward, own = of_module(module)
    pooled = lambda p, b: forward(p, b).sum(1)  # noqa: E731
    whole, wide = (
        curvature.ggn(pooled, GAUSSIAN, "kronecker", sharing=sharing, **limit)(own, (x, None))
        for limit in ({}, {"diagonal_above": 3})
    )
    for name in ("0.weight", "0.bias")[: 1 + bias]:
        torch.testing.assert_close(wide.left[name], whole.left[name].diagonal())
        torch.testing.assert_close(wide.right[name], whole.right[name])


CONVOLUTIONS = {
    "transposed": lambda: nn.ConvTranspose2d(3, 2, (2, 3), stride=2, dilation=2, bias=False),
    "transposed, padded": lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1, bias=False),
}


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_a_transposed_convolution_of_one_position_is_exact(layer):
    """To 1e-12: one datum, one pixel of input."""
    module, x = CONVOLUTIONS[layer](), torch.randn(1, 3, 1, 1)
    torch.testing.assert_close(per_datum(factors(module, x), "weight"), block(module, x, "weight"))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_the_factors_of_a_transposed_convolution_are_those_of_a_linear_layer_before_a_fold(layer, sharing):
    """With the gradients of torch's own unfold, which stands in for the transpose of the fold."""
    module, x = CONVOLUTIONS[layer](), torch.randn(4, 3, 2, 3)
    kfac, y = factors(module, x, sharing), module(x)
    g = torch.eye(y[0].numel()).reshape(-1, *y.shape[1:]) / 0.5**0.5
    columns = F.unfold(g, module.kernel_size, module.dilation, module.padding, module.stride).mT
    inputs = x.flatten(2).mT
    if sharing == "reduce":
        columns, inputs = columns.sum(1, keepdim=True), inputs.mean(1, keepdim=True)
    torch.testing.assert_close(kfac.left["weight"], torch.einsum("bti,btj->ij", inputs, inputs) / inputs.shape[1])
    torch.testing.assert_close(kfac.right["weight"], 4 * torch.einsum("kto,ktp->op", columns, columns))


GROUPED = {
    "convolution": lambda: nn.Conv1d(4, 6, 2, groups=2, bias=False),
    "depthwise": lambda: nn.Conv1d(4, 4, 2, groups=4, bias=False),
    "transposed": lambda: nn.ConvTranspose1d(4, 6, 2, stride=2, groups=2, bias=False),
}


def of_a_group(module, j):
    """One group's own convolution, and its channels of the input."""
    one = type(module)(
        module.in_channels // module.groups,
        module.out_channels // module.groups,
        module.kernel_size,
        module.stride,
        bias=False,
    )
    one.weight.data = module.weight.data.chunk(module.groups)[j]
    return one


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("layer", GROUPED)
def test_grouped_convolutions_have_a_block_a_group_on_one_side_and_the_groups_together_on_the_other(layer, sharing):
    module, x = GROUPED[layer](), torch.randn(3, 4, 5)
    kfac, groups = factors(module, x, sharing), module.groups
    each = [factors(of_a_group(module, j), part, sharing) for j, part in enumerate(x.chunk(groups, 1))]
    left, right = ([getattr(k, side)["weight"] for k in each] for side in ("left", "right"))
    split, together = torch.block_diag(*left), torch.stack(right).sum(0)
    if layer == "transposed":
        split = split / groups
    else:
        together = together / groups
    torch.testing.assert_close(kfac.left["weight"], split)
    torch.testing.assert_close(kfac.right["weight"], together)


@pytest.mark.parametrize("layer", ["convolution", "depthwise"])
def test_a_grouped_convolution_whose_groups_see_the_same_is_exact_within_groups(layer):
    """One datum, one position, equal inputs: the blocks of the groups, to rounding."""
    module = GROUPED[layer]()
    width = module.in_channels // module.groups
    x = torch.randn(1, width, 2).repeat(1, module.groups, 1)
    entries = module.weight.numel() // module.groups
    within = torch.block_diag(*[torch.ones(entries, entries)] * module.groups)
    torch.testing.assert_close(per_datum(factors(module, x), "weight"), block(module, x, "weight") * within)


def linear(weight, bias):
    """The layer of these."""
    layer = nn.Linear(*weight.mT.shape)
    layer.weight.data, layer.bias.data = weight.data, bias.data
    return layer


def projected(net, x):
    """Attention of one head out of three linear layers."""
    q, k, v = (part(some) for part, some in zip(net.parts, (x[:, :2], x, x.flip(1))))
    return net.out((q @ k.mT / 2).softmax(-1) @ v)


def test_attention_has_the_factors_of_its_linear_layers():
    """Three projections in one weight: a block each on the output side, on the input side all the 2, 3 and 3 tokens."""
    attention, x = nn.MultiheadAttention(4, 1, batch_first=True), torch.randn(5, 3, 4)
    fused = Net(lambda net, x: net.attention(x[:, :2], x, x.flip(1))[0], attention=attention)
    parts = map(linear, attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3))
    out = linear(attention.out_proj.weight, attention.out_proj.bias)
    got, want = factors(fused, x), factors(Net(projected, parts=nn.ModuleList(parts), out=out), x)
    blocks = [want.left[f"parts.{i}.weight"] for i in range(3)]
    seen = [want.right[f"parts.{i}.weight"] for i in range(3)]
    torch.testing.assert_close(got.left["attention.in_proj_weight"], torch.block_diag(*blocks))
    mixed = (2 * seen[0] + 3 * seen[1] + 3 * seen[2]) / 8
    torch.testing.assert_close(got.right["attention.in_proj_weight"], mixed)
    assert_same(got, want, {"attention.out_proj.weight": "out.weight"})
    exact = block(fused, x, "attention.in_proj_bias")
    torch.testing.assert_close(per_datum(got, "attention.in_proj_bias"), exact)


def stacked(net, x):
    q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in net.qkv(x).chunk(3, -1))
    return net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_self_attention_is_one_linear_layer_of_queries_keys_and_values(sharing):
    attention, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(5, 3, 4)
    fused = Net(lambda net, x: net.attention(x, x, x, need_weights=False)[0], attention=attention)
    qkv = linear(attention.in_proj_weight, attention.in_proj_bias)
    out = linear(attention.out_proj.weight, attention.out_proj.bias)
    got, want = factors(fused, x, sharing), factors(Net(stacked, qkv=qkv, out=out), x, sharing)
    names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias"}
    names |= {"out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}
    assert_same(got, want, {f"attention.{mine}": theirs for mine, theirs in names.items()})


def twice(summed):
    """One linear layer on two halves of the input, its outputs summed or side by side."""

    def both(net, x):
        outputs = net.layer(x[:, 0]), net.layer(x[:, 1])
        return outputs[0] + outputs[1] if summed else torch.stack(outputs, 1)

    return Net(both, layer=nn.Linear(3, 2))


@pytest.mark.parametrize("summed, sharing", [(False, "expand"), (True, "reduce")])
def test_a_linear_layer_used_twice_is_exact_where_shared_weights_are(summed, sharing):
    module, x = twice(summed), torch.randn(1, 2, 3)
    kfac = factors(module, x, sharing)
    for name in ("layer.weight", "layer.bias"):
        torch.testing.assert_close(per_datum(kfac, name), block(module, x, name))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_two_uses_are_two_positions_of_one(sharing):
    module, x = twice(False), torch.randn(6, 2, 3)
    got, want = factors(module, x, sharing), factors(module.layer, x, sharing)
    assert_same(got, want, {"layer.weight": "weight"})


def test_vectors_and_numbers_have_their_exact_blocks_however_they_are_used():
    """In places where no layer has them."""
    own = {
        "scale": nn.Parameter(torch.rand(3) + 0.5),
        "power": nn.Parameter(torch.tensor(0.7)),
        "head": nn.Linear(3, 2),
    }
    module = Net(lambda net, x: net.head(torch.tanh(x * net.scale.exp()).abs() ** net.power.sigmoid()), **own)
    x = torch.randn(6, 3)
    kfac = factors(module, x)
    for name in ("scale", "power", "head.bias"):
        torch.testing.assert_close(per_datum(kfac, name), block(module, x, name))


def language(net, tokens):
    return F.linear(net.norm(net.rnn(net.table(tokens))[0]), net.table.weight)


def test_what_has_no_kronecker_factors_is_named_all_at_once_with_what_to_do():
    """An embedding that is the head as well: its two uses have their factors the other way round."""
    layers = {"table": nn.Embedding(5, 3), "norm": nn.LayerNorm(3), "rnn": nn.GRU(3, 3, batch_first=True)}
    with pytest.raises(ValueError) as refusal:
        factors(Net(language, **layers), torch.randint(0, 5, (4, 3)))
    message = str(refusal.value)
    assert "cannot describe 3 of 7 parameters" in message and "'diagonal'" in message
    assert "table.weight: its weights are tied: it is used in two ways" in message
    assert "rnn.weight_ih_l0: it is used by gru" in message and "rnn.weight_hh_l0" in message


LAYERS = {
    **{f"grouped {name}": make for name, make in GROUPED.items()},
    "transposed": lambda: nn.ConvTranspose1d(4, 2, 2, bias=False),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_ekfac_and_predictions_of_these_layers_are_those_of_the_dense_block(layer):
    """The values of EKFAC are the diagonal of the exact block in the factors' basis; predictions are J Lambda^-1 J^T."""
    module, x = LAYERS[layer](), torch.randn(6, 4, 5)
    forward, params = of_module(module)
    flat = lambda p, b: forward(p, b).flatten(1)[:, :4]  # noqa: E731
    batch = (x, torch.zeros(6, 4))
    kfac = curvature.ggn(flat, GAUSSIAN, "kronecker")(params, batch)
    ekfac = curvature.ggn(flat, GAUSSIAN, "kronecker", basis=kfac)(params, batch)
    exact = curvature.ggn(flat, GAUSSIAN, "dense")(params, batch).to_dense()
    basis = torch.kron(ekfac.left["weight"].contiguous(), ekfac.right["weight"].contiguous())
    torch.testing.assert_close(ekfac.values["weight"].reshape(-1), (basis.T @ exact @ basis).diagonal())
    posterior = Gaussian(params, ekfac.add_diagonal(0.5))
    _, covariance = bc.posterior.linearized(flat, posterior, batch)
    weight = params["weight"].clone().requires_grad_()
    outputs = flat({"weight": weight}, batch)
    rows = torch.stack([torch.autograd.grad(f, weight, retain_graph=True)[0].flatten() for f in outputs.flatten()])
    dense = rows @ torch.linalg.solve(posterior.precision.to_dense(), rows.T)
    for n in range(6):
        torch.testing.assert_close(covariance[n], dense[4 * n : 4 * n + 4, 4 * n : 4 * n + 4])


def folded(net, x):
    """A layer that sees the positions of a datum as further data, and one that sees one position."""
    return net.outer(torch.tanh(net.inner(x.reshape(-1, 3))).reshape(len(x), -1))


def test_a_weight_and_its_bias_share_one_factor_only_where_a_datum_has_one_position():
    module, x = Net(folded, inner=nn.Linear(3, 2), outer=nn.Linear(8, 2)), torch.randn(5, 4, 3)
    kfac = factors(module, x)
    assert kfac.left["outer.bias"] is kfac.left["outer.weight"]
    both = kfac.add(factors(module, x))
    assert both.left["outer.bias"] is both.left["outer.weight"]
    for name in ("inner.bias", "outer.bias"):
        torch.testing.assert_close(per_datum(kfac, name), block(module, x, name))
        torch.testing.assert_close(per_datum(both, name), 2 * block(module, x, name))
    basis = both.eigenbasis()
    assert basis.left["outer.bias"] is basis.left["outer.weight"]
    torch.testing.assert_close(basis.to_dense(), both.to_dense())


def causal(net, ids):
    """One layer of causal attention between an embedding and a head."""
    h = net.table(ids)
    scores = net.query(h) @ h.mT
    future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
    return net.head(h + torch.tanh(scores.masked_fill(future, -torch.inf).softmax(-1) @ net.value(h)))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("estimator", ["ggn", "empirical_fisher"])
def test_padded_sequences_have_the_factors_of_each_sequence_alone(sharing, estimator):
    """Lengths 3, 5 and 7, the first two tokens of each a prompt whose labels are ignored, padded to 9."""
    layers = {
        "table": nn.Embedding(11, 6),
        "head": nn.Linear(6, 11),
        "query": nn.Linear(6, 6),
        "value": nn.Linear(6, 6),
    }
    forward, params, _ = bc.make_functional(Net(causal, **layers).eval())
    estimate = getattr(curvature, estimator)(forward, likelihoods.categorical(), "kronecker", sharing=sharing)
    ids, labels = torch.randint(0, 11, (3, 9)), torch.full((3, 9), -100)
    alone = None
    for n, length in enumerate((3, 5, 7)):
        labels[n, 2:length] = torch.randint(0, 11, (length - 2,))
        one = estimate(params, (ids[n : n + 1, :length], labels[n : n + 1, :length]))
        alone = one if alone is None else alone.add(one)
    padded = estimate(params, (ids, labels))
    assert padded.count == 3
    for side in ("left", "right"):
        torch.testing.assert_close(getattr(padded, side), getattr(alone, side), rtol=1e-10, atol=1e-12)
    # a prompt is seen by later tokens, and counts in the layers below
    seen = torch.bincount(ids[0, :3], minlength=11) / 3
    only = estimate(params, (ids[:1], labels[:1]))
    torch.testing.assert_close(only.left["table.weight"], seen if sharing == "expand" else seen**2)
    labels[1] = 3  # has every label, in a chunk of its own too
    chunked = getattr(curvature, estimator)(
        forward, likelihoods.categorical(), "kronecker", sharing=sharing, chunk_bytes=1
    )
    torch.testing.assert_close(chunked(params, (ids, labels)).to_dense(), estimate(params, (ids, labels)).to_dense())
    labels[0] = -100  # a datum without labels is one of three all the same, and says nothing
    without, rest = estimate(params, (ids, labels)), estimate(params, (ids[1:], labels[1:]))
    assert without.count == 3 and without.data == rest.count == 2
    torch.testing.assert_close(without.to_dense(), rest.to_dense())


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)),
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
    ],
    ids=["linear", "grouped convolution"],
)
def test_a_datum_of_weight_two_is_two_data_and_an_ignored_one_none(module):
    forward, params, _ = bc.make_functional(module.double().eval())
    x, y, weights = torch.randn(4, 8), torch.tensor([0, 1, 2, 1]), torch.tensor([2.0, 1.0, 0.0, 1.0])
    weighted = curvature.ggn(forward, likelihoods.weighted(likelihoods.categorical()), "kronecker")
    plain = curvature.ggn(forward, likelihoods.categorical(), "kronecker")
    rows = [0, 0, 1, 3]
    wanted = plain(params, (x[rows], y[rows]))
    got = weighted(params, (x, (y, weights)))
    torch.testing.assert_close(got.to_dense(), wanted.to_dense(), rtol=1e-10, atol=1e-12)
    ignored = plain(params, (x, torch.where(weights > 0, y, -100)))
    torch.testing.assert_close(ignored.to_dense(), plain(params, (x[[0, 1, 3]], y[[0, 1, 3]])).to_dense())
    nothing = plain(params, (x, torch.full_like(y, -100)))
    torch.testing.assert_close(wanted.add(nothing).to_dense(), wanted.to_dense())
