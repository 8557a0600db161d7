"""An engine is only made for members that it computes rightly; others are refused, saying what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tessellm
from tessellm.engine import assembly, self_check
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.errors import EngineError
from tessellm.text.generate import generate_texts
from tessellm.text.options import TextOptions

from conftest import VOCAB, build_model, character_tokenizer, perturbed, save_member
from decoding_cases import prompts, stacked_engine, unexcused

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
LLAMA = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 128}
OTHERS: dict[str, dict[str, Any]] = {  # what else is out there, and how its config is spelt
    "Mistral": LLAMA | {"sliding_window": 16},
    "Qwen3": LLAMA | {"head_dim": 8},
    "Gemma3": LLAMA | {"head_dim": 8, "sliding_window": 16},
    "Phi3": LLAMA | {"sliding_window": 16, "pad_token_id": 0},
    "OPT": SIZES | {"ffn_dim": 64, "max_position_embeddings": 128, "word_embed_proj_dim": 32},
    "GPTNeoX": LLAMA,
    "StableLm": LLAMA,
    "Cohere": LLAMA,
    "Mixtral": LLAMA | {"num_local_experts": 4},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "Falcon": SIZES | {"alibi": True, "new_decoder_architecture": False},
}
APART = {"Mixtral", "OPT"}  # they have modules that see more than the rows of hidden states
REFUSED = {"Bloom", "Mpt", "Falcon", "StableLm"}


def random_member(name: str, seed: int = 0) -> Any:
    settings = getattr(transformers, (name + "Config").replace("3C", "3TextC" if name == "Gemma3" else "3C"))(
        vocab_size=VOCAB, **({"pad_token_id": 0} | OTHERS[name]), bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(seed)
    model = getattr(transformers, name + "ForCausalLM")(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_architecture_is_right_or_refused(name: str) -> None:
    """Longer than any window, so that what a short look cannot see is seen here."""
    base = random_member(name)
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    if name in REFUSED:
        with pytest.raises(EngineError, match="reference path"):
            Engine(model, slots=2)
        return
    for stacked in (False, True):
        engine = stacked_engine(model, stacked, slots=2)
        assert len(engine.executor.groups) == (1 if stacked and name not in APART else 2)
        requests = engine.generate(prompts(3, 60, seed=1), Sampling(max_new_tokens=12))
        assert not unexcused(model, requests)


def test_a_position_bias_that_nobody_told_us_of_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    plain = self_check.branch_logp

    def off(*arguments: Any) -> list[torch.Tensor]:
        return [(logp + 0.1 * torch.arange(VOCAB)).log_softmax(-1) for logp in plain(*arguments)]

    monkeypatch.setattr(self_check, "branch_logp", off)
    with pytest.raises(EngineError, match=r"does not compute what member 'base' .*off by .*reference path"):
        Engine(model)


def test_what_only_long_texts_show_is_refused_by_the_config() -> None:
    moving = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    base = build_model("llama", rope_parameters=moving)
    with pytest.raises(EngineError, match=r"rotary positions \(dynamic\) depend on the longest"):
        Engine(tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product"))
    recurrent = build_model("llama")
    recurrent._is_stateful = True
    with pytest.raises(EngineError, match="it is recurrent"):
        Engine(tessellm.compose(recurrent, {"a": perturbed(recurrent, 1)}, rule="product"))
    chunked = build_model("gemma2", layer_types=["full_attention", "sliding_attention"])
    chunked.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(EngineError, match="layers of the kind 'chunked_attention'"):
        Engine(tessellm.compose(chunked, {"a": perturbed(chunked, 1)}, rule="product"))


def test_a_window_that_the_attention_forgets_is_refused() -> None:
    base = build_model("llama")
    base.config.sliding_window = 16
    with pytest.raises(EngineError, match="does not say that its window is 16"):
        Engine(tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product"))


def test_no_room_for_the_slots_is_said_when_the_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nMore")

    monkeypatch.setattr(assembly, "make_groups", full)
    base = build_model("llama")
    with pytest.raises(EngineError, match=r"8 slots of 128 tokens do not fit .* fewer slots .*80 GiB"):
        Engine(tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product"))


def test_members_on_several_devices_are_refused() -> None:
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    model.hf_device_map = {"base": "cpu", "a": "meta"}
    with pytest.raises(EngineError, match="all members on one device"):
        Engine(model)


def test_generate_falls_back_to_the_reference_and_says_so(tmp_path: Path, cli: Any) -> None:
    base = random_member("Bloom")
    folders = {
        name: save_member(model, tmp_path / name, character_tokenizer())
        for name, model in (("base", base), ("a", perturbed(base, 1)))
    }
    (tmp_path / "recipe.yaml").write_text(f"base: {folders['base']}\nexperts:\n  a: {folders['a']}\n")
    fast, slow = (
        cli("generate", tmp_path / "recipe.yaml", "abc", "--no-chat", "--max-new-tokens", 5, "--engine", engine)
        for engine in ("auto", "reference")
    )
    assert (fast.code, slow.code) == (0, 0)
    assert fast.out == slow.out
    assert "note: " in fast.err
    assert "reference path" in fast.err
    assert slow.err == ""


def test_settings_that_only_the_reference_knows_are_kept(members_dir: Path) -> None:
    model: Any = tessellm.compose(members_dir / "base", {"a": members_dir / "math"}, rule="product")
    asked = TextOptions(max_new_tokens=30)
    [plain] = generate_texts(model, ["abc"], asked)
    model.generation_config.repetition_penalty = 1.5
    notes: list[str] = []
    [other] = generate_texts(model, ["abc"], asked, note=notes.append)
    [slow] = generate_texts(model, ["abc"], asked, engine="reference")
    assert notes == ["the generation config sets repetition_penalty, which the fast path does not know"]
    assert other == slow != plain


def test_modules_see_no_other_members_rows() -> None:
    """Two members stacked: changing one leaves the other's log-probabilities as they were."""
    base = build_model("llama")
    first, second = perturbed(base, 1), perturbed(base, 2)
    texts = prompts(3, 30)
    found = []
    for other in (first, second):
        model = tessellm.compose(base, {"a": other, "b": first}, rule="product", weights={"a": 0.0})
        found.append(stacked_engine(model, True, slots=3).generate(texts, Sampling(max_new_tokens=9)))
    assert [r.tokens for r in found[0]] == [r.tokens for r in found[1]]
