"""The loops that engines are compared with decode rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm_lab.common.loops import Loop, loop_steps

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


def test_steps_of_a_loop_are_timed(tmp_path: Path) -> None:
    assert loop_steps(composition("llama", tmp_path, rule="product"), prompts(2, 6), 4, to_cpu=False) > 0
