"""4- and 8-bit members: composed, saved, shared by adapters, and refused where they cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.errors import MemberError, MissingExtraError
from tessellm.members.quantized import quantization_config
from tessellm.members.shared_tensors import unique_bytes

from conftest import build_model, character_tokenizer, logits, perturbed, save_lora, save_member

QUANTIZED = ["bnb-8bit", "bnb-4bit", "torchao-int8"]


def need(quantization: str) -> None:
    pytest.importorskip("torchao" if "torchao" in quantization else "bitsandbytes")


@pytest.fixture(scope="module")
def wide_members(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough to be quantized in blocks."""
    folder = tmp_path_factory.mktemp("wide")
    base = build_model("llama", 0, hidden_size=128, intermediate_size=256)
    save_member(base, folder / "base", character_tokenizer())
    save_member(perturbed(base, 1, 0.02), folder / "math", character_tokenizer())
    save_lora(folder / "base", folder / "lora", 2)
    return folder


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")  # bitsandbytes', of the cast it makes
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_quantized_members(wide_members: Path, tmp_path: Path, quantization: str) -> None:
    need(quantization)
    plain = tessellm.compose(wide_members / "base", {"math": wide_members / "math"}, rule="product")
    expert = {"source": wide_members / "math", "quantization": quantization}
    model = tessellm.compose(wide_members / "base", {"math": expert}, rule="product")
    assert unique_bytes([model.member("math")]) < 0.5 * unique_bytes([plain.member("math")])
    distance = (logits(model).exp() - logits(plain).exp()).abs().sum(-1).mean() / 2
    assert 0 < distance < (0.6 if quantization == "bnb-4bit" else 0.1)
    expected = logits(model)
    for self_contained in (False, True):  # the second is quantized on disk
        model = tessellm.compose(wide_members / "base", {"math": expert}, rule="product")
        model.save_pretrained(tmp_path / "out", self_contained=self_contained)
        again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(logits(again), expected, rtol=0, atol=0)
        assert unique_bytes(again.members.values()) == unique_bytes(model.members.values())
    on_disk = tmp_path / "out" / "members" / "math"
    taken = tessellm.compose(wide_members / "base", {"math": on_disk}, rule="product")
    torch.testing.assert_close(logits(taken), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_adapters_share_a_quantized_base(wide_members: Path, quantization: str) -> None:
    need(quantization)
    from peft import PeftModel

    config = quantization_config(quantization)
    base = AutoModelForCausalLM.from_pretrained(wide_members / "base", quantization_config=config)
    expected = logits(PeftModel.from_pretrained(base, wide_members / "lora").eval())
    model = tessellm.compose(
        {"source": wide_members / "base", "quantization": quantization},
        {"one": wide_members / "lora", "two": wide_members / "lora"},
    )
    assert unique_bytes(model.members.values()) < 1.3 * unique_bytes([model.base])
    for _ in range(2):  # 8-bit layers set up their state when they first run
        torch.testing.assert_close(logits(model.member("one")), expected)
        torch.testing.assert_close(logits(model.member("two")), expected)
        logits(model.base)


def test_weights_that_bitsandbytes_would_damage_are_not_read_back(wide_members: Path, tmp_path: Path) -> None:
    """It packs 4-bit weights anew on CPUs with AVX-512 and bf16, and does not undo all of it."""
    pytest.importorskip("bitsandbytes")
    model = tessellm.compose(
        {"source": wide_members / "base", "quantization": "bnb-4bit"}, {"math": wide_members / "math"}
    )
    before = logits(model)
    states = [parameter.quant_state for parameter in model.base.parameters() if hasattr(parameter, "quant_state")]
    if any(getattr(state, "packing_format_for_cpu", False) for state in states):
        with pytest.raises(MemberError, match="4-bit weights that have run on the CPU"):
            model.save_pretrained(tmp_path / "out", self_contained=True)
        assert not (tmp_path / "out").exists()
        with pytest.raises(MemberError, match="'base' holds 4-bit weights that have run"):
            tessellm.compose(model.base, {"x": wide_members / "lora"}, tokenizer=character_tokenizer(), rule="product")
    else:
        model.save_pretrained(tmp_path / "out", self_contained=True)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), before)
    assert torch.equal(logits(model), before)


def test_equal_codes_with_other_scales_are_not_shared(wide_members: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    double = AutoModelForCausalLM.from_pretrained(wide_members / "base")
    with torch.no_grad():
        double.model.layers[0].mlp.up_proj.weight *= 2
    save_member(double, tmp_path / "double", character_tokenizer())
    model = tessellm.compose(
        {"source": wide_members / "base", "quantization": "bnb-4bit"},
        {"x": {"source": tmp_path / "double", "quantization": "bnb-4bit"}},
    )
    assert not torch.equal(logits(model.member("x")), logits(model.base))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_a_missing_extra_is_named(wide_members: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install \"tessellm\[quantized\]\""):
        tessellm.compose(
            wide_members / "base", {"x": {"source": wide_members / "math", "quantization": "torchao-int8"}}
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_4_bits_of_torchao_need_a_gpu(wide_members: Path) -> None:
    need("torchao-int4")
    with pytest.raises(MemberError, match="torchao-int4 needs a CUDA device"):
        tessellm.compose(
            {"source": wide_members / "base", "quantization": "torchao-int4"}, {"x": wide_members / "math"}
        )


def test_unknown_quantization() -> None:
    with pytest.raises(MemberError, match=r"unknown quantization 'bnb-4bits'; did you mean 'bnb-4bit'\?"):
        tessellm.MemberSpec("x", quantization="bnb-4bits")
