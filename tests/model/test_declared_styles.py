"""Styles as a user declares them: in `compose` and recipes, what they become, and what is refused."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.errors import MemberError, RecipeError
from tessellm.inspect.inspection import inspect_model
from tessellm.inspect.planning import read_needs
from tessellm.model.variants import meant_rule
from tessellm.recipe import read_recipe
from tessellm.rules import Mixture, product

from conftest import build_model, character_tokenizer, perturbed, save_member
from stateful import BestPredictor


@pytest.fixture(scope="module")
def declared(chatting) -> dict[str, Any]:
    experts = chatting["experts"]
    return {"base": chatting["base"], "experts": {**experts, "two": {"source": experts["two"], "style": True}}}


@pytest.fixture(scope="module")
def model(declared) -> Any:
    return tessellm.compose(**declared)


def test_a_declared_style_is_one_of_the_rule_mixture(model):
    rule = model.rule.rule
    assert isinstance(rule, Mixture)
    assert rule.styles == (2,)
    assert rule.candidates(2) == [1]
    assert [row["kind"] for row in inspect_model(model)["members"]] == ["full", "full", "full, style"]


def test_a_recipe_says_it_in_one_word_and_a_checkpoint_keeps_it(declared, model, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(declared))
    made = read_recipe(tmp_path / "recipe.json").compose(tmp_path)
    assert made.rule == model.rule
    made.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.rule == model.rule


def test_what_was_declared_outlives_other_rules(declared, tmp_path):
    made = tessellm.compose(**declared, rule="product")
    made.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.rule == {"name": "product"}
    assert [row["kind"] for row in inspect_model(loaded)["members"]][2] == "full, style"
    for rule in ("mixture", "auto", {"name": "mixture"}):
        loaded.set_rule("product")
        loaded.set_rule(rule)
        assert loaded.rule.rule.styles == (2,)


def test_a_plan_of_a_recipe_knows_the_rule(declared, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(declared))
    assert read_needs(str(tmp_path / "recipe.json")).rule == "mixture"


def test_the_engine_writes_what_generate_writes(model):
    prompts = [
        model.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in ("HELLO", "a longer question, which tells more")
    ]
    requests = Engine(model, slots=2).generate(prompts, Sampling(10))
    for prompt, request in zip(prompts, requests, strict=True):
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :]
        assert request.tokens == whole[: len(request.tokens)].tolist()


def test_styles_alone_are_eq_2(chatting):
    styles = {name: {"source": source, "style": True} for name, source in chatting["experts"].items()}
    for rule in ("auto", "product"):
        made = tessellm.compose(chatting["base"], styles, rule=rule)
        assert made.config.rule == {"name": "product"}
    made.set_rule("auto")
    assert made.config.rule == {"name": "product"}
    logp = made(torch.tensor([[1, 2, 3]]), output_member_logprobs=True)
    torch.testing.assert_close(logp.logits, product(logp.member_logprobs))


def test_without_a_chat_template_the_rule_is_mixture_all_the_same(tmp_path):
    base, plain = build_model(), character_tokenizer(chat_template=None)
    sources = [str(save_member(perturbed(base, seed), tmp_path / str(seed), plain)) for seed in range(3)]
    made = tessellm.compose(sources[0], {"one": {"source": sources[1], "style": True}, "two": sources[2]})
    assert made.config.rule == {"name": "mixture", "styles": (1,)}
    made.set_rule("product")
    assert meant_rule(made, "auto") == "mixture"
    made.set_rule("auto")
    assert made.config.rule == {"name": "mixture", "styles": (1,)}


def test_what_cannot_be_a_style_is_refused_before_anything_is_loaded():
    style = {"source": "nowhere", "style": True}
    with pytest.raises(MemberError, match="'base' cannot be a style"):
        tessellm.compose(style, {"one": "nowhere"})
    with pytest.raises(RecipeError, match="the rule 'best-predictor' knows no styles, and 'two' is declared one"):
        tessellm.compose("nowhere", {"one": "nowhere", "two": style}, rule=BestPredictor())
    with pytest.raises(MemberError, match="member 'one': style: expected true or false"):
        tessellm.compose("nowhere", {"one": {"source": "nowhere", "style": "capitals"}})


def test_styles_of_other_members_are_refused(model):
    with pytest.raises(RecipeError, match="expected styles among 2 experts"):
        model.set_rule({"name": "mixture", "styles": [3]})
