"""The benchmark: its loops decode rightly, it counts the right bytes, and it runs on everything that it offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.bench.loops import Loop
from tessellm.bench.measure import Case, bandwidth, bytes_a_step, engine_steps, measure, random_prompts
from tessellm.bench.models import first_experts, random_composition
from tessellm.bench.plan import cases
from tessellm.decoding.engine import Engine
from tessellm.decoding.members.groups import plan_groups
from tessellm.errors import EngineError

from conftest import build_model, save_member
from decoding_cases import composition, prompts


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma2", "adapters"])
def test_the_loops_are_the_composition_that_they_are_compared_with(kind: str, tmp_path: Path) -> None:
    model = composition(kind, tmp_path, rule="product")
    rows = prompts(3, 30, seed=1)
    written = []
    for row in rows:
        loop = Loop(model, [row], to_cpu=True)
        written.append([loop.step()[0] for _ in range(8)])
        text = torch.tensor([row + written[-1]])
        assert model(text).logits[0, len(row) - 1 : -1].argmax(-1).tolist() == written[-1]
    padded = Loop(model, rows, to_cpu=False)
    steps = [padded.step() for _ in range(8)]
    assert [list(column) for column in zip(*steps, strict=True)] == written


@torch.no_grad()
def test_the_loops_know_members_whose_tables_differ(tiny_tokenizer: Any, tmp_path: Path) -> None:
    base, longer = build_model("llama", 0), build_model("llama", 1, vocab_size=72)
    folders = [save_member(model, tmp_path / str(n), tiny_tokenizer) for n, model in enumerate((base, longer))]
    model = tessellm.compose(folders[0], {"longer": folders[1]}, rule="product")
    row = prompts(1, 9)[0]
    loop = Loop(model, [row], to_cpu=True)
    written = [loop.step()[0] for _ in range(8)]
    assert model(torch.tensor([row + written])).logits[0, len(row) - 1 : -1].argmax(-1).tolist() == written


def test_a_vocabulary_of_one_token_is_measured() -> None:
    one = {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = tessellm.compose(build_model("llama", 0, **one), {"other": build_model("llama", 1, **one)})
    assert measure(model, Case(1, prompt=4), 4, 1, 1e9, compiled=False, loops=True)["tokens_a_second"] > 0


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


def test_a_measurement_adds_up() -> None:
    model = random_composition("llama-tiny", 1)
    row = measure(model, Case(1, batch=2, prompt=8), 6, 1, 1e9, compiled=False, loops=True)
    assert row["tokens_a_second"] == pytest.approx(2e3 / row["ms_a_step"])
    assert row["limit_ms"] == pytest.approx(bytes_a_step(model) / 1e6)
    assert row["share_of_limit"] == pytest.approx(row["limit_ms"] / row["ms_a_step"])
    assert row["times_notebook"] == pytest.approx(row["notebook_ms"] / row["ms_a_step"])
    assert row["cache_bytes"] == 2 * 2 * 2 * 2 * 32 * (8 + 6 + 1) * 4  # members, layers, keys and values, slots
    assert 1e8 < bandwidth(torch.device("cpu")) < 1e13


@pytest.mark.parametrize("broken", ["prompt", "weights"])
def test_requests_that_fail_end_a_measurement(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for tokens that will not come, and what came before is no speed."""
    model = random_composition("llama-tiny", 1)
    engine = Engine(model, slots=2)
    if broken == "weights":
        torch.nn.init.constant_(model.base.lm_head.weight, torch.nan)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    if broken == "prompt":
        monkeypatch.setattr(engine.steps, "prefill", full)
    with pytest.raises(EngineError, match="memory ran out" if broken == "prompt" else "computes NaN"):
        engine_steps(engine, [[5, 6, 7], [8, 9]], 8)


def test_a_sweep_is_a_star() -> None:
    found = cases([2, 1], [1, 8], [128, 512])
    assert found == [Case(2, 1, 128), Case(2, 8, 128), Case(2, 1, 512), Case(1, 1, 128)]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_command(kind: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("tessellm.commands.shared.out._width", 80)
    ran = cli(
        *("bench", "--shapes", "llama-tiny", "--kind", kind, "--experts", 2, "--experts", 1, "--prompt", 8),
        *("--new-tokens", 4, "--rounds", 1, "--json", tmp_path / "b.json", "--figure", tmp_path / "b.png"),
        *(("--speculate", "lookup") if kind == "lora" else ()),
    )
    assert ran.code == 0
    assert "tokens/s" in ran.out
    assert "notebook" in ran.out
    assert "experts, batch 1, prompt 8" in ran.err
    result = json.loads((tmp_path / "b.json").read_text())
    assert [row["experts"] for row in result["rows"]] == [2, 1]
    assert ["times_without_drafts" in row for row in result["rows"]] == [kind == "lora"] * 2
    assert all(row["same_texts"] == 1 and row["drafted"] >= 0 for row in result["rows"] if kind == "lora")
    assert {"commit", "versions", "hardware", "bytes_a_second"} <= result.keys()
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_on_a_composition(cli: Any, members_dir: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {members_dir / 'base'}\nexperts: {{a: {members_dir / 'lora_math'}}}\n")
    ran = cli("bench", recipe, "--prompt", 8, "--new-tokens", 4, "--rounds", 1, "--no-loops")
    assert ran.code == 0
    for wrong, said in (
        ((), "either a composition or --shapes"),
        (("--shapes", "llama-513"), "did you mean 'llama-512'?"),
        (("--shapes", "llama-tiny", "--batch", 0), "from 1 to 1,048,576 for batch; got [0]"),
        (("--shapes", "llama-tiny", "--batch", 10**20), "for batch; got [100000000000000000000]"),
        (("--shapes", "llama-tiny", "--prompt", 500), "the longest prompt has 500 tokens and up to 64 more were asked"),
        (("--shapes", "llama-tiny", "--new-tokens", 2), "all 2 new tokens came before a step could be timed"),
        (("--shapes", "llama-tiny", "--device", "tpu7"), "no model can be made on the device 'tpu7'"),
        ((recipe, "--kind", "lora"), "--kind goes with --shapes"),
        (("--shapes", "llama-tiny", "--weights", "math=1"), "--weights goes with a composition"),
    ):
        ran = cli("bench", *wrong)
        assert ran.code == 2
        assert said in ran.err.replace("\n", " ")


def test_what_was_written_while_members_rested_is_counted_and_compared(cli: Any, tmp_path: Path) -> None:
    ran = cli(
        *("bench", "--shapes", "llama-tiny", "--rule", "belief", "--prompt", 8, "--new-tokens", 12, "--rounds", 1),
        *("--no-loops", "--speculate", "belief:4", "--json", tmp_path / "b.json"),
    )
    assert ran.code == 0
    (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert row["same_texts"] == 1
    assert 0 <= row["accepted"] <= 1
    assert row["drafted"] > 0
    assert f"of {row['drafted']:,} tokens accepted, 100% of the texts the same" in " ".join(ran.err.split())


def test_belief_reads_random_prompts_as_in_a_chat() -> None:
    model: Any = random_composition("llama-tiny", 2, rule="belief")
    (row,) = random_prompts(model, [300])
    assert len(row) == 300
    assert model.rule.rule.is_asked(torch.tensor([row]))
    assert model.rule.rule.reads_from(row, 299) == 299 - model.rule.rule.window
