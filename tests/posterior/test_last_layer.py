"""Which layer is the last, found from the graph; modules whose outputs are random or mix data; how modules are called."""

import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import bayesopt_chain as bc

pytestmark = pytest.mark.usefixtures("double_precision")


class Net(nn.Module):
    """A body and a head, and what ``after`` makes of them."""

    def __init__(self, after, **parts):
        super().__init__()
        self.body, self.head, self.after = nn.Linear(2, 5), nn.Linear(5, 3), after
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.after(self, self.head(h), h)


def auxiliary(net, f, h):
    net.kept = net.other(h)  # runs last, and goes nowhere
    return f


AFTER = {
    "an auxiliary head": (auxiliary, {"other": nn.Linear(5, 4)}, {"head"}),
    "two heads through cat": (
        lambda n, f, h: torch.cat([f, n.other(h)], 1),
        {"other": nn.Linear(5, 2)},
        {"head", "other"},
    ),
    "a logit scale": (lambda n, f, h: n.scale * f, {"scale": nn.Parameter(torch.tensor(2.0))}, {"head"}),
    "a token in front": (
        lambda n, f, h: n.head(h + n.token[:, 0]),
        {"token": nn.Parameter(torch.randn(1, 1, 5))},
        {"head"},
    ),
    "in place behind": (lambda n, f, h: f.tanh_(), {}, {"head"}),
    "a detached path": (lambda n, f, h: f + n.other(h).detach(), {"other": nn.Linear(5, 3)}, {"head"}),
}


@pytest.mark.parametrize("name", AFTER)
def test_the_last_layer_is_the_one_whose_output_reaches_the_output(name):
    """The posterior's variance is that of the subset by name."""
    after, parts, layers = AFTER[name]
    net, x = Net(after, **parts).double().eval(), torch.randn(30, 2)
    y = torch.randn_like(net(x).detach())
    options = {"structure": "dense", "tune": None, "prior_precision": 2.0}
    fitted = bc.fit_laplace(net, bc.likelihoods.gaussian(0.3), [(x, y)], **options)
    assert {n.rpartition(".")[0] for n in fitted.posterior.mean} == layers
    by_name = bc.fit_laplace(net, bc.likelihoods.gaussian(0.3), [(x, y)], subset=sorted(layers), **options)
    at = 5 * torch.ones(1, 2)
    torch.testing.assert_close(fitted.predictive(at).outputs.covariance, by_name.predictive(at).outputs.covariance)


NO_LAST_LAYER = [
    (lambda n, f, h: f @ n.mix, {"mix": nn.Parameter(torch.eye(3))}, {}, "depends on mix behind every layer"),
    (lambda n, f, h: f.detach(), {}, {}, "reaches the output"),
    (
        lambda n, f, h: f,
        {"other": nn.Linear(5, 3)},
        {"subset": "other", "structure": "diagonal", "tune": None},
        r"do not depend on the kept parameters .other.bias, other.weight.",
    ),
]


@pytest.mark.parametrize(("after", "parts", "options", "words"), NO_LAST_LAYER)
def test_what_has_no_last_layer_is_refused_by_name(after, parts, options, words):
    data = [(torch.randn(20, 2), torch.randint(0, 3, (20,)))]
    with pytest.raises(ValueError, match=words):
        bc.fit_laplace(Net(after, **parts).double().eval(), bc.likelihoods.categorical(), data, **options)


class Draws(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Recurrent(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, num_layers=2, batch_first=True, **options), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True), nn.Linear(2, 3)

    def forward(self, x):
        x = x[:, None].expand(-1, 3, -1)
        return self.head(self.attention(x, x, x)[0][:, 0])


@pytest.mark.parametrize(
    "module, words",
    [
        (nn.Sequential(nn.Dropout(), nn.Linear(2, 3)), r"0 .Dropout. is in training mode"),
        (nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), r"0 .BatchNorm1d. is in training mode"),
        (Recurrent(dropout=0.5), r"lstm .LSTM. is in training mode"),
        (Attentive(), r"attention .MultiheadAttention. is in training mode"),
        (nn.Sequential(Draws(), nn.Linear(2, 3)), "the outputs are random"),
        (nn.Sequential(Centred(), nn.Linear(2, 3)), "depend on the rest of its batch"),
        (
            nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 3)).eval(),
            "no running statistics",
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_layers_that_draw_or_mix_data_are_refused_by_fits_and_caches(module, words):
    module = module.double()
    data = [(torch.randn(20, 2), torch.randint(0, 3, (20,)))]
    with pytest.raises(ValueError, match=words):
        bc.fit_laplace(module, bc.likelihoods.categorical(), data)
    with pytest.raises(ValueError, match=words):
        bc.posterior.cache_features(module, data)


def test_a_recurrent_network_without_dropout_may_be_in_training_mode():
    fitted = bc.fit_laplace(
        Recurrent().train(), bc.likelihoods.categorical(), [(torch.randn(20, 2), torch.randint(0, 3, (20,)))]
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
