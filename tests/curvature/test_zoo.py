"""Every layer of torch.nn: its curvature is that of explicit Jacobians, or it is refused by name.

The oracle runs every datum alone and takes its Jacobian output by output, by plain backward passes.
"""

import inspect

import pytest
import torch
from torch import nn
from torch.func import functional_call

from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.precision import flatten
from tests.nets import Net

B = 3
TRANSFORMER = {"dim_feedforward": 3, "batch_first": True}


def over(layer):
    """A layer of indices."""
    return Net(lambda net, x: net.layer(x), layer=layer)


def on(layer, *shape, call=lambda layer, x: layer(x)):
    """A linear map of the last axis of random inputs `[B, *shape]`, then the layer: curvature above and below it.

    A lazy layer sees a batch first.
    """
    x = torch.randn(B, *shape)
    with torch.no_grad():
        call(layer, x)
    front = nn.Linear(shape[-1], shape[-1])
    return Net(lambda net, x: call(net.layer, net.front(x)), front=front, layer=layer).eval(), x


def unpool(pool, unpool_layer, *shape):
    return on(unpool_layer, *shape, call=lambda layer, x: layer(*pool(x)))


def decode(layer, x):
    return layer(x, torch.ones(x.shape[0], 3, 4, dtype=x.dtype))


ELEMENTWISE = [
    *("CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Mish"),
    *("ReLU", "ReLU6", "RReLU", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink"),
    *("Dropout", "AlphaDropout", "FeatureAlphaDropout"),
]
RIGHT = {
    "Linear": lambda: on(nn.Linear(2, 3), 2),
    "LazyLinear": lambda: on(nn.LazyLinear(3), 2),
    "Bilinear": lambda: on(nn.Bilinear(2, 2, 3), 2, call=lambda layer, x: layer(x, x.flip(-1))),
    "Identity": lambda: on(nn.Identity(), 3),
    "Conv1d": lambda: on(nn.Conv1d(2, 3, 2, stride=2), 2, 5),
    "Conv2d": lambda: on(nn.Conv2d(2, 2, 2, padding=1, dilation=2), 2, 3, 2),
    "Conv3d": lambda: on(nn.Conv3d(1, 2, 2), 1, 3, 2, 3),
    "LazyConv1d": lambda: on(nn.LazyConv1d(3, 2), 2, 3),
    "LazyConv2d": lambda: on(nn.LazyConv2d(2, 2), 2, 3, 2),
    "LazyConv3d": lambda: on(nn.LazyConv3d(2, 2), 1, 2, 2, 3),
    "ConvTranspose1d": lambda: on(nn.ConvTranspose1d(2, 3, 2), 2, 3),
    "ConvTranspose2d": lambda: on(nn.ConvTranspose2d(2, 2, 2, stride=2), 2, 2, 2),
    "ConvTranspose3d": lambda: on(nn.ConvTranspose3d(1, 2, 2), 1, 1, 2, 2),
    "LazyConvTranspose1d": lambda: on(nn.LazyConvTranspose1d(2, 2), 2, 3),
    "LazyConvTranspose2d": lambda: on(nn.LazyConvTranspose2d(2, 2), 2, 2, 2),
    "LazyConvTranspose3d": lambda: on(nn.LazyConvTranspose3d(2, 2), 1, 1, 2, 2),
    "Unfold": lambda: on(nn.Unfold(2), 1, 3, 3),
    "Fold": lambda: on(nn.Fold((3, 3), 2), 4, 4),
    "MaxPool1d": lambda: on(nn.MaxPool1d(2), 2, 4),
    "MaxPool2d": lambda: on(nn.MaxPool2d(2), 2, 4, 2),
    "MaxPool3d": lambda: on(nn.MaxPool3d(2), 2, 2, 4, 2),
    "MaxUnpool1d": lambda: unpool(nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2), 2, 4),
    "MaxUnpool2d": lambda: unpool(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2), 2, 4, 2),
    "MaxUnpool3d": lambda: unpool(nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2), 1, 2, 4, 2),
    "AvgPool1d": lambda: on(nn.AvgPool1d(2), 2, 4),
    "AvgPool2d": lambda: on(nn.AvgPool2d(2), 2, 4, 2),
    "AvgPool3d": lambda: on(nn.AvgPool3d(2), 2, 2, 4, 2),
    "LPPool1d": lambda: on(nn.LPPool1d(2, 2), 2, 4),
    "LPPool2d": lambda: on(nn.LPPool2d(2, 2), 2, 4, 2),
    "LPPool3d": lambda: on(nn.LPPool3d(2, 2), 2, 2, 4, 2),
    "AdaptiveMaxPool1d": lambda: on(nn.AdaptiveMaxPool1d(2), 2, 5),
    "AdaptiveMaxPool2d": lambda: on(nn.AdaptiveMaxPool2d(2), 2, 3, 2),
    "AdaptiveMaxPool3d": lambda: on(nn.AdaptiveMaxPool3d(1), 2, 2, 3, 2),
    "AdaptiveAvgPool1d": lambda: on(nn.AdaptiveAvgPool1d(2), 2, 5),
    "AdaptiveAvgPool2d": lambda: on(nn.AdaptiveAvgPool2d(2), 2, 3, 2),
    "AdaptiveAvgPool3d": lambda: on(nn.AdaptiveAvgPool3d(1), 2, 2, 3, 2),
    "ReflectionPad1d": lambda: on(nn.ReflectionPad1d(1), 1, 3),
    "ReflectionPad2d": lambda: on(nn.ReflectionPad2d(1), 1, 2, 2),
    "ReflectionPad3d": lambda: on(nn.ReflectionPad3d(1), 1, 2, 2, 2),
    "ReplicationPad1d": lambda: on(nn.ReplicationPad1d(1), 1, 3),
    "ReplicationPad2d": lambda: on(nn.ReplicationPad2d(1), 1, 2, 2),
    "ReplicationPad3d": lambda: on(nn.ReplicationPad3d(1), 1, 1, 2, 2),
    "ZeroPad1d": lambda: on(nn.ZeroPad1d(1), 1, 3),
    "ZeroPad2d": lambda: on(nn.ZeroPad2d(1), 1, 2, 2),
    "ZeroPad3d": lambda: on(nn.ZeroPad3d(1), 1, 1, 2, 2),
    "ConstantPad1d": lambda: on(nn.ConstantPad1d(1, 2.0), 1, 3),
    "ConstantPad2d": lambda: on(nn.ConstantPad2d(1, 2.0), 1, 2, 2),
    "ConstantPad3d": lambda: on(nn.ConstantPad3d(1, 2.0), 1, 1, 2, 2),
    "CircularPad1d": lambda: on(nn.CircularPad1d(1), 1, 3),
    "CircularPad2d": lambda: on(nn.CircularPad2d(1), 1, 2, 2),
    "CircularPad3d": lambda: on(nn.CircularPad3d(1), 1, 1, 2, 2),
    **{name: lambda name=name: on(getattr(nn, name)(), 4) for name in ELEMENTWISE},
    "GLU": lambda: on(nn.GLU(), 4),
    "Threshold": lambda: on(nn.Threshold(0.1, 0.3), 4),
    "Softmin": lambda: on(nn.Softmin(-1), 4),
    "Softmax": lambda: on(nn.Softmax(-1), 4),
    "LogSoftmax": lambda: on(nn.LogSoftmax(-1), 4),
    "Softmax2d": lambda: on(nn.Softmax2d(), 3, 2, 2),
    "PReLU": lambda: on(nn.PReLU(3), 3),
    "Dropout1d": lambda: on(nn.Dropout1d(), 2, 2),
    "Dropout2d": lambda: on(nn.Dropout2d(), 2, 2, 2),
    "Dropout3d": lambda: on(nn.Dropout3d(), 2, 2, 1, 2),
    "MultiheadAttention": lambda: on(
        nn.MultiheadAttention(4, 2, batch_first=True), 3, 4, call=lambda layer, x: layer(x, x, x, need_weights=False)[0]
    ),
    "BatchNorm1d": lambda: on(nn.BatchNorm1d(3), 3),
    "BatchNorm2d": lambda: on(nn.BatchNorm2d(2), 2, 2, 2),
    "BatchNorm3d": lambda: on(nn.BatchNorm3d(2), 2, 1, 2, 2),
    "LazyBatchNorm1d": lambda: on(nn.LazyBatchNorm1d(), 3),
    "LazyBatchNorm2d": lambda: on(nn.LazyBatchNorm2d(), 2, 2, 2),
    "LazyBatchNorm3d": lambda: on(nn.LazyBatchNorm3d(), 2, 1, 2, 2),
    "SyncBatchNorm": lambda: on(nn.SyncBatchNorm(2).eval(), 2, 3),
    "InstanceNorm1d": lambda: on(nn.InstanceNorm1d(2, affine=True), 2, 3),
    "InstanceNorm2d": lambda: on(nn.InstanceNorm2d(2, affine=True), 2, 2, 2),
    "InstanceNorm3d": lambda: on(nn.InstanceNorm3d(2, affine=True), 2, 2, 1, 2),
    "LazyInstanceNorm1d": lambda: on(nn.LazyInstanceNorm1d(affine=True), 2, 3),
    "LazyInstanceNorm2d": lambda: on(nn.LazyInstanceNorm2d(affine=True), 2, 2, 2),
    "LazyInstanceNorm3d": lambda: on(nn.LazyInstanceNorm3d(affine=True), 2, 2, 1, 2),
    "GroupNorm": lambda: on(nn.GroupNorm(2, 4), 4, 2),
    "LayerNorm": lambda: on(nn.LayerNorm((2, 3)), 2, 3),
    "RMSNorm": lambda: on(nn.RMSNorm(3), 2, 3),
    "LocalResponseNorm": lambda: on(nn.LocalResponseNorm(2), 3, 2),
    "RNN": lambda: on(nn.RNN(2, 3, batch_first=True), 3, 2, call=lambda layer, x: layer(x)[0]),
    "LSTM": lambda: on(nn.LSTM(2, 2, batch_first=True, bidirectional=True), 3, 2, call=lambda layer, x: layer(x)[0]),
    "GRU": lambda: on(nn.GRU(2, 3, batch_first=True), 3, 2, call=lambda layer, x: layer(x)[0]),
    "RNNCell": lambda: on(nn.RNNCell(2, 3), 2, call=lambda layer, x: layer(x, layer(x))),
    "LSTMCell": lambda: on(nn.LSTMCell(2, 3), 2, call=lambda layer, x: layer(x, layer(x))[0]),
    "GRUCell": lambda: on(nn.GRUCell(2, 3), 2, call=lambda layer, x: layer(x, layer(x))),
    "TransformerEncoderLayer": lambda: on(nn.TransformerEncoderLayer(4, 2, **TRANSFORMER), 2, 4),
    "TransformerDecoderLayer": lambda: on(nn.TransformerDecoderLayer(4, 2, **TRANSFORMER), 2, 4, call=decode),
    "TransformerEncoder": lambda: on(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, **TRANSFORMER), 1, enable_nested_tensor=False), 2, 4
    ),
    "TransformerDecoder": lambda: on(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, **TRANSFORMER), 1), 2, 4, call=decode
    ),
    "Transformer": lambda: on(nn.Transformer(4, 2, 1, 1, **TRANSFORMER), 2, 4, call=decode),
    "Embedding": lambda: (over(nn.Embedding(4, 2, padding_idx=1)), torch.randint(0, 4, (B, 3))),
    "EmbeddingBag": lambda: (over(nn.EmbeddingBag(4, 2)), torch.randint(0, 4, (B, 3))),
    "CosineSimilarity": lambda: on(nn.CosineSimilarity(), 3, call=lambda layer, x: layer(x, x.flip(-1))[:, None]),
    "PairwiseDistance": lambda: on(nn.PairwiseDistance(), 3, call=lambda layer, x: layer(x, x.flip(-1))[:, None]),
    "PixelShuffle": lambda: on(nn.PixelShuffle(2), 4, 1, 2),
    "PixelUnshuffle": lambda: on(nn.PixelUnshuffle(2), 1, 2, 2),
    "ChannelShuffle": lambda: on(nn.ChannelShuffle(2), 4, 1, 2),
    "Upsample": lambda: on(nn.Upsample(scale_factor=2, mode="bicubic"), 1, 2, 2),
    "UpsamplingNearest2d": lambda: on(nn.UpsamplingNearest2d(scale_factor=2), 1, 2, 2),
    "UpsamplingBilinear2d": lambda: on(nn.UpsamplingBilinear2d(scale_factor=2), 1, 2, 2),
    "Flatten": lambda: on(nn.Flatten(), 2, 2),
    "Unflatten": lambda: on(nn.Unflatten(1, (2, 2)), 4),
    "CrossMapLRN2d": lambda: on(nn.CrossMapLRN2d(2), 2, 1, 2),
}

# Further ways of the layers above, where another kernel or another kind of use is at work.
WAYS = {
    "PReLU of one number": lambda: on(nn.PReLU(), 3),
    "PReLU of channels": lambda: on(nn.PReLU(2), 2, 3),
    "grouped Conv2d": lambda: on(nn.Conv2d(2, 2, 2, groups=2, padding="same", padding_mode="circular"), 2, 2, 2),
    "LayerNorm of a vector": lambda: on(
        nn.LayerNorm(3), 3, call=lambda layer, x: x * layer(torch.arange(3).to(x).square())
    ),
    "Linear over positions": lambda: on(nn.Linear(2, 3), 3, 2),
    "grouped Conv1d of several channels": lambda: on(nn.Conv1d(4, 6, 2, groups=2, stride=2), 4, 5),
    "depthwise Conv2d": lambda: on(nn.Conv2d(3, 6, 2, groups=3, bias=False), 3, 3, 2),
    "grouped ConvTranspose1d": lambda: on(nn.ConvTranspose1d(4, 6, 3, groups=2, stride=2, padding=1), 4, 3),
    "ConvTranspose1d with output padding": lambda: on(nn.ConvTranspose1d(2, 2, 2, 3, 1, 2, dilation=2), 2, 3),
    "ConvTranspose2d of unequal axes": lambda: on(
        nn.ConvTranspose2d(2, 2, (2, 3), stride=(1, 2), padding=(1, 0), output_padding=(0, 1), dilation=(2, 1)), 2, 2, 2
    ),
    "Linear used twice": lambda: on(nn.Linear(3, 3), 3, call=lambda layer, x: layer(torch.tanh(layer(x)))),
    "Conv1d used on two lengths": lambda: on(
        nn.Conv1d(2, 2, 2), 2, 4, call=lambda layer, x: torch.cat([layer(x), layer(x[..., 1:])], -1)
    ),
    "cross attention": lambda: on(
        nn.MultiheadAttention(4, 2, batch_first=True), 3, 4, call=lambda layer, x: layer(x[:, :2], x, x.flip(1))[0]
    ),
    "cross attention of other widths": lambda: on(
        nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True),
        3,
        4,
        call=lambda layer, x: layer(x[:, :2], x[..., :3], x[..., 1:3])[0],
    ),
    "attention without biases, time first": lambda: on(
        nn.MultiheadAttention(4, 2, bias=False),
        3,
        4,
        call=lambda layer, x: layer(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1),
    ),
    "causal attention": lambda: on(
        nn.MultiheadAttention(4, 2, batch_first=True),
        3,
        4,
        call=lambda layer, x: layer(
            x, x, x, attn_mask=torch.ones(3, 3).triu(1).bool(), is_causal=True, need_weights=False
        )[0],
    ),
    "attention with masks": lambda: on(
        nn.MultiheadAttention(4, 2, batch_first=True),
        3,
        4,
        call=lambda layer, x: layer(
            x,
            x,
            x,
            key_padding_mask=x[..., 0] > x[..., 0].amin(1, True),
            attn_mask=torch.randn(3, 3).to(x).mul(0) - 0.5,
        )[0],
    ),
    "attention with a mask a head": lambda: on(
        nn.MultiheadAttention(4, 2, batch_first=True),
        3,
        4,
        call=lambda layer, x: layer(
            x, x, x, attn_mask=x[:, :, :1].repeat_interleave(2, 0).expand(-1, -1, 3), average_attn_weights=False
        )[1].flatten(1),
    ),
    "attention with learned keys": lambda: on(
        nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        3,
        4,
        call=lambda layer, x: layer(x, x, x)[0],
    ),
    "MultiheadAttention with weights": lambda: on(
        nn.MultiheadAttention(4, 2, batch_first=True), 2, 4, call=lambda layer, x: layer(x, x, x)[0]
    ),
    "LSTM of two layers": lambda: on(
        nn.LSTM(2, 2, 2, batch_first=True, proj_size=1), 3, 2, call=lambda layer, x: layer(x)[0][:, -1]
    ),
    "InstanceNorm1d with running statistics": lambda: on(
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True), 2, 3
    ),
    "EmbeddingBag of sums": lambda: (over(nn.EmbeddingBag(4, 2, mode="sum")), torch.randint(0, 4, (B, 3))),
}


def in_training(layer, *shape):
    model, x = on(layer, *shape)
    return model.train(), x


REFUSED = {
    "FractionalMaxPool2d": (lambda: on(nn.FractionalMaxPool2d(2, output_size=3), 4, 7, 7), "random|rest of the batch"),
    "FractionalMaxPool3d": (lambda: on(nn.FractionalMaxPool3d(2, output_size=3), 4, 7, 7, 7), "random|rest"),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: on(
            nn.AdaptiveLogSoftmaxWithLoss(4, 5, [2]), 4, call=lambda layer, x: layer(x, torch.zeros(len(x)).long())
        ),
        "return outputs",
    ),
    "BatchNorm1d in training": (lambda: in_training(nn.BatchNorm1d(3), 3), r"model\.eval\(\)"),
    "Dropout in training": (lambda: in_training(nn.Dropout(), 4, 4), r"model\.eval\(\)"),
}
NO_LAYERS = {"Module", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "Container"}
NO_LAYERS |= {"DataParallel", "RNNBase", "RNNCellBase"}


def in_context(make, dtype=torch.float64):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    module, x = make()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1 if tensor.ndim == 1 else torch.randn_like(tensor))
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def many(params, batch):
        outputs = functional_call(module, params, (batch[0],))
        return outputs.flatten(1) if isinstance(outputs, torch.Tensor) else outputs

    def one(params, batch):
        outputs = many(params, batch)
        return (outputs * torch.linspace(1, 2, outputs.shape[1])).sum(1, keepdim=True)

    return many, one, params, x


def jacobians(forward, params, x):
    """`[B, E, P]`, every datum alone, every output alone."""
    rows = []
    for i in range(len(x)):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
        outputs = forward(leaves, (x[i : i + 1], None))[0]
        rows.append(
            torch.stack(
                [
                    flatten(
                        dict(
                            zip(leaves, torch.autograd.grad(output, list(leaves.values()), retain_graph=True, **ZERO))
                        ),
                        params,
                    )
                    for output in outputs
                ]
            )
        )
    return torch.stack(rows)


ZERO = {"allow_unused": True, "materialize_grads": True}


def check(make, dtype=torch.float64, tolerance=1e-10):
    many, one, params, x = in_context(make, dtype)
    likelihood = likelihoods.gaussian(0.5)
    for forward in (many, one):
        rows = jacobians(forward, params, x)
        outputs = forward(params, (x, None)).detach()
        batch = (x, torch.randn_like(outputs))
        gradients = torch.einsum("be,bep->bp", (outputs - batch[1]) / 0.5, rows)
        ggn, fisher = torch.einsum("bep,beq->pq", rows, rows) / 0.5, gradients.T @ gradients

        def close(got, wanted):
            scale = max(wanted.abs().max().item(), 1e-12)
            assert (got - wanted).abs().max() <= tolerance * scale

        close(curvature.ggn(forward, likelihood, "dense")(params, batch).to_dense(), ggn)
        close(flatten(curvature.ggn(forward, likelihood)(params, batch).diag(), params), ggn.diagonal())
        close(curvature.empirical_fisher(forward, likelihood, "dense")(params, batch).to_dense(), fisher)
        close(flatten(curvature.empirical_fisher(forward, likelihood)(params, batch).diag(), params), fisher.diagonal())
        try:
            kfac = curvature.ggn(forward, likelihood, "kronecker")(params, batch)
        except ValueError as refusal:
            assert str(refusal).startswith("a Kronecker precision cannot describe")
            assert any(f"{name}: " in str(refusal) for name in params)
        else:  # a vector has one block, which Kronecker holds exactly
            exact = curvature.ggn(forward, likelihood)(params, batch).diag()
            for name, leaf in params.items():
                if leaf.ndim == 1:
                    close(kfac.diag()[name], exact[name])


pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_layer_of_torch_has_an_entry():
    layers = {name for name, layer in vars(nn).items() if inspect.isclass(layer) and issubclass(layer, nn.Module)}
    losses = {name for name in layers if name.endswith(("Loss", "Loss2d"))} - set(REFUSED)
    assert layers - losses - NO_LAYERS == {name for name in [*RIGHT, *REFUSED] if " " not in name}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("layer", [*RIGHT, *WAYS])
def test_the_curvature_of_a_layer_is_that_of_its_jacobians(layer):
    check({**RIGHT, **WAYS}[layer])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layer", ["RNN", "LSTM", "GRU", "LSTM of two layers", "PReLU", "Conv2d", "MultiheadAttention"])
def test_the_kernels_of_float32_are_as_right(layer):
    check({**RIGHT, **WAYS}[layer], torch.float32, 2e-4)


@pytest.mark.parametrize("layer", REFUSED)
def test_a_layer_whose_outputs_are_no_function_of_their_datum_is_refused(layer):
    make, message = REFUSED[layer]
    many, _, params, x = in_context(make)
    with pytest.raises(ValueError, match=message):
        curvature.ggn(many, likelihoods.gaussian(), "dense")(params, (x, None))
