"""The benchmark: it counts the right bytes, its numbers add up, and it measures a composition beside its base."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from random_models import first_experts, random_composition
from tessellm.bench.measure import bandwidth, bytes_a_step, engine_steps, measure
from tessellm.bench.peers import Peer, Speed
from tessellm.engine.engine import Engine
from tessellm.engine.members.groups import plan_groups
from tessellm.errors import EngineError
from tessellm.members.packed import PackedLinear, pack_model
from tessellm.model.variants import alone

from conftest import build_model


def test_a_vocabulary_of_one_token_is_measured() -> None:
    one = {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = tessellm.compose(build_model("llama", 0, **one), {"other": build_model("llama", 1, **one)}, rule="product")
    assert measure(model, 1, 4, 4, 1, 1e9)["tokens_a_second"] > 0


def test_a_step_reads_shared_weights_once() -> None:
    full, lora = (random_composition("llama-tiny", 2, kind) for kind in ("full", "lora"))
    layers = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert bytes_a_step(full) == 3 * 4 * (layers + 256 * 32)
    deltas = 2 * 2 * 16 * (4 * 64 + 3 * 96)
    assert bytes_a_step(lora) == 4 * (layers + 256 * 32 + deltas)
    assert plan_groups(lora, stacked=False) == [(0, 1, 2)]
    assert bytes_a_step(first_experts(full, 1)) == 2 * 4 * (layers + 256 * 32)
    with pytest.raises(EngineError, match="expected 1 to 2 experts; got 3"):
        first_experts(full, 3)


def test_a_step_of_packed_weights_reads_the_packs() -> None:
    base = build_model("llama", 0)
    pack_model(base, "int8", "base")
    model = tessellm.compose(base, {"other": build_model("llama", 1)}, rule="product")
    packs = [layer for layer in base.modules() if isinstance(layer, PackedLinear)]
    norms = [weight for name, weight in base.named_parameters() if "norm" in name]
    expected = sum(layer.packed.nbytes + layer.scale.nbytes for layer in packs) + sum(norm.nbytes for norm in norms)
    assert bytes_a_step(alone(model, "base")) == expected


def test_a_measurement_adds_up() -> None:
    model = random_composition("llama-tiny", 1)
    row = measure(model, 2, 8, 6, 1, 1e9, beside={"other": lambda: Speed(2.0, 0.5)})
    assert row["tokens_a_second"] == pytest.approx(2e3 / row["ms_a_step"])
    assert row["limit_ms"] == pytest.approx(bytes_a_step(model) / 1e6)
    assert row["share_of_limit"] == pytest.approx(row["limit_ms"] / row["ms_a_step"])
    assert row["times_other"] == pytest.approx(500 / row["ms_a_step"])
    assert row["first_times_other"] == pytest.approx(2000 / row["first_token_ms"])
    assert row["cache_bytes"] == 2 * 2 * 2 * 2 * 32 * (8 + 6 + 1) * 4  # members, layers, keys and values, slots
    assert 1e8 < bandwidth(torch.device("cpu")) < 1e13


@pytest.mark.parametrize("broken", ["prompt", "weights"])
def test_requests_that_fail_end_a_measurement(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for tokens that will not come, and what came before is no speed."""
    model = random_composition("llama-tiny", 2)
    engine = Engine(model, slots=2)
    if broken == "weights":
        torch.nn.init.constant_(model.base.lm_head.weight, torch.nan)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    if broken == "prompt":
        monkeypatch.setattr(engine.executor, "prefill", full)
    with pytest.raises(EngineError, match="memory ran out" if broken == "prompt" else "computes NaN"):
        engine_steps(engine, [[5, 6, 7], [8, 9]], 8)


@pytest.fixture
def recipe(members_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base: {members_dir / 'base'}\nexperts: {{a: {members_dir / 'lora_math'}}}\n")
    return path


def test_the_command_measures_a_composition_beside_its_base(cli: Any, recipe: Path, tmp_path: Path) -> None:
    ran = cli(
        *("bench", recipe, "--batch", 1, "--batch", 2, "--prompt", 8, "--prompt", 12, "--new-tokens", 4),
        *("--speculate", "lookup", "--json", tmp_path / "b.json"),
    )
    assert ran.code == 0, ran.err
    assert "tokens/s" in ran.out
    assert "1 experts, batch 2, prompt 8" in ran.err
    result = json.loads((tmp_path / "b.json").read_text())
    rows = result["rows"]
    assert [(row["batch"], row["prompt"]) for row in rows] == [(1, 8), (2, 8), (1, 12)]  # a star, not a grid
    assert all(row["times_base"] == pytest.approx(row["base_ms"] / row["ms_a_step"]) for row in rows)
    assert all(row["same_texts"] == 1 and row["drafted"] >= 0 for row in rows)
    assert {"commit", "versions", "hardware", "bytes_a_second"} <= result.keys()


def test_a_member_alone_is_measured_by_itself(cli: Any, recipe: Path, tmp_path: Path) -> None:
    arguments = ("--prompt", 8, "--new-tokens", 4, "--json", tmp_path / "b.json")
    assert cli("bench", f"{recipe}:a", *arguments).code == 0
    (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert row["experts"] == 0
    assert "times_base" not in row


def test_what_cannot_be_measured_is_refused_first(cli: Any, recipe: Path) -> None:
    for wrong, said in (
        (("--batch", 0), "from 1 to 1,048,576 for batch; got [0]"),
        (("--batch", 10**20), "for batch; got [100000000000000000000]"),
        (("--prompt", 120), "the longest prompt has 120 tokens and up to 64 more were asked"),
    ):
        ran = cli("bench", recipe, *wrong)
        assert ran.code == 2
        assert said in ran.err.replace("\n", " ")


PEER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"first": len(asked["prompts"]), "step": asked["new"]}), flush=True)
    assert asked["new"] < 9, "too many"
"""


def test_another_engine_answers_or_says_why_not(tmp_path: Path) -> None:
    peer = Peer("other", [sys.executable, "-c", PEER], tmp_path / "log")
    assert peer([[1], [2]], 9) == (2, 9)
    with pytest.raises(EngineError, match="--against other: AssertionError: too many"):
        peer([[1]], 8)
    peer.close()


def test_engines_that_are_not_there_are_refused(cli: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "none.gguf").touch()
    arguments = ("bench", recipe, "--prompt", 8, "--new-tokens", 4)
    for wanted, said in (
        ("llama", "did you mean 'llama.cpp'? Known: llama.cpp, vllm"),
        ("llama.cpp", "expected llama.cpp=FILE.gguf, a file of the base's weights"),
        (f"llama.cpp={tmp_path / 'gone.gguf'}", "expected llama.cpp=FILE.gguf"),
        (f"llama.cpp={tmp_path / 'none.gguf'}", "--against llama.cpp"),
        ("vllm", "No module named 'vllm'"),
    ):
        ran = cli(*arguments, "--against", wanted)
        assert ran.code == 2
        assert said in ran.err.replace("\n", " ")
