"""Requests come and go between steps: slots, cancelling, ends, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling
from tessellm.errors import EngineError, GenerationError, PromptError

from captured_steps import over_slots
from conftest import build_model, perturbed
from decoding_cases import alone, prompts, unexcused


@pytest.fixture(scope="module")
def model() -> Any:
    base = build_model("llama", eos_token_id=None)
    return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")


@pytest.fixture(scope="module")
def ending() -> Any:
    """A composition with several end tokens, different for its members."""
    base = build_model("llama", eos_token_id=[2, 9])
    other = perturbed(base, 1)
    other.config.eos_token_id = other.generation_config.eos_token_id = [17, 30, 41]
    return tessellm.compose(base, {"a": other, "b": perturbed(base, 2)}, rule="product")


def run_until(engine: Engine, happened: Callable[[], bool]) -> None:
    for _ in range(500):
        if happened():
            return
        engine.step()
    raise AssertionError("it never happened")


def test_a_finished_row_frees_its_slot_at_once(model: Any) -> None:
    engine = Engine(model, slots=2)
    short, long, next_one = (
        engine.submit(prompt, Sampling(max_new_tokens=new)) for prompt, new in zip(prompts(3), (2, 20, 6), strict=True)
    )
    run_until(engine, lambda: short.done)
    assert next_one not in engine.in_slot
    assert not long.done
    engine.step()
    assert next_one in engine.in_slot
    assert len(next_one.tokens) >= 1
    assert not long.done
    run_until(engine, lambda: not engine.busy)
    assert [len(r.tokens) for r in (short, long, next_one)] == [2, 20, 6]
    assert [r.finish_reason for r in (short, long, next_one)] == ["length"] * 3
    assert not unexcused(model, [short, long, next_one])


def test_a_request_may_enter_at_any_step(model: Any) -> None:
    engine = Engine(model, slots=4)
    texts = prompts(8, seed=3)
    entered: list[Request] = []
    for text in texts:
        entered.append(engine.submit(text, Sampling(max_new_tokens=11)))
        engine.step()
    run_until(engine, lambda: not engine.busy)
    assert not unexcused(model, entered)
    assert [r.tokens for r in entered] == [alone(model, text, Sampling(max_new_tokens=11)).tokens for text in texts]


def test_rows_are_moved_together_when_others_leave(model: Any) -> None:
    """Where all members of the first slots run."""
    engine = over_slots(Engine(model, slots=6))
    requests = [
        engine.submit(text, Sampling(max_new_tokens=new))
        for text, new in zip(prompts(6, seed=4), (2, 3, 4, 5, 20, 25), strict=True)
    ]
    run_until(engine, lambda: sum(r.done for r in requests) == 4)
    run_until(engine, lambda: set(engine.in_slot[:2]) == set(requests[4:]))
    assert not any(r.done for r in requests[4:])
    run_until(engine, lambda: not engine.busy)
    assert not unexcused(model, requests)


def test_cancel_frees_the_slot_wherever_the_request_is(model: Any) -> None:
    engine = Engine(model, slots=2)
    running, kept, waiting = (engine.submit(text, Sampling(max_new_tokens=30)) for text in prompts(3, seed=5))
    run_until(engine, lambda: len(running.tokens) == 3)
    engine.cancel(running)
    assert engine.in_slot.count(None) == 1
    engine.cancel(waiting)
    assert not engine.waiting
    late = engine.submit(prompts(1, seed=6)[0], Sampling(max_new_tokens=5))
    run_until(engine, lambda: not engine.busy)
    assert (running.finish_reason, len(running.tokens)) == ("cancelled", 3)
    assert (waiting.finish_reason, waiting.tokens) == ("cancelled", [])
    assert (kept.finish_reason, late.finish_reason) == ("length", "length")
    assert not unexcused(model, [kept, late])
    engine.cancel(kept)
    assert kept.finish_reason == "length"


def test_every_members_end_tokens_end_a_text(ending: Any) -> None:
    ends = {2, 9, 17, 30, 41}
    assert set(ending.config.eos_token_id) == ends
    engine = Engine(ending, slots=5)
    requests = engine.generate(prompts(16, 20), Sampling(max_new_tokens=40, temperature=1.5, seed=1))
    stopped = [r for r in requests if r.finish_reason == "stop"]
    assert len({r.tokens[-1] for r in stopped}) > 2
    for request in requests:
        inside = request.tokens[:-1] if request.finish_reason == "stop" else request.tokens
        assert not ends & set(inside)
        assert (request.finish_reason == "stop") == (request.tokens[-1] in ends)
    going_on = Engine(ending, slots=5).generate(
        [r.prompt for r in requests], Sampling(max_new_tokens=40, temperature=1.5, seed=1, ignore_end=True)
    )
    for request, longer in zip(requests, going_on, strict=True):
        assert longer.tokens[: len(request.tokens)] == request.tokens
        assert len(longer.tokens) == 40


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), slots=st.integers(1, 5))
def test_any_schedule_writes_what_each_request_writes_alone(data: st.DataObject, slots: int, ending: Any) -> None:
    engine = Engine(ending, slots=slots)
    bases = prompts(3, 60, seed=data.draw(st.integers(0, 99)))
    requests: list[Request] = []
    for action in data.draw(st.lists(st.sampled_from(["submit", "submit", "step", "step", "cancel"]), max_size=25)):
        if action == "submit":
            text = bases[data.draw(st.integers(0, 2))]
            prompt = text[: data.draw(st.integers(1, len(text)))] + [4] * data.draw(st.integers(0, 2))
            warm = data.draw(st.sampled_from([0.0, 0.0, 1.0]))
            sampling = Sampling(data.draw(st.integers(1, 20)), warm, data.draw(st.sampled_from([1.0, 0.8])), seed=7)
            requests.append(engine.submit(prompt, sampling))
        elif action == "step":
            engine.step()
        elif requests:
            engine.cancel(requests[data.draw(st.integers(0, len(requests) - 1))])
    run_until(engine, lambda: not engine.busy)
    assert all(r.done for r in requests)
    assert engine.in_slot == [None] * slots
    assert not unexcused(ending, [r for r in requests if r.sampling.temperature == 0 and r.tokens])
    for request in requests:
        expected = alone(ending, request.prompt, request.sampling)
        if request.finish_reason == "cancelled":
            assert request.tokens == expected.tokens[: len(request.tokens)]
        else:
            assert (request.tokens, request.finish_reason) == (expected.tokens, expected.finish_reason)


def test_what_cannot_be_run_is_refused_with_what_to_do(model: Any) -> None:
    engine = Engine(model, slots=2, context=40)
    with pytest.raises(PromptError, match="the prompt is empty"):
        engine.submit([])
    with pytest.raises(PromptError, match="from 0 to 63; got 64"):
        engine.submit([3, 64])
    with pytest.raises(
        PromptError, match=r"30 tokens and up to 11 more .* room for 40 .*a slot holds.* the engine larger"
    ):
        engine.submit([5] * 30, Sampling(max_new_tokens=11))
    with pytest.raises(PromptError, match="empty"):
        engine.generate([[5], []], Sampling(max_new_tokens=2))
    assert not engine.busy
    with pytest.raises(GenerationError, match="one for each of 2 prompts; got 1"):
        engine.generate([[5], [6]], [Sampling()])
    with pytest.raises(EngineError, match="at least one slot"):
        Engine(model, slots=0)
    assert Engine(model, context=10**6).context == 128
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}):
        with pytest.raises(GenerationError, match="expected"):
            Sampling(**wrong)  # type: ignore[arg-type]


def test_damaged_weights_end_a_request_and_not_the_engine(model: Any) -> None:
    base = build_model("llama", eos_token_id=None)
    broken = perturbed(base, 1)
    with torch.no_grad():
        broken.get_input_embeddings().weight[11] = torch.nan
    engine = Engine(tessellm.compose(base, {"a": broken}, rule="product"), slots=2)
    bad, good = engine.generate([[5, 11, 6], [5, 12, 6]], Sampling(max_new_tokens=1))
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "NaN" in (bad.error or "")


@pytest.mark.parametrize(
    ("tokens", "logprobs", "ignore_end", "kept", "reason"),
    [
        ([5, 6], [-1.0, -1.0], False, 2, None),
        ([5, 2, 6], [-1.0] * 3, False, 2, "stop"),
        ([5, 2, 6], [-1.0] * 3, True, 3, None),
        ([5, 6, 7, 8, 2], [-1.0] * 5, False, 4, "length"),
        ([5, 6, 7, 2], [-1.0] * 4, False, 4, "stop"),
        ([5, 6, 2], [-1.0, float("nan"), -1.0], False, 2, None),
        ([], [], False, 0, None),
    ],
)
def test_tokens_are_kept_up_to_an_end_the_length_or_nan(
    tokens: list[int], logprobs: list[float], ignore_end: bool, kept: int, reason: str | None
) -> None:
    request = Request([1], Sampling(max_new_tokens=4, ignore_end=ignore_end))
    views = [{"token": token} for token in [*tokens, 99]]  # an observer sees tokens behind a fallen draft, too
    request.receive(tokens, logprobs, frozenset([2]), views)
    assert request.tokens == tokens[:kept]
    assert len(request.logprobs) == kept
    assert request.seen == views[:kept]
    assert request.finish_reason == reason
