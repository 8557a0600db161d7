"""Prompts in short pieces while others are written to: the same texts, and passes that take as long as they may."""

from __future__ import annotations

from typing import Any

import pytest

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.prefill_controller import LEAST, LEAST_ON_GPU, MEASURED, MOST, RECENT, WITHIN, PrefillPace
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling
from tessellm.serve.targets import Targets

from captured_steps import FixedPrefillPace
from conftest import build_model, perturbed
from decoding_cases import prompts

LONG, NEW = Sampling(60, ignore_end=True), Sampling(6, ignore_end=True)


@pytest.fixture(scope="module", params=["mixture", "product"])
def model(request: pytest.FixtureRequest) -> Any:
    base = build_model("llama", eos_token_id=None, max_position_embeddings=512)
    return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule=request.param)


def paced(model: Any, tokens: int, **settings: Any) -> Engine:
    engine = Engine(model, slots=4, context=300, **settings)
    engine.controller.pace = FixedPrefillPace(tokens)
    return engine


def written(engine: Engine, requests: list[Request]) -> list[Request]:
    """Requests that come one after another, while a long text is written."""
    first = engine.submit([5, 6, 7], LONG)
    for request in requests:
        engine.step()
        engine.waiting.append(engine.limits.check(request))
    while engine.busy:
        engine.step()
    return [first, *requests]


@pytest.mark.parametrize(("tokens", "plain"), [(1, False), (7, False), (40, True)])
def test_texts_are_those_of_prompts_read_at_once(model: Any, tokens: int, plain: bool) -> None:
    """Shorter than windows and longer; several at a time where they fit."""
    given = [
        *prompts(5, 20),
        *([text * 30][0][:length] for text, length in zip(prompts(3, 20), (64, 66, 130), strict=True)),
    ]
    asked = [NEW, Sampling(6, 1.0, 0.9, 3, True)]
    found = written(paced(model, tokens, plain=plain), [Request(text, asked[n % 2]) for n, text in enumerate(given)])
    expected = Engine(model, slots=4, context=300).generate([r.prompt for r in found], [r.sampling for r in found])
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_named_experts_and_observers_are_read_in_chunks_too(model: Any) -> None:
    targets = Targets(model, "own")
    each = [targets.find("own:a"), targets.find("own", "product"), targets.find("own")]
    found = []
    for tokens in (300, 9):
        asked = [Request((prompts(1, 20)[0] * 30)[:100], NEW, t.experts, t.trace, True) for t in each]
        found.append(written(paced(model, tokens), asked))
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        assert [view.keys() for view in one.seen] == [view.keys() for view in other.seen]


def test_those_who_are_written_to_wait_for_short_chunks_alone(model: Any) -> None:
    engine, fed = paced(model, 8), []
    plain = engine.executor.prefill
    engine.executor.prefill = lambda chunk, *more: (fed.append(sum(p.count for p in chunk.parts)), plain(chunk, *more))[
        1
    ]  # type: ignore[method-assign]
    running = engine.submit([5, 6, 7], LONG)
    engine.step()
    late = engine.submit(prompts(1, 20)[0] * 9, NEW)
    while not late.tokens:
        before = len(running.tokens)
        engine.step()
        assert len(running.tokens) == before + 1
    assert max(fed[1:]) <= 8
    assert sum(fed[1:]) == 3 * len(late.prompt)
    fed.clear()
    while engine.busy:
        engine.step()
    engine.generate([prompts(2, 20)[1] * 9], NEW)  # nobody waits
    assert len(fed) == 1


def test_who_came_first_is_read_first(model: Any) -> None:
    engine = paced(model, 8)
    running = [engine.submit([5, 6, n], Sampling(3 + n, ignore_end=True)) for n in (0, 20, 20)]
    while not running[0].done:
        engine.step()
    late = [engine.submit([7 + n] * 30, NEW) for n in range(2)]  # the second one's slot is before the first one's
    while not all(request.tokens for request in late):
        engine.step()
        assert late[0].tokens or not any(branch.computed for branch in late[1].branches.values())


def test_pieces_take_as_long_as_they_may() -> None:
    """A pass of 50 ms and 20 ms a token, beside steps of 100 ms, then of 400."""
    pace, now = PrefillPace(on_gpu=False), [0.0]
    pace.clock = lambda: now[0]  # type: ignore[method-assign]

    def step(seconds: float, fed: int = 0, decoding: bool = True) -> None:
        pace.begin()
        if fed:
            pace.feed(fed)
        now[0] += seconds + (0.05 + 0.02 * fed if fed else 0)
        pace.end(decoding)

    step(0.1, pace.tokens)
    assert pace.tokens == LEAST  # there is nothing to compare with yet
    for seconds in (0.1, 0.4):
        for _ in range(RECENT):
            step(seconds)
            step(seconds)
            step(seconds, pace.tokens)
        assert seconds + 0.05 + 0.02 * pace.tokens == pytest.approx(WITHIN * seconds, abs=0.03)
    before = pace.tokens
    step(0.4, 1)
    step(9.0, MOST, decoding=False)
    assert pace.tokens == before  # neither tells anything
    for _ in range(RECENT):  # users come so fast that every step has a piece
        step(0.4, pace.tokens)
    assert 0.4 + 0.05 + 0.02 * pace.tokens == pytest.approx(WITHIN * 0.4, abs=0.03)
    for _ in range(RECENT):  # what is usual counts, not one slow step
        step(0.1)
    step(0.5)
    step(0.5, pace.tokens)
    for _ in range(9):
        step(0.1, pace.tokens)
    assert pace.tokens <= 2 * LEAST


def test_chunks_grow_though_prompts_never_end() -> None:
    """A server that is busy from the beginning: a step now and then goes without a prompt, and is measured."""
    pace, now, without = PrefillPace(on_gpu=False), [0.0], 0
    pace.clock = lambda: now[0]  # type: ignore[method-assign]
    for _ in range(RECENT):
        pace.begin()
        if pace.due:
            without += 1
        else:
            pace.feed(pace.tokens)
            now[0] += 0.05 + 0.01 * pace.tokens
        now[0] += 0.2
        pace.end(decoding=True)
    assert without == 1 + (RECENT - 1) // (MEASURED + 1)
    assert 0.2 + 0.05 + 0.01 * pace.tokens == pytest.approx(WITHIN * 0.2, abs=0.02)


def test_where_a_device_tells_what_pieces_take_none_is_tried() -> None:
    """Twice as many tokens may take hardly longer: who doubles a piece where half the time is left never finds out."""
    pace, now = PrefillPace(on_gpu=True, seconds={64: 5.5, 128: 5.9, 256: 8.5, 512: 14.0}), [0.0]
    pace.clock = lambda: now[0]  # type: ignore[method-assign]
    assert pace.tokens == LEAST_ON_GPU
    for step, tokens in ((5.9, 128), (20.0, 512), (2.0, 64), (7.5, 256)):
        for _ in range(RECENT):
            pace.begin()
            now[0] += step
            pace.end(decoding=True)
        assert pace.tokens == tokens
