"""Adapters as they are found: half precision, several ranks, tied heads, foreign bases, on quantised bases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.inspect.inspection import inspect_model
from tessellm.inspect.planning import read_needs
from tessellm.members.quantized import quantization_config
from tessellm.members.shared_tensors import unique_bytes

from conftest import build_model, character_tokenizer, logits, save_lora, save_member

WEIGHTS = "adapter_model.safetensors"


def as_dtype(adapter: Path, dtype: torch.dtype) -> Path:
    """The adapter with its tensors stored as another dtype."""
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(adapter / WEIGHTS).items()}
    save_file(tensors, adapter / WEIGHTS, metadata={"format": "pt"})
    return adapter


def rename_base(adapter: Path, base: Any) -> Path:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    return adapter


def own_bytes(model: Any, name: str) -> int:
    return unique_bytes([model.base, model.member(name)]) - unique_bytes([model.base])


@pytest.mark.parametrize("base_dtype", ["bfloat16", "float32"])
def test_half_precision_stays_half(own_members: Path, tmp_path: Path, base_dtype: str) -> None:
    adapter = as_dtype(own_members / "lora_math", torch.bfloat16)
    size = sum(tensor.nbytes for tensor in load_file(adapter / WEIGHTS).values())
    model = tessellm.compose(own_members / "base", {"x": adapter}, dtype=base_dtype)
    assert own_bytes(model, "x") == size * (1 if base_dtype == "bfloat16" else 2)  # an adapter runs in its base's dtype
    model.save_pretrained(tmp_path / "out", self_contained=True)
    assert read_needs(str(tmp_path / "out")).members[1].weight_bytes == own_bytes(model, "x")
    written = load_file(tmp_path / "out" / "members" / "x" / WEIGHTS)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    for key, tensor in load_file(adapter / WEIGHTS).items():
        assert torch.equal(written[key], tensor)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=base_dtype)
    assert torch.equal(logits(again), logits(model))


def test_full_precision_stays_full_on_a_half_base(own_members: Path, tmp_path: Path) -> None:
    model = tessellm.compose(own_members / "base", {"x": own_members / "lora_math"}, dtype="bfloat16")
    model.save_pretrained(tmp_path / "out", self_contained=True)
    written, before = (load_file(place / WEIGHTS) for place in (tmp_path / "out/members/x", own_members / "lora_math"))
    assert all(torch.equal(written[key], tensor) for key, tensor in before.items())


def test_an_adapter_counts_as_what_it_adds(own_members: Path, tmp_path: Path) -> None:
    model = tessellm.compose(own_members / "base", {"x": own_members / "lora_math", "full": own_members / "math"})
    counts = [row["parameters"] for row in inspect_model(model)["members"]]
    stored = sum(tensor.numel() for tensor in load_file(own_members / "lora_math" / WEIGHTS).values())
    assert counts == [counts[0], stored, counts[0]]
    model.save_pretrained(tmp_path / "out")
    assert [member.parameters for member in read_needs(str(tmp_path / "out")).members] == counts


def test_an_unknown_base_is_noted_once(own_members: Path) -> None:
    experts = {name: rename_base(own_members / name, "/nowhere/my-base") for name in ("lora_math", "lora_coding")}
    notes = [
        note for note in tessellm.compose(own_members / "base", experts, rule="product").notes if "trained on" in note
    ]
    assert notes == [
        "lora_math, lora_coding: the adapter says it was trained on /nowhere/my-base; whether that is this base cannot "
        "be told"
    ]
    for odd in ("a" * 5000, None, 5, "./nowhere"):
        rename_base(own_members / "lora_math", odd)
        tessellm.compose(own_members / "base", {"x": own_members / "lora_math"})


CASES: dict[str, dict[str, Any]] = {
    "ranks": {"r": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
    "one layer": {"layers_to_transform": [1]},
    "head": {"target_modules": ["lm_head"]},
    "everything": {"target_modules": "all-linear", "use_rslora": True, "r": 3},
    "dora": {"use_dora": True, "target_modules": ["o_proj", "down_proj"]},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, while the adapter is made
def test_each_is_what_peft_computes(tmp_path: Path, case: str, tied: bool) -> None:
    base = save_member(build_model("llama", 0, tie_word_embeddings=tied), tmp_path / "base", character_tokenizer())
    adapter = save_lora(base, tmp_path / "adapter", 7, **CASES[case])
    other = save_lora(base, tmp_path / "other", 8, target_modules=["up_proj"], r=2)
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval())
    model = tessellm.compose(base, {"x": adapter, "y": other})
    torch.testing.assert_close(logits(model.member("x")), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(model.base), logits(AutoModelForCausalLM.from_pretrained(base)))
    model.save_pretrained(tmp_path / "out", self_contained=True)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("quantization", ["bnb-8bit", "bnb-4bit"])
@pytest.mark.parametrize("case", ["plain", "dora", "modules_to_save"])
def test_on_a_quantised_base(tmp_path: Path, case: str, quantization: str) -> None:
    """Each is what PEFT computes, twice, or says why not."""
    pytest.importorskip("bitsandbytes")
    base = save_member(build_model("llama", 0, hidden_size=64), tmp_path / "base", character_tokenizer())
    settings = {"plain": {}, "dora": {"use_dora": True}, "modules_to_save": {"modules_to_save": ["lm_head"]}}[case]
    adapter, quantised = (
        save_lora(base, tmp_path / "adapter", 7, **settings),
        {"source": base, "quantization": quantization},
    )
    if (case, quantization) == ("dora", "bnb-8bit"):
        with pytest.raises(tessellm.TessellmError, match=r"DoRA adapter, which PEFT cannot run .* with bnb-4bit"):
            tessellm.compose(quantised, {"x": adapter})
        return
    loaded = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization_config(quantization))
    expected = logits(PeftModel.from_pretrained(loaded, adapter).eval())
    model = tessellm.compose(quantised, {"x": adapter})
    for _ in range(2):
        logits(model.base)
        if case == "modules_to_save":
            assert torch.isfinite(logits(model.member("x"))).all()
        else:
            torch.testing.assert_close(logits(model.member("x")), expected)
    merged = [note for note in model.notes if note.endswith("its weights quantised anew")]
    assert len(merged) == (case == "modules_to_save")


def test_importing_prints_nothing(members_dir: Path) -> None:
    program = "import sys, tessellm, peft; tessellm.compose(sys.argv[1], {'x': sys.argv[2]})"
    places = [str(members_dir / "base"), str(members_dir / "lora_math")]
    ran = subprocess.run([sys.executable, "-c", program, *places], capture_output=True, text=True, check=True)
    assert "gemm_4bit_forward" not in ran.stderr
