"""Half precision: float32 logits on every path, and the precision in which members run where nobody says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.members import precision
from tessellm.model.heads import Float32Head
from tessellm.rules import normalised

from conftest import build_model, save_member
from families import composition, family, random_ids


def float32_by_hand(member: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a half-precision member, its last product in float64."""
    hidden = member(ids, output_hidden_states=True).hidden_states[-1].double()
    logits = hidden @ member.get_output_embeddings().weight.double().T
    cap = getattr(member.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2"])
def test_logits_leave_the_head_in_float32(architecture: str, dtype: torch.dtype) -> None:
    members = [model.to(dtype) for model in family([architecture] * 2)]
    ids = random_ids()
    rounded = members[1](ids).logits
    assert rounded.dtype == dtype
    model = composition(members)
    exact = float32_by_hand(members[1], ids)
    logits = model.member_logits("one", ids, None, 0, {})
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-4 < (rounded - exact).abs().max()


@torch.no_grad()
@pytest.mark.parametrize("experts", ["full", "lora"])
def test_the_engine_has_float32_logits_too(members_dir: Path, experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"full": {"math": members_dir / "math"}, "lora": {"lora": members_dir / "lora_math"}}
    model: Any = tessellm.compose(members_dir / "base", paths[experts], rule="product", dtype="bfloat16")
    seen: list[torch.dtype] = []

    def watched(logits_NV: torch.Tensor) -> torch.Tensor:
        seen.append(logits_NV.dtype)
        return normalised(logits_NV)

    monkeypatch.setattr("tessellm.engine.members.branches.normalised", watched)
    inputs = model.tokenizer("abc", return_tensors="pt").input_ids
    Engine(model, 1, 16).generate(inputs.tolist(), Sampling(max_new_tokens=4))
    assert seen
    assert set(seen) == {torch.float32}


def test_a_float32_head_stays_as_it_is_and_a_half_one_is_saved_as_it_was(
    members_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(precision, "fast_bfloat16", lambda: True)  # whatever processor this is
    experts = {"math": members_dir / "math"}
    plain: Any = tessellm.compose(members_dir / "base", experts, dtype="float32")
    assert type(plain.base.get_output_embeddings()) is torch.nn.Linear
    half: Any = tessellm.compose(members_dir / "base", experts, dtype="bfloat16")
    assert type(half.base.get_output_embeddings()) is Float32Head
    half.save_pretrained(tmp_path / "out", self_contained=True)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(random_ids()).logits, half(random_ids()).logits)


def test_the_gradient_passes_a_half_precision_head() -> None:
    head = torch.nn.Linear(8, 5, dtype=torch.bfloat16)
    head.__class__ = Float32Head
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    head(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert head(x).shape == (2, 3, 5)


@pytest.fixture
def half_members(tmp_path: Path) -> Path:
    for number, name in enumerate(("base", "math")):
        save_member(build_model("llama", number).to(torch.bfloat16), tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("fast", [True, False])
def test_the_default_is_float32_where_bfloat16_is_slow(
    half_members: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "fast_bfloat16", lambda: fast)
    by_default = torch.bfloat16 if fast else torch.float32
    members = half_members / "base", {"math": half_members / "math"}
    model: Any = tessellm.compose(*members)
    assert {member.dtype for member in model.members.values()} == {by_default}
    assert any("runs in float32" in note for note in model.notes) == (not fast)
    asked: Any = tessellm.compose(*members, dtype="bfloat16")
    assert {member.dtype for member in asked.members.values()} == {torch.bfloat16}
    for made, found in ((model, by_default), (asked, torch.bfloat16)):
        made.save_pretrained(half_members / f"out-{found}")
        saved = json.loads((half_members / f"out-{found}" / "config.json").read_text())["members"][0]
        assert saved.get("dtype") == (None if made is model else "bfloat16")
        again: Any = AutoModelForCausalLM.from_pretrained(half_members / f"out-{found}")
        assert again.base.dtype == found


@pytest.mark.parametrize(("gain", "pays"), [(3.0, True), (1.0, False)])
def test_packs_are_measured_once_per_machine(
    gain: float, pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def timed(kind: str) -> float:
        measured.append(kind)
        return gain

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(precision, "fast_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "_gain", timed)
    for _ in range(2):
        precision.packs_pay.cache_clear()
        assert precision.packs_pay("int4") == pays
    assert measured == ["int4"]
    (tmp_path / "tessellm" / "packs.json").write_text("{")
    precision.packs_pay.cache_clear()
    assert precision.packs_pay("int4") == pays
    precision.packs_pay.cache_clear()
    monkeypatch.setattr(precision, "fast_bfloat16", lambda: False)
    assert not precision.packs_pay("int4")
    precision.packs_pay.cache_clear()
    assert measured == ["int4"] * 2


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_gain_of_a_pack_is_a_ratio_of_times(kind: str) -> None:
    assert 0.01 < precision._gain(kind) < 100
