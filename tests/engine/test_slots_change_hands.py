"""Requests enter and leave slots while passes are on their way, as on a GPU: those who are written to hardly wait for
it, and nothing of what is written changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling

from captured_steps import captured, over_slots
from decoding_cases import composition, prompts, unexcused


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return composition("llama", tmp_path)


def test_a_free_slot_is_given_away_without_waiting_for_passes(model: Any) -> None:
    engine = captured(Engine(model, slots=2))
    first = engine.submit(prompts(1, 20)[0], Sampling(30, ignore_end=True))
    for _ in range(3):
        engine.step()
    waited: list[int] = []
    collect = engine._collect
    engine._collect = lambda in_flight, *sent: (waited.append(in_flight), collect(in_flight, *sent))[1]  # type: ignore[method-assign]
    second = engine.submit(prompts(2, 20)[1], Sampling(6, ignore_end=True))
    engine.step()
    assert engine.in_slot == [first, second]
    assert 0 not in waited  # nothing had to be known of the slot's last owner
    while not second.done:
        engine.step()
    third = engine.submit([5, 6, 7], Sampling(4, ignore_end=True))  # into the slot of one whose last token is underway
    engine.step()
    assert third in engine.in_slot
    while engine.busy:
        engine.step()
    assert not unexcused(model, [first, second, third])


def test_a_slot_that_a_pass_still_writes_is_waited_for(model: Any) -> None:
    engine = captured(Engine(model, slots=1))
    given = prompts(6, 20)
    requests = [engine.submit(text, Sampling(3 + n, ignore_end=True)) for n, text in enumerate(given)]
    while engine.busy:
        engine.step()
    assert not unexcused(model, requests)
    assert [len(request.tokens) for request in requests] == [3 + n for n in range(6)]


def test_sequences_move_one_by_one_and_not_while_a_prompt_is_read(model: Any) -> None:
    """Eight of sixteen end at once; the last ones move into their slots, while others come."""
    engine = captured(Engine(model, slots=16))
    texts = prompts(16, 20)
    requests = [engine.submit(text, Sampling(6 if n < 8 else 40, ignore_end=True)) for n, text in enumerate(texts)]
    moved: list[int] = []
    move, prefill = engine.executor.move, engine._prefill
    read: list[bool] = []
    engine.executor.move = lambda *given: (moved.append(given[0]), move(*given))[1]  # type: ignore[method-assign]
    engine._prefill = lambda *given: (read.append(True), prefill(*given))[1]  # type: ignore[method-assign]
    moves_before = steps_with_moves = 0
    while engine.busy:
        if all(request.done for request in requests[:8]) and len(requests) < 18:
            requests.append(engine.submit(texts[0][:3] + [9] * 40, Sampling(5, ignore_end=True)))
        moves_before = len(moved)
        read.clear()
        engine.step()
        assert len(moved) <= moves_before + (0 if read else 1)
        steps_with_moves += len(moved) - moves_before
    assert steps_with_moves >= 4
    assert not unexcused(model, requests)


def test_where_forwards_are_not_waited_for_all_move_at_once(model: Any) -> None:
    engine = over_slots(Engine(model, slots=8))
    texts = prompts(8, 20)
    requests = [engine.submit(text, Sampling(4 if n < 4 else 20, ignore_end=True)) for n, text in enumerate(texts)]
    while not all(request.done for request in requests[:4]):
        engine.step()
    engine.step()
    assert [request in requests[4:] for request in engine.in_slot] == [True] * 4 + [False] * 4
    while engine.busy:
        engine.step()
    assert not unexcused(model, requests)
