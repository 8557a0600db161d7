"""Prompts in few shapes: cut, padded, and read to the same tokens. That they are captured is tested on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tessellm.engine.cuda import prompt_graphs
from tessellm.engine.cuda.prompt_graphs import (
    NARROWEST,
    PromptGraphs,
    bucket,
    cut_into_buckets,
    padding_rows,
    split_rows,
)
from tessellm.engine.cuda.slot_buffers import Mixing
from tessellm.engine.cuda.slot_executor import SlotExecutor
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling, TokenChoice

from captured_steps import over_slots
from decoding_cases import composition, prompts


class Cut(SlotExecutor):
    """All prompts' ends in parts, each run as the graph would run it."""

    shapes: set[tuple[int, int]]

    def read(
        self, slots: Sequence[int], token_BT: Tensor, position_BT: Tensor, choice: TokenChoice, mixing: Mixing, *_: Any
    ) -> None:
        assert choice is not TokenChoice.NONE
        prompts = PromptGraphs(self.work)
        for part in cut_into_buckets(slots, token_BT, position_BT):
            prompts.put(part, self.on_device)
            cells = min(self.context, bucket(part.stop))
            prompts.read(part.rows, part.width, mixing, cells, choice)
            self.shapes.add((part.rows, part.width))


@pytest.mark.parametrize("rule", ["mixture", "product"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_padded_prompts_are_read_as_they_are(kind: str, rule: str, tmp_path: Path) -> None:
    """Greedy and sampled; longer and shorter than windows; and where a cache holds the beginning already."""
    model = composition(kind, tmp_path, rule=rule)
    given = prompts(11, 90)
    given += [(given[3] * 88)[:88] + [7] * n for n in (5, 20)]
    asked = [Sampling(3 + n % 4, (0.0, 1.0)[n % 2], seed=n, ignore_end=True) for n in range(len(given))]
    for slots in (1, 7):
        plain, engine = Engine(model, slots=slots), over_slots(Engine(model, slots=slots), Cut)
        engine.executor.shapes = set()  # type: ignore[attr-defined]
        expected, found = plain.generate(given, asked), engine.generate(given, asked)
        assert len(engine.executor.shapes) > 2  # type: ignore[attr-defined]
        assert [r.tokens for r in found] == [r.tokens for r in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert engine.prefixes.reused_tokens > 0


@given(number=st.integers(1, 10_000))
def test_buckets_and_shares(number: int) -> None:
    assert sum(own for own, _ in split_rows(number)) == number
    assert all(rows & (rows - 1) == 0 and own <= rows <= own * 4 / 3 for own, rows in split_rows(number))
    assert len(split_rows(number)) <= number.bit_length()
    assert number <= bucket(number) < max(1.5 * number, NARROWEST + 1)
    assert bucket(number) % 8 == 0


def test_few_buckets_and_pieces() -> None:
    assert [split_rows(n) for n in (1, 2, 3, 5, 7)] == [[(1, 1)], [(2, 2)], [(3, 4)], [(4, 4), (1, 1)], [(7, 8)]]
    assert split_rows(11) == [(8, 8), (3, 4)]
    assert sorted({bucket(n) for n in range(1, 1025)}) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]


def test_pieces_hold_every_row_once_at_its_own_width() -> None:
    counts, slots = [50, 3, 40, 60, 33, 20, 17, 18, 1, 2, 5], [4, 0, 6, 2, 9, 1, 3, 8, 7, 5, 10]
    position_BT = torch.full((11, 60), -1)
    token_BT = torch.zeros(11, 60, dtype=torch.long)
    for b, count in enumerate(counts):
        position_BT[b, 60 - count :] = torch.arange(100, 100 + count)
        token_BT[b, 60 - count :] = torch.arange(count) + 1000 * b
    parts = cut_into_buckets(slots, token_BT, position_BT)
    assert [(part.rows, part.width, part.stop) for part in parts] == [(8, 64, 160), (4, 32, 105)]
    parts = [part.given_BX.split([1, part.width, part.width], 1) for part in parts]
    rows = [row for part in parts for row in zip(*part, strict=True)]
    assert all(map(torch.equal, rows[-1], rows[-2]))  # there are eleven, and room for twelve
    for b, (slot, token_T, position_T) in enumerate(rows[:-1]):
        assert slot.item() == slots[b]
        real = position_T >= 0
        assert real.sum() == counts[b]
        assert torch.equal(position_T[-counts[b] :], torch.arange(100, 100 + counts[b]))
        assert torch.equal(token_T[real], torch.arange(counts[b]) + 1000 * b)


def test_padding_alone_changes_no_cell_of_a_slot(tmp_path: Path) -> None:
    """A graph may be captured while texts are written: their cells stay as they are."""
    engine = over_slots(Engine(composition("llama", tmp_path), slots=4))
    engine.generate(prompts(4, 30), Sampling(4))
    passes = PromptGraphs(engine.executor.work)
    (group,) = [g for g in engine.executor.groups if 0 in g.members]
    before = [buffer[:, :, :-1].clone() for buffer in group.cache.key_RHCD.values()]
    part = padding_rows(4, 40)
    with torch.inference_mode():
        passes.put(part, lambda part: part)
        passes.read(part.rows, part.width, Mixing.RULE, 64, TokenChoice.GREEDY)
    after = [buffer[:, :, :-1] for buffer in group.cache.key_RHCD.values()]
    assert before
    assert all(map(torch.equal, before, after))


def test_what_is_worth_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = PromptGraphs(over_slots(Engine(composition("llama", tmp_path), slots=4)).executor.work)
    assert seen.takes(padding_rows(4, 256))
    assert not seen.takes(padding_rows(4, 257))
    monkeypatch.setattr(prompt_graphs, "MOST_NUMBERS", 2 * seen.work.row_numbers)
    assert seen.takes(padding_rows(2, 256))
    assert not seen.takes(padding_rows(4, 256))
    seen.turn_off()
    assert not seen.takes(padding_rows(1, 1))


def test_a_shape_is_known_once_it_was_run(tmp_path: Path) -> None:
    seen = PromptGraphs(over_slots(Engine(composition("llama", tmp_path), slots=4)).executor.work)
    shapes = [(rows, 32, Mixing.RULE, 256, TokenChoice.GREEDY) for rows in (2, 1)]
    assert not seen.met(shapes)
    seen.note(shapes[:1])
    assert not seen.met(shapes)
    assert seen.met(shapes[:1])
    seen.note(shapes)
    assert seen.met(shapes)
