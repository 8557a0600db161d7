"""Drafts are as long as pays: a clock that charges for forwards tells whether they did."""

from __future__ import annotations

from typing import Any

import pytest

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation import Speculation, speculator

from captured_steps import captured, over_slots
from conftest import build_model
from decoding_cases import prompts, unexcused
from speculation_cases import Priced, agreeing, texts

LOOKUP = Speculation("lookup")


def strangers() -> Any:
    base = build_model("llama")
    experts = {"a": build_model("llama", 5), "b": build_model("llama", 6)}
    return tessellm.compose(base, experts, rule="product")


def test_useless_drafts_are_left_alone() -> None:
    engine = Engine(strangers(), slots=4, speculation=LOOKUP)
    clock = Priced(engine, verifying=0.4)
    engine.generate(prompts(4, 20), Sampling(max_new_tokens=100, ignore_end=True, temperature=8.0))
    assert clock.now / 100 < 1.12


def test_drafts_that_do_not_pay_do_not_keep_steps_waiting() -> None:
    """As on a GPU: a step may start before the last one's tokens are read, unless a draft is to start from them."""
    model = strangers()
    asked = [Sampling(100, 8.0, seed=n, ignore_end=True) for n in range(5)]
    engine = over_slots(Engine(model, slots=4, speculation=LOOKUP))
    engine.executor.in_flight = 1
    Priced(engine, verifying=0.4)
    assert texts(engine.generate(prompts(5, 20), asked)) == texts(
        Engine(model, slots=4).generate(prompts(5, 20), asked)
    )
    assert engine.speculator is not None
    assert engine.speculator.passes < 100  # of two hundred steps


def test_good_drafts_are_used() -> None:
    engine = Engine(agreeing(), slots=1, speculation=LOOKUP)
    clock = Priced(engine, verifying=0.05)
    engine.generate([[5, 6, 7]], Sampling(120, ignore_end=True))
    assert clock.now / 120 < 0.8  # a greedy text repeats itself


def test_tokens_that_were_on_their_way_are_told_before_the_next_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafts do not pay, steps go on without waiting for one another, and wait again when drafts are tried."""
    monkeypatch.setattr(speculator, "PATIENCE", 2)
    monkeypatch.setattr(speculator, "REST", 3)
    model = agreeing(apart=0.5)
    engine = captured(Engine(model, slots=4, speculation=LOOKUP))
    assert engine.speculator is not None
    monkeypatch.setattr(engine.speculator.pace, "choose", lambda *given: 0)
    given = prompts(12, 20)
    requests = [engine.submit(text, Sampling(30, ignore_end=True)) for text in given[:2]]
    steps = 0
    while engine.busy:
        if steps in range(5, 15):  # prompts are read beside them
            requests.append(engine.submit(given[len(requests)], Sampling(3, ignore_end=True)))
        before = [len(request.tokens) for request in requests]
        engine.step()
        steps += 1
        assert all(not count or len(r.tokens) <= count + 1 for r, count in zip(requests, before, strict=True))
    assert steps < 75
    assert not unexcused(model, requests)
