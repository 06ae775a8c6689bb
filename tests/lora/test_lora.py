"""Posteriors over adapters: what is trained and predicted, against explicit computations; and files that PEFT reads."""

import copy
import gc
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain import lora, optim
from bayesopt_chain.lora import fit
from tests.distributed.ranks import run, world
from tests.failing import failing
from tests.walk import descend

METHODS = ("ensemble", "sghmc", "ivon", "laplace")
SHORT = {"steps": 24, "members": 2, "draws": 4, "batch_size": 8, "prior_precision": 1.0}


def base():
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        num_key_value_heads=2,
        max_position_embeddings=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def model(**options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        base(), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    )


def sequences(step=1):
    ids = (step * torch.arange(8) + 3 * torch.arange(24)[:, None]) % 11
    labels = ids.clone()
    labels[:8, 4:] = -100
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


MASKED = sequences()
IDS = MASKED["input_ids"]


@pytest.fixture(scope="module")
def data():
    return sequences()


@pytest.fixture(scope="module", params=METHODS)
def found(request, data, tmp_path_factory):
    """A finished call of each method, its model and its folder."""
    own = model()
    path = tmp_path_factory.mktemp(request.param) / "draws"
    return lora.bayesian_lora(own, data, method=request.param, path=path, **SHORT), own, path


def test_the_model_ends_as_it_was_and_its_base_is_shared(found, data):
    result, own, _ = found
    for (name, p), (_, q) in zip(own.named_parameters(), model().named_parameters()):
        assert torch.equal(p, q), name
    assert all("lora_" in name for name in result.draws) and result._forward.module is own
    assert all(x.dtype == torch.float32 for x in result.draws.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_there_is_one_copy_of_the_base(method, data, monkeypatch):
    """Counted among all tensors that are alive, in every batch, behind the Laplace fit and in a prediction."""
    own, counts = model(), []
    weight = own.get_submodule("base_model.model.lm_head").weight
    weight.data += 0.5  # as no other model has it

    def counted(function):
        def called(*args, **given):
            made = function(*args, **given)
            alike = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == weight.shape]
            counts.append(len({x.data_ptr() for x in alike if torch.equal(x, weight)}))
            return made

        return called

    monkeypatch.setattr(fit._Problem, "loss", counted(fit._Problem.loss))
    monkeypatch.setattr(fit, "fit_laplace", counted(fit.fit_laplace))
    result = lora.bayesian_lora(own, data, method=method, **{**SHORT, "steps": 4})
    counted(result.predict)(data)
    assert set(counts) == {1} and len(counts) >= 5


def test_predictions_are_those_of_the_draws_one_by_one(found, data):
    result, own, _ = found
    own.eval()
    forward = bc.make_functional(own, outputs="logits").forward
    inputs = ({k: data[k] for k in ("input_ids", "attention_mask")}, None)
    logits = []
    for k in range(len(result)):
        draw = result.draw(k)
        if result.posterior is None:
            logits.append(forward(draw, inputs).detach())
            continue
        mean = result.posterior.mean
        step = {n: x - mean[n] for n, x in draw.items()}  # linearised: a central difference along the step
        ahead, behind = ({n: m + h * step[n] for n, m in mean.items()} for h in (1e-2, -1e-2))
        slope = (forward(ahead, inputs) - forward(behind, inputs)) / 2e-2
        logits.append((forward(mean, inputs) + slope).detach())
    p = torch.stack(logits).softmax(-1)
    tolerance = {"rtol": 0, "atol": 1e-5 if result.posterior is None else 2e-3}
    got = result.predict(data)
    torch.testing.assert_close(got.probabilities, p.mean(0), **tolerance)
    entropy = torch.special.entr(p.mean(0)).sum(-1)
    torch.testing.assert_close(got.entropy, entropy, **tolerance)
    torch.testing.assert_close(got.mutual_information, entropy - torch.special.entr(p).sum(-1).mean(0), **tolerance)
    assert result.predict(data, probabilities=False).probabilities is None
    own_mask = data["attention_mask"].bool()
    torch.testing.assert_close(got.by_sequence()[0][0], got.entropy[0][own_mask[0]].mean())
    targets = torch.cat([data["labels"][:, 1:], torch.full((24, 1), -100)], 1)
    nll = cross_entropy(p.mean(0).log().flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert result.nll(data) == pytest.approx(nll.item(), abs=tolerance["atol"])
    parts = [{k: x[rows] for k, x in data.items()} for rows in (slice(10), slice(10, 24))]
    torch.testing.assert_close(result.predict(parts).probabilities, got.probabilities)
    assert result.nll(iter(parts)) == pytest.approx(result.nll(data))


def test_every_draw_is_an_adapter_of_its_library_and_comes_back(found, data, tmp_path):
    result, _, path = found
    result.save_adapters(tmp_path / "copy")
    for folder in (path, tmp_path / "copy"):
        back = lora.adapters(folder, model())
        assert torch.equal(back.predict(data).probabilities, result.predict(data).probabilities)
        assert back.report == result.report
    loaded = pytest.importorskip("peft").PeftModel.from_pretrained(base(), path / "draw-001").eval()
    forward = bc.make_functional(model().eval(), outputs="logits").forward
    ids = data["input_ids"]
    here = forward(result.draw(1), ({"input_ids": ids}, None))
    assert torch.equal(loaded(input_ids=ids).logits, here)
    torch.testing.assert_close(loaded.merge_and_unload()(input_ids=ids).logits, here, rtol=0, atol=1e-5)
    with pytest.raises(FileExistsError, match="holds draws already"):
        result.save_adapters(path)


def test_a_call_that_was_killed_goes_on_where_it_was(data, tmp_path, monkeypatch):
    given = {**SHORT, "prior_precision": "held out", "steps": 30, "method": "sghmc"}
    whole = lora.bayesian_lora(model(), data, **given)
    trained = fit._Problem.member

    own = model()
    with monkeypatch.context() as patch:
        patch.setattr(fit._Problem, "member", failing(trained, 2, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            lora.bayesian_lora(own, data, path=tmp_path / "draws", **given)
    assert all(torch.equal(p, q) for p, q in zip(own.parameters(), model().parameters()))
    calls = []
    monkeypatch.setattr(
        fit._Problem, "member", lambda self, method, k, *rest: calls.append(k) or trained(self, method, k, *rest)
    )
    monkeypatch.setattr(fit._Problem, "held_out_losses", lambda *_: pytest.fail("the prior was decided already"))
    again = lora.bayesian_lora(own, data, path=tmp_path / "draws", **given)
    assert calls == [1] and again.report == whole.report
    assert all(torch.equal(x, again.draws[name]) for name, x in whole.draws.items())
    with pytest.raises(ValueError, match="another call: steps is 30, here 31"):
        lora.bayesian_lora(own, data, path=tmp_path / "draws", **{**given, "steps": 31})
    other = {**data, "labels": data["labels"].clone()}
    other["labels"][3, 2] = 7
    with pytest.raises(ValueError, match=r"another call: data.* is .*, here "):
        lora.bayesian_lora(own, other, path=tmp_path / "draws", **given)


@pytest.mark.slow
def test_the_posterior_of_a_task_is_the_prior_of_the_next(data, tmp_path):
    """Its energy is that of the dense matrix, data count once each, and the first task is kept better than without."""
    first = lora.bayesian_lora(model(), data, method="laplace", path=tmp_path / "first", **{**SHORT, "steps": 200})
    second, prior = sequences(2), first.posterior
    own = model()
    given, plain = (fit._problem(own, second, None, 8, 0, p) for p in (prior, None))
    torch.manual_seed(1)
    for p in given.named.values():
        p.data.add_(torch.randn_like(p))
    moved = {name: (p - prior.mean[name]).detach() for name, p in given.named.items()}
    flat = torch.cat([moved[name].flatten() for name in sorted(moved)]).double()
    energy = flat @ prior.precision.to_dense().double() @ flat / (2 * given.tokens)
    rows = torch.arange(8)
    assert (given.loss(rows, 3.0) - plain.loss(rows, 3.0)).item() == pytest.approx(float(energy), rel=1e-4)
    how = {k: v for k, v in SHORT.items() if k != "prior_precision"} | {"method": "laplace", "steps": 200}
    kept = lora.bayesian_lora(model(), second, prior=prior, **how)
    assert float(kept.posterior.undecomposed.count) == 2 * float(prior.undecomposed.count)
    fresh = lora.bayesian_lora(model(), second, prior_precision=1.0, **how)
    assert kept.nll(data) < fresh.nll(data) - 0.05 and kept.nll(second) < first.nll(second) - 0.05
    again = lora.bayesian_lora(model(), second, prior=lora.adapters(tmp_path / "first", model()).posterior, **how)
    assert all(torch.equal(x, again.draws[name]) for name, x in kept.draws.items())
    with pytest.raises(TypeError, match="adds its Kronecker factors"):
        lora.bayesian_lora(model(), second, prior=prior._replace(undecomposed=()), **how)


def test_dropout_is_drawn_from_a_stream_of_each_members_own(data):
    given = {**SHORT, "members": 1}
    one = [lora.bayesian_lora(model(lora_dropout=0.5), data, **given).draws for _ in range(2)]
    assert all(torch.equal(x, one[1][name]) for name, x in one[0].items())
    without = lora.bayesian_lora(model(), data, **given).draws
    assert not all(torch.equal(x, without[name]) for name, x in one[0].items())


def test_the_prior_with_the_smallest_held_out_loss_is_taken(data):
    result = lora.bayesian_lora(model(), data, steps=40, members=2)
    losses = result.report["held-out losses"]
    assert set(losses) == set(fit.PRIORS) and result.report["prior"] == min(losses, key=losses.get)
    assert result.report["gradients"] <= 40 and result.report["tokens"] == 8 * 3 + 16 * 7


def test_answers_are_predicted_among_themselves(data, tmp_path):
    result = lora.bayesian_lora(
        model(), data, method="laplace", answers=[*torch.tensor([2, 5, 9]).numpy()], path=tmp_path, **SHORT
    )
    got = result.predict(data).probabilities
    assert got.shape == (24, 8, 3)
    torch.testing.assert_close(got.sum(-1), torch.ones(24, 8))
    counted = sum(int((data["labels"][:, 1:] == token).sum()) for token in (2, 5, 9))
    assert result.report["tokens"] == counted


def test_the_mean_over_all_batches_of_the_loss_has_the_gradient_of_the_mean_over_tokens(data):
    """All 28 batches of two of eight sequences, half of them short; the batches' own means are another loss."""
    labels = data["labels"][4:12]
    logits = torch.randn(8, 8, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    loss = lora.TokenLoss(labels)
    batches = [list(rows) for rows in itertools.combinations(range(8), 2)]
    targets = torch.cat([labels[:, 1:], torch.full((8, 1), -100)], 1)

    def mean(rows):
        return cross_entropy(logits[rows].flatten(0, 1), targets[rows].flatten(), ignore_index=-100)

    ours = sum(loss(logits[rows], labels[rows]) for rows in batches) / len(batches)
    own = sum(mean(rows) for rows in batches) / len(batches)
    right, here, usual = (torch.autograd.grad(x, logits)[0] for x in (mean(slice(None)), ours, own))
    torch.testing.assert_close(here, right, rtol=1e-12, atol=1e-15)
    assert (usual - right).norm() > 0.1 * right.norm()
    twice = lora.TokenLoss(labels, accumulation_steps=2)
    torch.testing.assert_close(2 * twice(logits, labels), loss(logits, labels))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"method": "magic"}, ValueError, "method must be .*, got 'magic'"),
        ({"members": 0}, ValueError, "members"),
        ({"draws": 1.5}, (TypeError, ValueError), "draws"),
        ({"steps": -1}, ValueError, "steps"),
        ({"prior_precision": 0}, ValueError, "prior_precision"),
        ({"answers": [3]}, ValueError, r"answers must be .*, got \[3\]"),
        ({"answers": [3, 3]}, ValueError, "answers"),
        (
            {"answers": [3, -100]},
            ValueError,
            r"answers must be .*, got \[3, -100\]",
        ),  # which would count what is left out
        ({"answers": [3, 11], "prior_precision": 1.0}, ValueError, "hold 11, and the model predicts 11"),
        ({"seed": -1}, ValueError, "bayesian_lora: seed must be a whole number, at least 0, got -1"),
        (
            {"data": {**MASKED, "labels": IDS + 1}},
            ValueError,
            r"bayesian_lora: labels \(or answers\) hold 11, and the model predicts 11",
        ),
        ({"data": {**MASKED, "labels": IDS - 1}}, ValueError, "bayesian_lora: labels hold -1: pass numbers of tokens"),
        ({"prior": 1.0}, TypeError, "prior must be a Gaussian"),
        ({"prior": bc.Gaussian({}, bc.precision.Diagonal({}, torch.tensor(1.0)))}, ValueError, "prior"),
        ({"mesh": 2}, TypeError, "mesh must be a DeviceMesh"),
        ({"mesh": 2, "method": "laplace"}, ValueError, "method='laplace' has one Gaussian"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module"),
        ({"model": lambda: base().requires_grad_(False)}, ValueError, "no parameter of the model asks for a gradient"),
        ({"data": {"input_ids": IDS}}, ValueError, "bayesian_lora: data has no targets"),
        ({"data": {**MASKED, "labels": IDS[:, 0]}}, ValueError, r"labels are \(24,\): pass one a token"),
        (
            {"data": [{k: x[i] for k, x in MASKED.items()} for i in range(24)]},
            ValueError,
            r"labels are \(192,\): .* a DataLoader makes of single sequences",
        ),
        (
            {"data": {**MASKED, "labels": IDS.where(torch.arange(24)[:, None] == 0, -100)}},
            ValueError,
            "of the 4 sequences that decide on the prior no label counts",
        ),
        ({"data": {**MASKED, "labels": torch.full_like(IDS, -100)}}, ValueError, "no label of data counts"),
        ({"data": {**MASKED, "labels": IDS.float()}}, TypeError, r"labels are torch\.float32: pass numbers of tokens"),
    ],
)
def test_bad_arguments_are_named(data, change, error, says):
    given = {"model": model, "data": data, **change}
    made = given.pop("model")
    made = made() if callable(made) else made
    with pytest.raises(error, match=says):
        lora.bayesian_lora(made, **given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize("answers", [None, [2, 5, 9]])
def test_labels_are_whole_numbers_of_any_kind_and_a_prior_that_is_given_needs_few(dtype, answers):
    few = {name: x[8:13] for name, x in MASKED.items()}
    call = {**SHORT, "steps": 4, "answers": answers}
    wanted = lora.bayesian_lora(model(), few, **call)
    found = lora.bayesian_lora(model(), {**few, "labels": few["labels"].to(dtype)}, **call)
    assert found.nll(few) == wanted.nll(few) and found.report == wanted.report


def test_labels_that_are_no_tokens_are_refused_where_they_are_scored():
    module, data = words()
    two = lora.Adapters(module, {name: torch.stack([p.detach()] * 2) for name, p in module.named_parameters()})
    for label, says in ((5, r"labels \(or answers\) hold 5, and the model predicts 5 tokens"), (-1, "labels hold -1")):
        labels = torch.full_like(data["labels"], label)
        with pytest.raises(ValueError, match=f"Adapters.nll: {says}"):
            two.nll({**data, "labels": labels})
        with pytest.raises(ValueError, match=f"TokenLoss: {says}"):
            lora.TokenLoss(labels)(torch.zeros(*labels.shape, 5), labels)


def test_the_program_of_the_page_runs_as_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "howto" / "adapters.md"
    names = {}
    exec(page.read_text().split("```python\n")[1].split("```")[0], names)
    assert names["prediction"].probabilities.shape == (48, 8, 11) and len(names["again"]) == 4


def words(dtype=torch.float32):
    """In the place of a model of PEFT, and data with int32 labels."""
    torch.manual_seed(0)
    tokens = torch.arange(60).reshape(12, 5) % 5
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5)).to(dtype)
    return module, {"input": tokens, "labels": ((tokens + 1) % 5).int()}


@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_were_there_stay_and_none_have_to_be_on(method):
    module, data = words()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    with torch.no_grad():
        made = lora.bayesian_lora(module, data, method=method, **SHORT)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters()) and made.nll(data) > 0


@pytest.mark.parametrize("given, dtype", [({}, torch.float16), ({"method": "sghmc", "lr": 1e6}, torch.float32)])
def test_adapters_that_diverge_are_refused(given, dtype):
    module, data = words(dtype)
    with pytest.raises(ValueError, match="bayesian_lora: training diverged"):
        lora.bayesian_lora(module, data, **SHORT | given)


# Adapters on two ranks: the draws, and the noise, of one process


def sampled(path, **given):
    """Draws of the call, from all ranks where there are several, and from the folder."""
    mesh = init_device_mesh("cpu", (world()[1],)) if dist.is_initialized() else None
    own = model(lora_dropout=0.1)
    found = lora.bayesian_lora(own, sequences(), path=path, mesh=mesh, **{**SHORT, "members": 3, "draws": 6, **given})
    return found.draws, lora.adapters(path, own).draws, found.report


def trained():
    """An adapter behind three steps of SGHMC, each rank with its half of the batch."""
    own, data = model(), sequences()
    rank, size = world()
    rows = slice(rank * 24 // size, (rank + 1) * 24 // size)
    some = {name: x[rows] for name, x in data.items()}
    chosen = [p for p in own.parameters() if p.requires_grad]
    chain = optim.SGHMC(chosen, 0.05, temperature=1e-3, generator=torch.Generator().manual_seed(3))
    loss = lora.TokenLoss(data["labels"])
    network = DistributedDataParallel(own) if size > 1 else own
    for _ in range(3):
        descend(chain, loss(network(**some), some["labels"]))
    return torch.cat([p.detach().flatten() for p in chosen])


@pytest.mark.slow
def test_on_two_ranks_the_draws_and_the_noise_are_those_of_one(tmp_path):
    """Members that are shared out are so bit for bit; of one chain on halves of a batch sums are rounded otherwise."""
    given = {"method": "sghmc", "prior_precision": "held out", "steps": 40}
    (draws, _, report), ranks = sampled(tmp_path / "one", **given), run(sampled, 2, tmp_path / "two", **given)
    for theirs, in_folder, their_report in ranks:
        assert their_report == report
        assert all(torch.equal(x, theirs[name]) and torch.equal(x, in_folder[name]) for name, x in draws.items())
    one, both = trained(), run(trained, 2)
    assert torch.equal(*both)
    torch.testing.assert_close(both[0], one, rtol=0, atol=1e-6)
    assert (
        one - torch.cat([p.flatten() for p in model().parameters() if p.requires_grad])
    ).norm() > 0.1  # noise moved it


# Chains over a LoRA adapter: the frozen base stays what it is, to the bit, and each chain is its single self


def adapted(dropout=0.2):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0", "3"], r=2, lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(base, config)


DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 4, dtype=torch.float64, generator=DATA), torch.randint(3, (24,), generator=DATA)


def made(model, tx):
    forward, params, buffers = bc.make_functional(model, inputs=lambda batch: (batch["x"],))

    def loss(params, batch, buffers):
        logits, buffers = forward.with_buffers(params, batch, buffers)
        return cross_entropy(logits, batch["labels"]), buffers

    return bc.make_step(loss, tx, buffers=buffers), params, forward


def test_chains_over_an_adapter_leave_the_base_to_the_bit_and_are_their_single_selves():
    model = adapted()
    frozen = copy.deepcopy(model.state_dict())
    tx = bc.sghmc(0.02, temperature=1 / 24)
    step, params, forward = made(model, tx)
    assert params.keys() == {n for n, p in model.named_parameters() if p.requires_grad} and all(
        "lora_" in n for n in params
    )
    batch, start = {"x": X, "labels": Y}, bc.stack([params] * 3)
    chains = bc.parallel(step, 3)
    state = chains.init(tx, start)
    singles = bc.unstack(state)
    draws = bc.sample(chains, start, state, batch, steps=4)
    assert all(torch.equal(frozen[name], x) for name, x in model.state_dict().items())
    for i, s in enumerate(singles):
        p = params
        for _ in range(4):
            p, s, _ = step(p, s, batch)
        for name in p:
            torch.testing.assert_close(draws[3][name][i], p[name], rtol=1e-10, atol=1e-12)
    model.eval()
    assert draws.predict(forward, [batch], transform=lambda f: f.softmax(-1)).shape == (24, 3)
    draw = bc.unstack(draws[3])[0]
    bc.write_back(model, draw, bc.unstack(draws.last[1].buffers)[0])
    with torch.no_grad():
        want = forward(draw, batch)
        torch.testing.assert_close(model(X), want)
        torch.testing.assert_close(model.merge_and_unload()(X), want)
