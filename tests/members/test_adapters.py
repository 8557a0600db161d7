"""Adapters: one copy of the base in memory, exact outputs, nothing leaks into the base, others are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.errors import MemberError
from tessellm.members.shared_tensors import unique_bytes

from conftest import build_model, character_tokenizer, logits, perturbed, save_lora, save_member


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def peft_logits(members: Path, adapter: Path) -> torch.Tensor:
    """What PEFT itself computes."""
    return logits(PeftModel.from_pretrained(load(members / "base"), adapter).eval())


def adapter_bytes(folder: Path) -> int:
    return (folder / "adapter_model.safetensors").stat().st_size


def test_members_are_what_peft_and_the_base_compute(members_dir: Path) -> None:
    experts = {"math": members_dir / "lora_math", "coding": members_dir / "lora_coding"}
    model = tessellm.compose(members_dir / "base", experts)
    torch.testing.assert_close(logits(model.base), logits(load(members_dir / "base")), rtol=0, atol=0)
    for name, folder in experts.items():
        torch.testing.assert_close(logits(model.member(name)), peft_logits(members_dir, folder), rtol=0, atol=0)
    assert not torch.equal(logits(model.member("math")), logits(model.member("coding")))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_experts_share_one_copy_of_the_base(members_dir: Path, dtype: torch.dtype | None) -> None:
    experts = {f"e{i}": members_dir / ("lora_math" if i % 2 else "lora_coding") for i in range(4)}
    model = tessellm.compose(members_dir / "base", experts, rule="product")
    before = logits(model)
    if dtype is not None:
        model.to(dtype)
    base = unique_bytes([load(members_dir / "base").to(dtype or torch.float32)])
    extra = unique_bytes(model.members.values()) - base
    assert extra <= 4 * adapter_bytes(members_dir / "lora_math")
    shared = dict(model.base.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    for name in experts:
        assert dict(model.member(name).named_parameters())["model.layers.0.mlp.up_proj.weight"] is shared
    assert shared.dtype == (dtype or torch.float32)
    if dtype is not None:  # half precision moves the numbers, not the meaning
        torch.testing.assert_close(logits(model).exp(), before.exp(), rtol=0, atol=0.2)


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "all linear": {"target_modules": "all-linear"},
    "output layer": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "token rows": {"trainable_token_indices": [5, 6]},
}


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning")  # PEFT's, while the adapter is made
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_lora_share_the_base(members_dir: Path, tmp_path: Path, variant: str) -> None:
    adapter = save_lora(members_dir / "base", tmp_path / "adapter", 7, **VARIANTS[variant])
    plain = load(members_dir / "base")
    model = tessellm.compose(members_dir / "base", {"x": adapter})
    torch.testing.assert_close(logits(model.member("x")), peft_logits(members_dir, adapter), rtol=0, atol=0)
    torch.testing.assert_close(logits(model.base), logits(plain), rtol=0, atol=0)
    assert model.config.members[1]["kind"] == "adapter"
    model.save_pretrained(tmp_path / "out", self_contained=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)


OTHER_METHODS = {
    "ia3": (
        peft.IA3Config,
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "loha": (peft.LoHaConfig, {"target_modules": ["q_proj", "v_proj"]}),
    "lokr": (peft.LoKrConfig, {"target_modules": ["q_proj", "v_proj"]}),
    "oft": (peft.OFTConfig, {"target_modules": ["q_proj"], "oft_block_size": 8}),
    "vera": (peft.VeraConfig, {"target_modules": ["q_proj"], "r": 4}),
    "ln": (peft.LNTuningConfig, {"target_modules": ["input_layernorm"]}),
}


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # PEFT's, of the norms that it supports
@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_leave_the_base_alone(members_dir: Path, tmp_path: Path, method: str) -> None:
    config, settings = OTHER_METHODS[method]
    made = get_peft_model(load(members_dir / "base"), config(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    made.save_pretrained(tmp_path / "adapter")
    plain = load(members_dir / "base")
    model = tessellm.compose(members_dir / "base", {"x": tmp_path / "adapter"})
    torch.testing.assert_close(logits(model.base), logits(plain), rtol=0, atol=0)
    torch.testing.assert_close(logits(model.member("x")), peft_logits(members_dir, tmp_path / "adapter"))
    assert not torch.equal(logits(model.member("x")), logits(plain))


FULL = {
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save: lm_head"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights: olora"),
}


@pytest.mark.parametrize("case", FULL)
def test_adapters_that_change_the_base_become_full_members(members_dir: Path, tmp_path: Path, case: str) -> None:
    settings, reason = FULL[case]
    adapter = save_lora(members_dir / "base", tmp_path / "adapter", 7, **settings)
    check_full(members_dir / "base", adapter, reason, tmp_path)


def test_trained_biases_do_not_leak_into_the_base(tmp_path: Path) -> None:
    base = save_member(build_model("qwen2"), tmp_path / "base", character_tokenizer())  # q, k and v have biases
    adapter = save_lora(base, tmp_path / "adapter", 7, bias="all")
    check_full(base, adapter, "carries tensors of the base in its own version", tmp_path)


def check_full(base_folder: Path, adapter: Path, reason: str, tmp_path: Path) -> None:
    """The adapter was merged into a model of its own; the base is untouched, in memory too."""
    loaded = load(base_folder)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    model = tessellm.compose(loaded, {"x": adapter}, tokenizer=character_tokenizer())
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    expected = logits(PeftModel.from_pretrained(load(base_folder), adapter).eval())
    torch.testing.assert_close(logits(model.member("x")), expected, rtol=1e-3, atol=1e-3)
    assert model.config.members[1]["kind"] == "full"
    assert any(reason in note for note in model.notes)
    model.save_pretrained(tmp_path / "out", self_contained=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")  # PEFT's, while the adapter is made
def test_resized_embeddings_become_a_full_member_that_the_vocabulary_judges(members_dir: Path, tmp_path: Path) -> None:
    grown = load(members_dir / "base")
    grown.resize_token_embeddings(72, mean_resizing=False)
    made = get_peft_model(grown, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    made.save_pretrained(tmp_path / "padded", save_embedding_layers=True)
    model = tessellm.compose(members_dir / "base", {"x": tmp_path / "padded"})  # padding rows are no tokens
    assert model.member("x").config.vocab_size == 72
    assert model.config.vocab_size == 64
    torch.testing.assert_close(logits(model.member("x"))[..., :64], logits(model.base), rtol=1e-4, atol=1e-4)

    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "padded")
    with pytest.raises(tessellm.TessellmError, match="<new>"):
        tessellm.compose(members_dir / "base", {"x": tmp_path / "padded"})


def test_a_loaded_base_stays_unchanged(members_dir: Path) -> None:
    base = load(members_dir / "base").train()
    base.model.layers[0].requires_grad_(False)
    modules = [(name, type(module), module.training) for name, module in base.named_modules()]
    parameters = {name: (parameter, parameter.requires_grad) for name, parameter in base.named_parameters()}
    values = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    state = torch.random.get_rng_state()
    model = tessellm.compose(base, {"x": members_dir / "lora_math"}, tokenizer=character_tokenizer())
    assert torch.equal(torch.random.get_rng_state(), state)
    logits(model)
    assert [(name, type(module), module.training) for name, module in base.named_modules()] == modules
    for name, parameter in base.named_parameters():
        assert (parameter, parameter.requires_grad) == parameters[name]
        assert torch.equal(parameter, values[name])
    assert not model.training
    assert model.base.model.layers[0].mlp.up_proj.weight is base.model.layers[0].mlp.up_proj.weight


def test_a_peft_model_in_memory_is_an_expert_even_on_the_same_base(members_dir: Path) -> None:
    base = load(members_dir / "base")
    plain, expected = logits(base), peft_logits(members_dir, members_dir / "lora_math")
    adapted = PeftModel.from_pretrained(base, members_dir / "lora_math").eval()  # puts its layers into base itself
    for given in (base, adapted):
        model = tessellm.compose(given, {"x": adapted}, tokenizer=character_tokenizer())
        torch.testing.assert_close(logits(model.base), plain, rtol=0, atol=0)
        torch.testing.assert_close(logits(model.member("x")), expected, rtol=0, atol=0)
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=0)


def test_a_named_adapter_of_several_is_taken_if_it_is_active(members_dir: Path) -> None:
    adapted = PeftModel.from_pretrained(load(members_dir / "base"), members_dir / "lora_math", adapter_name="first")
    adapted.load_adapter(members_dir / "lora_coding", adapter_name="second")
    adapted.set_adapter("second")
    model = tessellm.compose(members_dir / "base", {"x": adapted.eval()})
    expected = peft_logits(members_dir, members_dir / "lora_coding")
    torch.testing.assert_close(logits(model.member("x")), expected, rtol=0, atol=0)


def refusal(base: Any, expert: Any, **options: Any) -> str:
    with pytest.raises(MemberError) as caught:
        tessellm.compose(base, {"x": expert}, **options)
    message = str(caught.value)
    assert "'x'" in message or "base" in message
    assert "\n" not in message
    return message


def test_loaded_models_that_cannot_be_taken(members_dir: Path) -> None:
    adapted = PeftModel.from_pretrained(load(members_dir / "base"), members_dir / "lora_math")
    other = save_lora_on(perturbed(load(members_dir / "base"), 9))
    assert "made on another base" in refusal(members_dir / "base", other)
    assert "Give the PeftModel, or its folder" in refusal(members_dir / "base", adapted.get_base_model())
    adapted.merge_adapter()
    assert "unmerge_adapter()" in refusal(adapted, members_dir / "lora_math")
    assert "expected a causal language model; got Linear" in refusal(members_dir / "base", torch.nn.Linear(1, 1))


def save_lora_on(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_an_adapter_of_another_shape_is_refused(members_dir: Path, tmp_path: Path) -> None:
    wide = save_member(build_model("llama", hidden_size=48), tmp_path / "wide")
    adapter = save_lora(wide, tmp_path / "adapter")
    message = refusal(members_dir / "base", {"source": adapter, "any_base": True})
    assert "does not fit this base: size mismatch" in message
    assert message.endswith(f"this one says that it was trained on {str(wide)!r}")
    gpt2 = save_member(build_model("gpt2"), tmp_path / "gpt2", character_tokenizer())
    assert "does not fit this base" in refusal(gpt2, {"source": members_dir / "lora_math", "any_base": True})
    deeper = save_member(build_model("llama", num_hidden_layers=3), tmp_path / "deeper")
    adapter = save_lora(deeper, tmp_path / "deep")
    assert "tensors have no counterpart" in refusal(members_dir / "base", {"source": adapter, "any_base": True})


def test_an_adapter_of_another_base_of_the_same_shape_is_refused(members_dir: Path, tmp_path: Path) -> None:
    message = refusal(members_dir / "math", members_dir / "lora_math")
    assert f"was trained on {members_dir / 'base'}" in message
    assert "any_base: true" in message
    tessellm.compose(members_dir / "math", {"x": {"source": members_dir / "lora_math", "any_base": True}})
    copied = shutil.copytree(members_dir / "base", tmp_path / "copied")  # the same weights elsewhere
    assert not adapter_notes(tessellm.compose(copied, {"x": members_dir / "lora_math"}))
    namesake = save_member(perturbed(load(members_dir / "base"), 5), tmp_path / "base", character_tokenizer())
    assert "was trained on" in refusal(namesake, members_dir / "lora_math")  # the same name, other weights
    refusal(load(members_dir / "math"), members_dir / "lora_math", tokenizer=character_tokenizer())


def adapter_notes(model: Any) -> list[str]:
    return [note for note in model.notes if note.startswith("x: the adapter")]


def test_an_adapter_whose_base_is_not_here_is_taken_with_a_note(own_members: Path) -> None:
    file = own_members / "lora_math" / "adapter_config.json"
    config = json.loads(file.read_text())
    for trained_on, notes in (("/elsewhere/base", 0), ("/elsewhere/gone", 1), ("google/gemma", 1), ("../base", 0)):
        file.write_text(json.dumps({**config, "base_model_name_or_path": trained_on}))
        found = adapter_notes(tessellm.compose(own_members / "base", {"x": own_members / "lora_math"}))
        assert len(found) == notes, trained_on
        assert all(f"trained on {trained_on}; whether that is this base cannot be told" in note for note in found)


def test_prompt_tuning_is_refused(members_dir: Path, tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    get_peft_model(load(members_dir / "base"), config).save_pretrained(tmp_path / "prompt")
    assert "PROMPT_TUNING adapter, which adds virtual tokens" in refusal(members_dir / "base", tmp_path / "prompt")


def test_pickled_and_damaged_adapters_are_refused(own_members: Path) -> None:
    adapter = own_members / "lora_math"
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "is cut off" in refusal(own_members / "base", adapter)
    weights.unlink()
    assert "expected adapter_model.safetensors" in refusal(own_members / "base", adapter)
    torch.save({}, adapter / "adapter_model.bin")
    assert "pickles (adapter_model.bin)" in refusal(own_members / "base", adapter)
    weights.write_bytes(whole)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LOR')
    assert "is no PEFT configuration" in refusal(own_members / "base", adapter)


def test_an_adapter_runs_inside_its_base(members_dir: Path) -> None:
    base, adapter = members_dir / "base", members_dir / "lora_math"
    assert "runs in its base's dtype" in refusal(base, {"source": adapter, "dtype": "float16"})
    assert "quantize the base" in refusal(base, {"source": adapter, "quantization": "bnb-8bit"})
    assert "runs where its base is" in refusal(base, adapter, device_map={"x": "meta"})
    assert "the base cannot be an adapter" in refusal(adapter, adapter)
