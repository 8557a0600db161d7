"""Memory that runs out makes batches smaller, then fails single requests, never the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessellm
from tessellm.engine.branch_executor import BranchExecutor
from tessellm.engine.cuda.slot_executor import SlotExecutor
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling

from captured_steps import over_slots
from conftest import build_model, perturbed
from decoding_cases import prompts, unexcused

NEW = Sampling(max_new_tokens=8)


@pytest.fixture(scope="module")
def model() -> Any:
    base = build_model("llama", eos_token_id=None, max_position_embeddings=1024)
    return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Let passes over more tokens than these run out of memory."""

    def set_limit(prefill: int, decode: int) -> None:
        plain_prefill, plain_decode = BranchExecutor.prefill, BranchExecutor.decode

        def small_prefill(self: Any, chunk: Any, *running: Any) -> Any:
            count = sum(part.count for part in chunk.parts)
            if count > prefill:
                raise torch.OutOfMemoryError(f"{count} tokens\nand more")
            return plain_prefill(self, chunk, *running)

        def small_decode(self: Any, running: Any, slots: Any) -> Any:
            if len(running) > decode:
                raise torch.OutOfMemoryError(f"{len(running)} rows")
            return plain_decode(self, running, slots)

        monkeypatch.setattr(BranchExecutor, "prefill", small_prefill)
        monkeypatch.setattr(BranchExecutor, "decode", small_decode)

    return set_limit


def long_prompts(count: int) -> list[list[int]]:
    return [text * 12 for text in prompts(count, 60, seed=8)]


def test_prompts_are_fed_in_smaller_pieces(model: Any, limit: Any) -> None:
    limit(130, 9)
    requests = Engine(model, slots=4).generate(long_prompts(6), NEW)
    assert [r.finish_reason for r in requests] == ["length"] * 6
    assert not unexcused(model, requests)


def test_a_prompt_that_cannot_be_fed_fails_and_the_others_go_on(model: Any, limit: Any) -> None:
    limit(15, 9)
    texts = prompts(5, 15, seed=1)
    texts[2] = long_prompts(1)[0]
    requests = Engine(model, slots=2).generate(texts, NEW)
    assert [r.finish_reason for r in requests] == ["length", "length", "error", "length", "length"]
    assert "memory ran out while its prompt was read" in (requests[2].error or "")
    assert "and more" not in (requests[2].error or "")
    assert not unexcused(model, [r for r in requests if not r.error])


def test_too_many_rows_fail_the_youngest_and_the_engine_keeps_to_fewer(model: Any, limit: Any) -> None:
    limit(10_000, 2)
    engine = Engine(model, slots=4)
    requests = engine.generate(prompts(8, 30, seed=2), NEW)
    reasons = [r.finish_reason for r in requests]
    assert reasons.count("error") == 2
    assert reasons[:2] == ["length"] * 2
    assert engine.most_rows == 2
    assert not unexcused(model, [r for r in requests if not r.error])
    assert not engine.busy


@pytest.mark.parametrize("kind", [BranchExecutor, SlotExecutor])
@pytest.mark.parametrize("warmth", [0.0, 1.0])
def test_a_step_that_ran_out_halfway_can_be_tried_again(
    model: Any, warmth: float, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may have moved on when choosing a token fails."""
    engine = Engine(model, slots=2)
    if kind is SlotExecutor:
        over_slots(engine)
    asked = Sampling(8, warmth, seed=1)
    request = engine.submit(prompts(1, 30, seed=3)[0], asked)
    engine.step()
    before, token = list(request.tokens), torch.Tensor.isnan

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.Tensor, "isnan", full)  # after the rule, members with NaN are looked for
    with pytest.raises(torch.OutOfMemoryError), torch.inference_mode():
        engine.executor.decode([request], [0])
    monkeypatch.undo()
    assert (request.tokens, torch.Tensor.isnan) == (before, token)
    while not request.done:
        engine.step()
    assert request.tokens == Engine(model, slots=1).generate([request.prompt], asked)[0].tokens
