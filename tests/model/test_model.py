"""The composed model against a float64 reference, and against itself: cached, padded, sliced, in other dtypes."""

import copy

import pytest
import torch
from transformers import DynamicCache

import tessellm
from tessellm.errors import MemberError, PromptError
from tessellm.rules import product

from conftest import CONTEXT, build_model
from families import composition, family, random_ids
from stateful import BestPredictor

ARCHITECTURES = ["gpt2", "llama", "gemma2", "qwen2"]


def reference(models: list, ids: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Every member run by itself in float64, then Eq. 2."""
    logp = torch.stack([copy.deepcopy(model).double()(ids).logits.log_softmax(-1) for model in models])
    return product(logp, weights)


@torch.no_grad()
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.7, -0.3]])
def test_equals_the_float64_reference(arch, weights):
    models = family([arch] * 3)
    ids = random_ids()
    error = (composition(models, weights)(ids).logits - reference(models, ids, weights)).abs().max()
    assert error < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_equals_the_float64_reference_for_every_k(k):
    models = family(["llama"] * (k + 1))
    weights = [1.0, 1.0, 0.5, -0.3, 0.25, 0.1][:k]
    ids = random_ids()
    # every member's logits are rounded, by processors differently, and count by its weight
    rounding = 5e-6 * (1 + sum(map(abs, weights)))
    assert (composition(models, weights)(ids).logits - reference(models, ids, weights)).abs().max() < rounding


@torch.no_grad()
def test_equals_the_float64_reference_for_a_mixture_of_architectures():
    models = family(["gemma2", "llama", "gpt2", "qwen2"])
    ids = random_ids()
    assert (
        composition(models, [0.7, -0.3, 0.4])(ids).logits - reference(models, ids, [0.7, -0.3, 0.4])
    ).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_one_expert_with_weight_one_is_that_expert_exactly(arch):
    base, expert = family([arch] * 2)
    ids = random_ids()
    assert torch.equal(composition([base, expert])(ids).logits, expert(ids).logits.float().log_softmax(-1))


@torch.no_grad()
@pytest.mark.parametrize("archs", [["gpt2"] * 3, ["gemma2"] * 3, ["llama", "gpt2", "gemma2"]])
@pytest.mark.parametrize("chunks", [[24], [1] * 24, [5, 1, 13, 4, 1]])
def test_token_by_token_equals_the_whole_sequence(archs, chunks):
    model = composition(family(archs))
    ids = random_ids()
    cache, rows, start = model.new_cache(), [], 0
    for size in chunks:
        rows.append(model(ids[:, start : start + size], past_key_values=cache).logits)
        start += size
    torch.testing.assert_close(torch.cat(rows, 1), model(ids, use_cache=False).logits, rtol=0, atol=2e-5)


@torch.no_grad()
def test_logits_to_keep_counts_from_the_end_or_names_positions():
    model = composition(family(["llama"] * 3))
    ids = random_ids()
    everything = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=4).logits, everything[:, -4:], rtol=0, atol=1e-6)
    where = torch.tensor([3, 0, 7])
    torch.testing.assert_close(model(ids, logits_to_keep=where).logits, everything[:, where], rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_rule_with_state_sees_the_same_in_any_cut():
    model = composition(family(["llama"] * 3), rule=BestPredictor())
    ids = random_ids(length=30)
    everything = model(ids, use_cache=False).logits
    for keep in (1, 5, 20):  # a short tail of a long prompt needs rows for the window alone
        kept = model(ids, use_cache=False, logits_to_keep=keep).logits
        torch.testing.assert_close(kept, everything[:, -keep:], rtol=0, atol=1e-5)
    where = torch.tensor([29, 2])
    torch.testing.assert_close(model(ids, logits_to_keep=where).logits, everything[:, where], rtol=0, atol=1e-5)
    cache = model.new_cache()
    parts = [model(part, past_key_values=cache).logits for part in ids.split([1, 9, 1, 1, 18], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), everything, rtol=0, atol=1e-5)
    cache = model.new_cache()
    model(ids[:, :2], past_key_values=cache)
    tail = model(ids[:, 2:], past_key_values=cache, logits_to_keep=2).logits  # restarts inside the chunk
    torch.testing.assert_close(tail, everything[:, -2:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_slicing_in_time_changes_nothing(monkeypatch):
    model = composition(family(["llama"] * 3), rule=BestPredictor())
    ids = random_ids()
    whole = model(ids, output_member_logprobs=True)
    monkeypatch.setattr(tessellm.model.rows, "CHUNK_ELEMENTS", 3 * 3 * 64 * 7)
    sliced = model(ids, output_member_logprobs=True)
    assert torch.equal(whole.logits, sliced.logits)
    assert torch.equal(whole.member_logprobs, sliced.member_logprobs)


@torch.no_grad()
def test_member_logprobs_are_the_members_own():
    models = family(["qwen2"] * 3)
    ids = random_ids()
    logp_MBTV = composition(models)(ids, output_member_logprobs=True, logits_to_keep=5).member_logprobs
    for logp_BTV, model in zip(logp_MBTV, models, strict=True):
        torch.testing.assert_close(logp_BTV, model(ids).logits[:, -5:].log_softmax(-1))


@torch.no_grad()
def test_loss_is_the_composed_cross_entropy():
    model = composition(family(["llama"] * 3))
    ids = random_ids()
    output = model(ids, labels=ids)
    expected = -output.logits[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    torch.testing.assert_close(output.loss, expected)
    loss, logits, *_ = model(ids, labels=ids, return_dict=False)
    assert torch.equal(loss, output.loss)
    assert torch.equal(logits, output.logits)


@torch.no_grad()
def test_half_precision_members_are_combined_in_float32():
    models = [model.to(torch.bfloat16) for model in family(["llama"] * 3)]
    ids = random_ids()
    composed = composition(models)
    logits = composed(ids).logits
    assert logits.dtype == torch.float32
    logp = torch.stack([member(ids).logits.double().log_softmax(-1) for member in composed.members.values()])
    assert (logits - product(logp)).abs().max() < 1e-4
    assert models[0](ids).logits.dtype == torch.bfloat16  # a model that was given stays as it was


@torch.no_grad()
def test_members_may_have_dtypes_of_their_own():
    models = family(["llama"] * 3)
    models[1].to(torch.float64)
    models[2].to(torch.bfloat16)
    assert composition(models)(random_ids()).logits.isfinite().all()


def test_the_config_speaks_for_all_members():
    models = [build_model("llama", 0), build_model("llama", 1, max_position_embeddings=48), build_model("gpt2", 2)]
    config = composition(models).config
    assert config.vocab_size == 64
    assert config.max_position_embeddings == 48
    assert config.member_names == ["base", "one", "two"]
    assert config.weights == (1.0, 1.0)


def test_weights_and_rule_can_be_changed():
    models = family(["llama"] * 3)
    model, ids = composition(models), random_ids()
    model.set_rule(weights=[0.7, -0.3])
    with torch.no_grad():
        assert (model(ids).logits - reference(models, ids, [0.7, -0.3])).abs().max() < 1e-5
    assert model.config.weights == (0.7, -0.3)


def test_gradients_reach_every_member():
    model = composition(family(["llama"] * 3))
    ids = random_ids()
    model(ids, labels=ids).loss.backward()
    for name in model.config.member_names:
        assert all(parameter.grad is not None for parameter in model.member(name).parameters())


def test_bad_input_is_refused_in_one_sentence():
    model = composition(family(["llama"] * 3))
    with pytest.raises(PromptError, match="the prompt is empty"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(PromptError, match=f"{CONTEXT + 1} tokens are too many.*is {CONTEXT}"):
        model(torch.ones(1, CONTEXT + 1, dtype=torch.long))
    with pytest.raises(TypeError, match=r"expected a ComposedCache.*got DynamicCache"):
        model(random_ids(), past_key_values=DynamicCache())
    with pytest.raises(MemberError, match="cannot be made from its config alone"):
        tessellm.ComposedForCausalLM(model.config)
    with pytest.raises(MemberError, match="resize the members"):
        model.resize_token_embeddings(80)
