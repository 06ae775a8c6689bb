"""Language models: labels of the next token are moved once, and a base in bfloat16 carries adapters in float32."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc
from bayesopt_chain.modules import Reader
from bayesopt_chain.posterior import fit

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VOCABULARY = 11


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=16, **SMALL)
    return transformers.LlamaForCausalLM(config).eval()


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()


def tokens_classified() -> nn.Module:
    config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=3, **SMALL)
    return transformers.BertForTokenClassification(config).eval()


def masked() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **SMALL)).eval()


def sequence_to_sequence() -> nn.Module:
    sizes = {"d_model": 8, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes)).eval()


def batch() -> dict[str, torch.Tensor]:
    """Six sequences, half of them with a padded end that does not count."""
    ids = torch.randint(1, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:3, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def translator() -> nn.Module:
    """With a dropout of 0, so that its members' training draws nothing."""
    sizes = {
        f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))
    }
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 8, "max_position_embeddings": 16, "dropout": 0.0}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes, **tokens)
    return transformers.BartForConditionalGeneration(config).eval()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [sequence_to_sequence, translator])
def test_the_decoder_of_an_encoder_decoder_sees_its_labels_as_in_the_models_own_loss(make):
    """Labels of the inputs' shape: BART would take the inputs in their place, without a word."""
    data = {k: x.repeat(4, 1) for k, x in batch().items()}
    data["labels"] = torch.where(data["labels"] < 0, data["labels"], data["labels"].flip(1).clamp(min=1))
    model, few = make(), {k: x[:3] for k, x in data.items()}
    forward, params, _ = bc.make_functional(model)
    with torch.no_grad():
        own = model(**few)
        torch.testing.assert_close(forward(params, few).logits, own.logits, rtol=0, atol=0)
    inputs = {
        "input_ids": data["input_ids"],
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(data["labels"]),
    }
    fits = [
        bc.fit_laplace(
            model,
            bc.likelihoods.categorical(),
            [some],
            subset=lambda name: "lm_head" in name or "layer_norm" in name,
            structure="diagonal",
            tune=None,
        )
        for some in (data, (inputs, data["labels"]))
    ]
    pairs = [fits[0].predict(few), fits[1].predict({k: x[:3] for k, x in inputs.items()})]
    torch.testing.assert_close(*pairs, rtol=0, atol=0)
    once = {"members": 1, "steps": 20, "lr": 1e-3, "batch_size": 4, "progress": False}
    ensemble = bc.posterior_ensemble(make, data, bc.likelihoods.categorical(), **once)
    answers = [ensemble.predict(some).probabilities for some in (few, {k: x[:3] for k, x in inputs.items()})]
    torch.testing.assert_close(*answers, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "moved"),
    [(llama, True), (adapted, True), (tokens_classified, False), (masked, False), (sequence_to_sequence, False)],
)
def test_labels_are_moved_where_the_models_own_loss_moves_them(make, moved):
    model, data = make(), batch()
    if not moved:
        data["labels"] = data["labels"] % 3
    model.train()
    inputs, targets = Reader(model)(data)
    decoder = {"decoder_input_ids"} if make is sequence_to_sequence else set()
    assert set(inputs) == {"input_ids"} | decoder and model.training
    right = torch.cat([data["labels"][:, 1:], torch.full((6, 1), -100)], 1) if moved else data["labels"]
    assert torch.equal(targets, right)


def test_targets_of_a_causal_model_have_the_models_own_loss():
    model, data = llama(), batch()
    _, targets = Reader(model)(data)
    logits = model(input_ids=data["input_ids"]).logits
    own = cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(own, model(**data).loss)


def test_a_laplace_fit_is_of_the_next_token():
    model, data = llama(), batch()
    moved = torch.cat([data["labels"][:, 1:], torch.full((6, 1), -100)], 1)
    settings = {"structure": "diagonal", "subset": ["lm_head.weight"], "tune": None, "curvature": "empirical_fisher"}
    by_key, by_hand = (
        bc.fit_laplace(model, bc.likelihoods.categorical(), [one], **settings)
        for one in (data, ({"input_ids": data["input_ids"]}, moved))
    )
    assert torch.equal(by_key.log_evidence, by_hand.log_evidence)


@pytest.mark.slow
def test_the_one_call_learns_the_next_token_and_says_so():
    ids = (torch.arange(7) + torch.arange(60)[:, None]) % VOCABULARY  # each token is followed by the next number
    data = {"input_ids": ids, "labels": ids}
    found = bc.posterior_ensemble(
        llama, data, bc.likelihoods.categorical(), members=2, steps=80, lr=0.02, progress=False
    )
    follows = found.predict({"input_ids": ids[:5]}).mean[:, :-1].argmax(-1)
    assert (follows == ids[:5, 1:]).double().mean() > 0.9
    assert found.report.chosen["labels"] == "those of the next token"


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids):
        return self.inner(input_ids=input_ids).logits


def test_labels_that_are_the_inputs_are_refused_where_nothing_moves_them():
    with pytest.raises(ValueError, match=r"copying its inputs[\s\S]*next_labels"):
        bc.fit_laplace(Wrapped().eval(), bc.likelihoods.categorical(), [batch()], subset="all", structure="diagonal")


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal"])
def test_adapters_in_float32_on_a_base_in_bfloat16_have_the_posterior_of_a_base_in_float32(structure):
    """The base's weights are the same numbers in both; what is left is the rounding of its activations, eps = 1/128."""
    peft = pytest.importorskip("peft")
    model = llama().to(torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.3)
    variances = [
        bc.fit_laplace(
            m, bc.likelihoods.categorical(), [batch()], subset="all", structure=structure, tune=None
        ).posterior.marginal_variance
        for m in (model, copy.deepcopy(model).float())
    ]
    for name, narrow in variances[0].items():
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow, variances[1][name], rtol=0.05, atol=0)


def many_outputs(rows=6, positions=8):
    """Classes at positions of a sequence, from 128 parameters: 6 data of 8 x 16 outputs."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16, bias=False)).double().eval()
    x = torch.randn(rows, positions, 8, dtype=torch.float64)
    return module, (x, torch.randint(16, (rows, positions)))


@pytest.mark.filterwarnings("error")
def test_a_matrix_of_few_sampled_labels_is_of_low_rank_and_says_so_and_the_default_takes_more():
    """Against the explicit sum of J^T H J. With ``samples=1`` six rows are all that there is of 128 directions."""
    module, (x, y) = many_outputs()
    given = {"structure": "dense", "subset": "all", "tune": None, "prior_precision": 1.0}
    p = module(x).softmax(-1).detach()
    hessian = torch.diag_embed(p) - p[..., None] * p[..., None, :]  # [6, 8, 16, 16]
    exact = torch.einsum("btkl,bti,btj->kilj", hessian, x, x).reshape(128, 128) + torch.eye(128)
    variance = torch.linalg.inv(exact).diagonal()

    def wider(**more):
        fitted = bc.fit_laplace(module, bc.likelihoods.categorical(), [(x, y)], **given, **more)
        found = fitted.posterior.marginal_variance["0.weight"].flatten()
        return float(found.sum() / variance.sum()), fitted

    with pytest.warns(UserWarning, match="rank 6 at most, of 128 parameters.*samples=22 or more"):
        few, _ = wider(curvature="fisher", samples=1)
    torch.manual_seed(0)
    enough, fitted = wider(curvature="fisher")
    exactly, _ = wider()
    assert fitted.model.how.options["samples"] == -(-4 * 128 // 6) and "sampled labels" in repr(fitted)
    assert exactly == pytest.approx(1) and few > 2 and enough < 1.5


@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
def test_many_outputs_a_datum_take_sampled_labels_and_are_validated_by_draws(structure):
    """1,024 outputs a datum; the covariance of one datum's outputs is never made."""
    module, batch = many_outputs(rows=16, positions=64)
    given = {"structure": structure, "subset": "all", "tune": "validation", "validation": [batch]}
    fitted = bc.fit_laplace(module, bc.likelihoods.categorical(), [batch], **given)
    assert fitted.model.how.curvature == "fisher" and "fisher from 1 sampled labels a datum" in repr(fitted)
    few = many_outputs(rows=16, positions=62)[1]
    small = bc.fit_laplace(module, bc.likelihoods.categorical(), [few], structure=structure, subset="all", tune=None)
    assert small.model.how.curvature == "ggn" and "sampled" not in repr(small)


def test_the_density_of_held_out_targets_by_draws_is_that_of_the_covariance(monkeypatch):
    module, batch = many_outputs(rows=4)
    batch[1][0, 3:] = -100
    likelihood = bc.likelihoods.categorical()
    fitted = bc.fit_laplace(module, likelihood, [batch], subset="all", tune=None, prior_precision=30.0)
    exact = fit._log_density(fitted, batch, batch[1])
    monkeypatch.setattr(fit, "MANY", 0)
    monkeypatch.setattr(fit, "DRAWS", 4000)
    torch.testing.assert_close(fit._log_density(fitted, batch, batch[1]), exact, rtol=0, atol=0.2)
