"""Which layer is the last, of modules wrapped, pruned, compiled or added to: the dense posterior, or a refusal by name."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

import bayesopt_chain as bc
from tests import nets

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
X, NEW = torch.linspace(-1, 1, 60).reshape(20, 3).double(), torch.linspace(-3, 3, 12).reshape(4, 3).double()


class Net(nn.Module):
    """A body, a head of two outputs and what comes behind it."""

    def __init__(self, head=None, *behind, **own):
        super().__init__()
        self.body, self.head, self.behind = nn.Linear(3, 5), head or nn.Linear(5, 2), nn.ModuleList(behind)
        for name, tensor in own.items():
            setattr(self, name, nn.Parameter(tensor))

    def forward(self, x):
        f = self.head(torch.tanh(self.body(x)))
        for part in self.behind:
            f = part(f)
        return f + getattr(self, "shift", 0) if not hasattr(self, "gain") else f * self.gain


def scale():
    return nets.Net(lambda net, x: x * net.scale, scale=nn.Parameter(torch.tensor([1.5])))


def of_inputs(function):
    """A layer without parameters."""
    return nets.Net(lambda net, x: function(x))


def with_a_bias():
    parts = {"inner": nn.Linear(5, 2, bias=False), "bias": nn.Parameter(torch.ones(2))}
    return nets.Net(lambda net, x: net.inner(x) + net.bias, **parts)


def tied():
    """An autoencoder whose decoder is the encoder's transpose: the matrix runs twice."""
    parts = {"encode": nn.Linear(3, 5, bias=False), "decode": nn.Linear(3, 5, bias=False)}
    parts["decode"].weight = parts["encode"].weight
    return nets.Net(lambda net, x: net.decode(torch.tanh(net.encode(x)[:, :3])), **parts)


def auxiliary(net, f, h):
    net.kept = net.other(h)  # runs last, and goes nowhere
    return f


def after(then, **parts):
    """A body and a head, and what ``then`` makes of them."""

    def of(net, x):
        h = torch.tanh(net.body(x))
        return then(net, net.head(h), h)

    return lambda: nets.Net(of, body=nn.Linear(3, 5), head=nn.Linear(5, 2), **parts)


def hooked():
    head = nn.Linear(5, 2)
    head.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return Net(head)


def frozen_bias():
    net = Net()
    net.head.bias.requires_grad_(False)
    return net


def parametrized_by_hand():
    head = nn.Linear(5, 2)
    register_parametrization(head, "weight", of_inputs(lambda x: x + 0.1 * x.flip(0)))
    return Net(head)


def permanently_pruned():
    net = Net(prune.l1_unstructured(nn.Linear(5, 2), "weight", amount=0.3))
    prune.remove(net.head, "weight")
    return net


def compiled_inside():
    net = Net()
    net.body = torch.compile(net.body, backend="eager")
    return net


def lightning():
    class Lit(pytest.importorskip("pytorch_lightning").LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return self.net(x)

    return Lit()


def adapter(*targets, **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Net(), peft.LoraConfig(r=1, target_modules=list(targets), **options))


PLAIN = {"head.weight", "head.bias"}
UNTIDY = {  # module, the parameters of the last layer (or the words of a refusal), words of a warning
    "plain": (Net, PLAIN),
    "weight_norm": (
        lambda: Net(parametrizations.weight_norm(nn.Linear(5, 2))),
        {"head.bias", "head.parametrizations.weight.original0", "head.parametrizations.weight.original1"},
    ),
    "spectral_norm": (
        lambda: Net(parametrizations.spectral_norm(nn.Linear(5, 2))),
        {"head.bias", "head.parametrizations.weight.original"},
    ),
    "orthogonal": (
        lambda: Net(parametrizations.orthogonal(nn.Linear(5, 2), use_trivialization=False)),
        {"head.bias", "head.parametrizations.weight.original"},
    ),
    "a parametrization by hand": (parametrized_by_hand, {"head.bias", "head.parametrizations.weight.original"}),
    "old weight_norm": (
        lambda: Net(nn.utils.weight_norm(nn.Linear(5, 2))),
        {"head.bias", "head.weight_g", "head.weight_v"},
    ),
    "old spectral_norm": (lambda: Net(nn.utils.spectral_norm(nn.Linear(5, 2))), {"head.bias", "head.weight_orig"}),
    "pruned": (
        lambda: Net(prune.l1_unstructured(nn.Linear(5, 2), "weight", amount=0.3)),
        {"head.bias", "head.weight_orig"},
    ),
    "a pruned bias": (
        lambda: Net(prune.l1_unstructured(nn.Linear(5, 2), "bias", amount=1)),
        {"head.weight", "head.bias_orig"},
    ),
    "pruned for good": (permanently_pruned, PLAIN),
    "compiled": (lambda: torch.compile(Net(), backend="eager"), PLAIN),
    "a compiled part": (compiled_inside, "body was compiled by torch.compile"),
    "a scale behind": (lambda: Net(None, scale()), PLAIN),
    "a norm behind": (lambda: Net(None, nn.LayerNorm(2), nn.PReLU()), PLAIN),
    "a norm of two axes behind": (
        lambda: Net(None, nn.Unflatten(1, (2, 1)), nn.LayerNorm((2, 1)), nn.Flatten()),
        PLAIN,
    ),
    "a batch norm behind": (lambda: Net(None, nn.BatchNorm1d(2)), PLAIN),
    "a gain of its own": (lambda: Net(gain=torch.tensor([[2.0, 3.0]]).reshape(1, 1, 2)[0]), "depends on gain behind"),
    "a shift of its own": (lambda: Net(shift=torch.ones(2)), {*PLAIN, "shift"}),
    "a head with a bias of its own": (lambda: Net(with_a_bias()), {"head.inner.weight", "head.bias"}),
    "a head whose output a hook changes": (hooked, PLAIN),
    "a frozen bias": (frozen_bias, {"head.weight"}),
    "a convolution at the end": (
        lambda: nn.Sequential(
            nn.Linear(3, 4),
            nn.Unflatten(1, (1, 2, 2)),
            nn.Conv2d(1, 2, 2, padding=1),
            of_inputs(lambda x: x.mean((2, 3))),
        ),
        {"2.weight", "2.bias"},
    ),
    "tied weights": (tied, {"encode.weight"}),
    "averaged": (lambda: torch.optim.swa_utils.AveragedModel(Net()), {"module.head.weight", "module.head.bias"}),
    "data parallel": (lambda: nn.DataParallel(Net()), PLAIN),
    "lightning": (lightning, {"net.head.weight", "net.head.bias"}),
    "an adapter in the body": (
        lambda: adapter("body", modules_to_save=["head"]),
        {f"base_model.model.head.modules_to_save.default.{k}" for k in ("weight", "bias")},
    ),
    "an adapter at the head": (
        lambda: adapter("head"),
        {"base_model.model.head.lora_B.default.weight"},
    ),
    "an auxiliary head": (after(auxiliary, other=nn.Linear(5, 4)), PLAIN),
    "two heads through cat": (
        after(lambda n, f, h: torch.cat([f, n.other(h)], 1), other=nn.Linear(5, 2)),
        {*PLAIN, "other.weight", "other.bias"},
    ),
    "a logit scale": (after(lambda n, f, h: n.scale * f, scale=nn.Parameter(torch.tensor(2.0))), PLAIN),
    "a token in front": (
        after(lambda n, f, h: n.head(h + n.token[:, 0]), token=nn.Parameter(torch.linspace(-1, 1, 5).reshape(1, 1, 5))),
        PLAIN,
    ),
    "some outputs of the head": (after(lambda n, f, h: f[:, :1]), PLAIN),
    "an output several times": (after(lambda n, f, h: f[:, :1].expand(-1, 3)), PLAIN),
    "a column that is broadcast": (
        lambda: nn.Sequential(nn.Linear(3, 1), of_inputs(lambda x: x.expand(-1, 2))),
        {"0.weight", "0.bias"},
    ),
    "a frozen head": (
        after(lambda n, f, h: n.frozen(h), frozen=nn.Linear(5, 2).requires_grad_(False)),
        {"body.weight", "body.bias"},
    ),
    "in place behind": (after(lambda n, f, h: f.tanh_()), PLAIN),
    "a detached path": (after(lambda n, f, h: f + n.other(h).detach(), other=nn.Linear(5, 2)), PLAIN),
    "a matrix behind": (
        after(lambda n, f, h: f @ n.mix, mix=nn.Parameter(torch.eye(2))),
        "depends on mix behind every layer",
    ),
    "detached": (after(lambda n, f, h: f.detach()), "reaches the output"),
    "scripted": (lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), "script"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "lightning" else n for n in UNTIDY],  # a slow import
)
def test_the_last_layer_of_an_untidy_module_has_the_dense_posterior_or_is_refused(name):
    make, wanted = UNTIDY[name]
    module = make().double().eval()
    before = copy.deepcopy(module.state_dict())
    y = torch.randn_like(module(X).detach())
    options = {"structure": "dense", "tune": None, "prior_precision": 2.0}
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            bc.fit_laplace(module, bc.likelihoods.poisson(), [(X, y.round().abs())], **options)
        return
    batches = [(X[:13], y[:13].round().abs()), (X[13:], y[13:].round().abs())]
    fitted = bc.fit_laplace(module, bc.likelihoods.poisson(), batches, **options)
    assert set(fitted.posterior.mean) == wanted
    if name == "orthogonal":  # Kronecker factors cannot describe it
        assert bc.fit_laplace(module, bc.likelihoods.poisson(), batches).model.how.structure == "dense"
    plain = getattr(module, "_orig_mod", module.module if isinstance(module, nn.DataParallel) else module)
    params = {n: p.detach() for n, p in plain.named_parameters()}

    def outputs(kept, x):
        return torch.func.functional_call(plain, {**params, **kept}, x)

    def rows(x):
        jacobian = torch.func.jacrev(lambda kept: outputs(kept, x).flatten())({n: params[n] for n in wanted})
        return torch.cat([jacobian[n].flatten(1) for n in wanted], 1)

    j, new = rows(X), rows(NEW)
    precision = j.mT @ (outputs({}, X).flatten().exp()[:, None] * j) + 2 * torch.eye(j.shape[1])
    covariance = new @ torch.linalg.solve(precision, new.mT)
    variance = covariance.diagonal().reshape(len(NEW), -1)
    torch.testing.assert_close(fitted.outputs(NEW).covariance.diagonal(dim1=1, dim2=2), variance, rtol=1e-8, atol=1e-12)
    assert all(torch.equal(x, before[n]) for n, x in module.state_dict().items())


def test_kept_parameters_that_the_outputs_do_not_depend_on_are_named():
    module = after(lambda n, f, h: f, other=nn.Linear(5, 2))().double().eval()
    with pytest.raises(ValueError, match=r"do not depend on the kept parameters .other.bias, other.weight."):
        bc.fit_laplace(
            module,
            bc.likelihoods.poisson(),
            [(X, X[:, :2].exp().round())],
            subset="other",
            structure="diagonal",
            tune=None,
        )


def test_parameters_behind_the_last_layer_are_named_and_a_model_without_a_matrix_warns():
    data = [(X, X[:, :2].exp().round())]
    fitted = bc.fit_laplace(Net(None, scale()).double().eval(), bc.likelihoods.poisson(), data)
    assert "behind them behind.0.scale stay as they are" in repr(fitted) and len(repr(fitted).splitlines()) == 3
    with pytest.warns(UserWarning, match="no layer with a matrix"):
        bc.fit_laplace(scale().double().eval(), bc.likelihoods.poisson(), [(X, X.exp().round())])


def recurrent(**options):
    lstm = nn.LSTM(2, 4, num_layers=2, batch_first=True, **options)
    return nets.Net(lambda net, x: net.head(net.lstm(over_positions(x))[0][:, -1]), lstm=lstm, head=nn.Linear(4, 3))


def over_positions(x):
    return x[:, None].expand(-1, 3, -1)


def attentive():
    attention = nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True)
    attended = lambda net, x: net.head(net.attention(*[over_positions(x)] * 3)[0][:, 0])  # noqa: E731
    return nets.Net(attended, attention=attention, head=nn.Linear(2, 3))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "module, words",
    [
        (nn.Sequential(nn.Dropout(), nn.Linear(2, 3)), r"0 .Dropout. is in training mode"),
        (nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), r"0 .BatchNorm1d. is in training mode"),
        (recurrent(dropout=0.5), r"lstm .LSTM. is in training mode"),
        (attentive(), r"attention .MultiheadAttention. is in training mode"),
        (nn.Sequential(of_inputs(lambda x: x + 0.1 * torch.randn_like(x)), nn.Linear(2, 3)), "the outputs are random"),
        (nn.Sequential(of_inputs(lambda x: x - x.mean(0)), nn.Linear(2, 3)), "depend on the rest of its batch"),
        (
            nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 3)).eval(),
            "no running statistics",
        ),
    ],
    ids=["dropout", "batch norm", "LSTM", "attention", "draws", "centred", "no statistics"],
)
def test_layers_that_draw_or_mix_data_are_refused(module, words):
    module = module.double()
    data = [(torch.randn(20, 2), torch.randint(0, 3, (20,)))]
    with pytest.raises(ValueError, match=words):
        bc.fit_laplace(module, bc.likelihoods.categorical(), data)


@pytest.mark.usefixtures("double_precision")
def test_a_recurrent_network_without_dropout_may_be_in_training_mode():
    fitted = bc.fit_laplace(
        recurrent().train(), bc.likelihoods.categorical(), [(torch.randn(20, 2), torch.randint(0, 3, (20,)))]
    )
    assert set(fitted.posterior.mean) == {"head.weight", "head.bias"}


@dataclass
class ModelOutput:
    loss: object
    logits: torch.Tensor


class ByKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask=None):
        h = self.embedding(input_ids) * attention_mask[..., None]
        return ModelOutput(None, self.head(h.sum(1)))


class Whole(ByKeywords):
    def forward(self, data):
        return super().forward(data["input_ids"], data["attention_mask"]).logits


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_dictionaries_and_model_outputs_are_those_of_transformers(subset):
    """A module with keywords and one that takes the dictionary whole give what a module of a pair of tensors gives."""
    ids, mask, y = torch.randint(0, 9, (30, 4)), torch.randint(0, 2, (30, 4)).double(), torch.randint(0, 3, (30,))
    named = ByKeywords().eval()
    whole = Whole().eval()
    whole.load_state_dict(named.state_dict())
    batches = [{"input_ids": ids, "attention_mask": mask, "labels": y}]
    fits = [bc.fit_laplace(m, bc.likelihoods.categorical(), batches, subset=subset) for m in (named, whole)]
    forward = lambda p, batch: torch.func.functional_call(named, p, batch[0]).logits  # noqa: E731
    params = {n: p.detach() for n, p in named.named_parameters()}
    keep = ["head"] if subset == "last_layer" else "all"
    pair = bc.fit_laplace(forward, bc.likelihoods.categorical(), [((ids, mask), y)], params=params, subset=keep)
    for fitted in fits:
        torch.testing.assert_close(fitted.log_evidence, pair.log_evidence, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(fitted.predict(batches), fitted.predict(batches[0]))
        torch.testing.assert_close(fitted.predict(batches), pair.predict([((ids, mask), None)]))
        assert torch.equal(pickle.loads(pickle.dumps(fitted)).predict(batches), fitted.predict(batches))
