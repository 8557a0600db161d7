"""Drafts are as long as pays: a clock that charges for passes tells whether they did."""

from __future__ import annotations

from typing import Any

import tessellm
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation

from conftest import build_model
from decoding_cases import prompts
from speculation_cases import Priced, agreeing, texts


def cost_a_token(model: Any, draft: str, tokens: int = 100) -> float:
    engine = Engine(model, slots=4, speculation=Speculation(draft))
    clock = Priced(engine, drafting=0.3, verifying=0.1)
    engine.generate(prompts(4, 20), Sampling(max_new_tokens=tokens, ignore_end=True))
    return clock.now / tokens


def test_a_useless_drafter_is_left_alone() -> None:
    base = build_model("llama")
    strangers = tessellm.compose(base, {"a": build_model("llama", 5), "b": build_model("llama", 6)}, rule="product")
    assert cost_a_token(strangers, "member:a") < 1.12


def test_drafts_that_do_not_pay_do_not_keep_steps_waiting() -> None:
    """As on a GPU: a step may start before the last one's tokens are read, unless a draft is to start from them."""
    base = build_model("llama")
    strangers = tessellm.compose(base, {"a": build_model("llama", 5), "b": build_model("llama", 6)}, rule="product")
    given, asked = prompts(5, 20), Sampling(max_new_tokens=100, ignore_end=True)
    engine = Engine(strangers, slots=4, speculation=Speculation("member:a"))
    engine.steps.lag = 1
    Priced(engine, drafting=0.3, verifying=0.1)
    assert texts(engine.generate(given, asked)) == texts(Engine(strangers, slots=4).generate(given, asked))
    assert engine.speculator is not None
    assert engine.speculator.passes < 80  # of two hundred steps


def test_a_good_drafter_is_used() -> None:
    assert cost_a_token(agreeing(1e-5), "member:base") < 0.7


def test_compiling_and_capturing_are_no_cost_of_a_length() -> None:
    """A graph is captured whenever texts outgrow their cells: that must not scare a length away."""
    engine = Engine(agreeing(1e-5), slots=4, speculation=Speculation("member:base"))
    clock = Priced(engine, drafting=0.3, verifying=0.1)
    inner, steps, seen = engine.steps.run, engine.steps, set()

    def captured(name: str, run: Any, rows: int, length: int, cells: int, choice: Any) -> None:
        if name == "verify" and (new := (length, cells // 16)) not in seen:
            seen.add(new)
            clock.now, steps.prepared_seconds = clock.now + 1e4, steps.prepared_seconds + 1e4
        inner(name, run, rows, length, cells, choice)

    engine.steps.run = captured  # type: ignore[method-assign]
    engine.generate(prompts(4, 20), Sampling(max_new_tokens=100, ignore_end=True))
    assert (clock.now - steps.prepared_seconds) / 100 < 0.7
