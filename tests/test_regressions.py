"""Defects that were found by trying to break it, each with the smallest case that showed it."""

import json

import pytest
import torch
from transformers import GenerationConfig

import tessellm
from tessellm.errors import MemberError, PromptError, RecipeError
from tessellm.rules import Product, make_rule

from conftest import build_model, perturbed, save_lora, save_member
from families import composition, family, random_ids
from stateful import BestPredictor


def ending(seed: int, eos: int):
    """A fine-tune of the same base with an end token of its own."""
    model = perturbed(build_model("llama", 0), seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    return model


def different_ends(**options) -> tessellm.ComposedForCausalLM:
    return tessellm.compose(build_model("llama", 0), {"one": ending(1, 3), "two": ending(2, 5)}, **options)


def test_gradients_are_finite_where_end_tokens_differ():
    model, ids = different_ends(), random_ids()
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@torch.no_grad()
def test_padding_after_text_does_not_shorten_the_window():
    model = composition(family(["llama"] * 4), rule=BestPredictor(window=8))
    ids, mask = random_ids(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, 40:55] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    everything = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
    last = model(ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1).logits[:, -1]
    torch.testing.assert_close(last, everything, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rule", [Product((0.3, -0.5)), make_rule("mixture", [0.3, -0.5])], ids=lambda rule: rule.name)
def test_a_rule_objects_weights_are_saved(members_dir, tmp_path, rule):
    experts = {"math": members_dir / "math", "coding": members_dir / "coding"}
    model = tessellm.compose(members_dir / "base", experts, rule=rule)
    model.save_pretrained(tmp_path / "out")
    loaded = tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
    ids = random_ids()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.weights == (0.3, -0.5)


@torch.no_grad()
def test_a_cache_of_another_rule_is_refused():
    model, ids = composition(family(["llama"] * 3)), random_ids()
    cache = model.new_cache()
    model(ids, past_key_values=cache)
    model.set_rule(weights=[0.3, -0.5])
    with pytest.raises(ValueError, match=r"another rule or other weights.*new_cache"):
        model(ids[:, :1], past_key_values=cache)


def test_a_refused_change_changes_nothing():
    model = composition(family(["llama"] * 3), rule={"name": "mixture", "switch_prob": 0.1})
    before, rule = model.config.to_dict(), model.rule
    for bad in ({"weights": [0.1, 0.2, 0.3]}, {"weights": [float("nan"), 1]}, {"weights": [1e38, 1]}):
        with pytest.raises(MemberError, match="expected 2 weights within ±1,000,000"):
            model.set_rule(**bad)
    with pytest.raises(RecipeError, match="unknown rule 'produkt'"):
        model.set_rule("produkt")
    assert (model.config.to_dict(), model.rule) == (before, rule)
    model.set_rule("product")
    assert model.config.rule == {"name": "product"}


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "mixture", "most": 0},
        {"name": "mixture", "most": "4"},
        {"name": "mixture", "most": True},
        {"name": "mixture", "switch_prob": 1.5},
        {"name": "mixture", "alone": True},
        {"name": "mixture", "product_share": -1},
    ],
    ids=str,
)
def test_parameters_of_rules_are_checked(rule):
    with pytest.raises(RecipeError, match="must be"):
        composition(family(["llama"] * 2), rule=rule)


def test_a_rule_without_a_name_says_so():
    with pytest.raises(RecipeError, match="needs the key 'name'"):
        composition(family(["llama"] * 2), rule={"most": 8})


def test_activated_lora_is_refused(members_dir, tmp_path):
    save_lora(members_dir / "base", tmp_path / "alora", alora_invocation_tokens=[5, 6])
    with pytest.raises(MemberError, match="activated LoRA"):
        tessellm.compose(members_dir / "base", {"math": tmp_path / "alora"})


def test_settings_of_the_config_and_idle_generation_settings_survive(members_dir, tmp_path):
    base = build_model("llama", 0)
    base.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    base.generation_config.temperature = 0.6
    model = tessellm.compose(base, {"one": perturbed(base, 1)})
    model.config.max_position_embeddings = 256
    model.save_pretrained(tmp_path / "out", self_contained=True, safe_serialization=True)
    assert tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out").config.max_position_embeddings == 256


def test_a_shard_that_was_replaced_is_noticed(members_dir, tmp_path, tiny_tokenizer):
    import os
    import shutil

    save_member(perturbed(build_model("llama", 0), 7), tmp_path / "math", tiny_tokenizer, max_shard_size="40KB")
    model = tessellm.compose(members_dir / "base", {"math": tmp_path / "math"})
    model.save_pretrained(tmp_path / "out")
    first, *_, last = sorted((tmp_path / "math").glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    stat = last.stat()
    first.write_bytes(data)
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns - 1))
    with pytest.raises(tessellm.TessellmError, match="'math' has changed"):
        tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
    shutil.rmtree(tmp_path / "math")


def test_a_member_that_computes_nan_is_named():
    models = family(["llama"] * 3)
    models[2].lm_head.weight.data[5] = float("nan")
    with pytest.raises(MemberError, match="'two' computes NaN"):
        composition(models)(random_ids())


@pytest.mark.parametrize("rule", ["product", BestPredictor()], ids=["product", "stateful"])
def test_a_broken_member_is_named_whatever_the_rule_reads(rule):
    """A rule without state reads one row of a prompt, and a prompt may be one token."""
    models = family(["llama"] * 3)
    models[2].lm_head.weight.data[5] = float("inf")
    model = composition(models, rule=rule)
    for length in (1, 6):
        with pytest.raises(MemberError, match="'two' computes NaN"):
            model.generate(random_ids(1, length), max_new_tokens=2)


@pytest.mark.parametrize("rule", ["product", BestPredictor()], ids=["product", "stateful"])
def test_a_composition_drafts_for_another_model(rule):
    main, prompt = build_model("llama", 7), random_ids(1, 6)
    options = {"max_new_tokens": 12, "do_sample": False}
    drafted = main.generate(prompt, assistant_model=composition(family(["llama"] * 3), rule=rule), **options)
    assert torch.equal(drafted, main.generate(prompt, **options))


def test_members_without_weights_are_refused():
    empty = build_model("llama", 0).to("meta")
    with pytest.raises(MemberError, match="'math' is on the device 'meta', without weights"):
        tessellm.compose(build_model("llama", 0), {"math": empty})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"members": []}, "is damaged: members: expected a list of members, the base first and at least one expert"),
        ({"rule": None}, "is damaged"),
        ({"rule": {"name": ["product"]}}, "unknown rule"),
    ],
)
def test_what_a_hand_spoilt_in_a_config_is_said(members_dir, tmp_path, cli, change, says):
    tessellm.compose(members_dir / "base", {"math": members_dir / "math"}).save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    for plan in ((), ("--plan",)):
        ran = cli("inspect", tmp_path / "out", *plan)
        assert (ran.code, says in ran.err) == (2, True), ran.err


def test_an_empty_stop_text_is_refused(members_dir, cli, tmp_path):
    tessellm.compose(members_dir / "base", {"math": members_dir / "math"}).save_pretrained(tmp_path / "out")
    ran = cli("generate", tmp_path / "out", "abc", "--stop", "")
    assert (ran.code, ran.out) == (2, "")
    assert "must not be empty" in ran.err


def test_what_cannot_be_done_says_so():
    model = composition(family(["llama"] * 2))
    with pytest.raises(PromptError, match="inputs_embeds are not taken"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(MemberError, match="self_contained=True"):
        model.push_to_hub("somebody/something")
