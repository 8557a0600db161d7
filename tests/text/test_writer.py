"""One loop over an engine: who leaves, what ends at a stop text, and the same texts by every way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tessellm
from draft_distribution import draft_always
from tessellm.engine.engine import Engine
from tessellm.engine.speculation import Speculation
from tessellm.evaluate.writer import Ask, BlockWriter
from tessellm.text.engines import engine_for
from tessellm.text.generate import by_engine, generate_texts
from tessellm.text.options import TextOptions, seed_of
from tessellm.text.writer import Writer, order

from conftest import build_model, character_tokenizer

PROMPTS = ["abc", "what is 2+2?", "x"]


@pytest.fixture(scope="module")
def model(composed: tuple[Any, Path]) -> Any:
    return composed[0]


def test_drafts_bring_no_tokens_behind_a_stop_text() -> None:
    """Also where the last tokens of a text come together, and the stop text is among them."""
    base, row = build_model("llama", eos_token_id=None), [5, 6, 7]
    model, tokenizer = tessellm.compose(base, {"same": build_model("llama")}, rule="product"), character_tokenizer()
    (written,) = by_engine(Engine(model, 1), tokenizer, [row], TextOptions(80))
    place = next(n for n in range(40, 78) if written[n : n + 2] not in [written[m : m + 2] for m in range(n)])
    asked = TextOptions(80, stop=(tokenizer.decode(written[place : place + 2]),))
    engine = engine_for(model, [(3, 80)], speculation=Speculation("lookup"))
    assert engine is not None
    assert list(by_engine(draft_always(engine, 8), tokenizer, [row], asked)) == [written[: place + 2]]
    assert engine.speculator is not None
    assert engine.speculator.accepted > 0


def test_a_stop_text_ends_a_request_and_takes_all_that_came_behind_it(model: Any) -> None:
    engine, ids = Engine(model, 2), model.tokenizer("abc")["input_ids"]
    (free,) = by_engine(engine, model.tokenizer, [ids], TextOptions(20))
    stop = model.tokenizer.decode(free[4:6])
    request, finder = order(engine, model.tokenizer, ids, TextOptions(20, stop=(stop,)), 0)
    for _ in Writer(engine).write([(request, finder)]):
        assert len(request.tokens) == len(request.logprobs)
    assert (request.tokens, request.finish_reason) == (free[:6], "stop")
    assert engine.in_slot == [None, None]


def test_who_leaves_leaves_nothing_running(model: Any) -> None:
    engine = Engine(model, 1)
    ordered = [order(engine, model.tokenizer, [5 + n], TextOptions(20), n) for n in range(3)]
    arrivals = Writer(engine).write(ordered)
    assert next(arrivals)[0] == 0
    arrivals.close()
    assert not engine.waiting
    assert engine.in_slot == [None]
    assert [request.finish_reason for request, _ in ordered] == ["cancelled"] * 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generate_and_evaluate_write_the_same_texts_by_the_same_seeds(model: Any, temperature: float) -> None:
    options = TextOptions(12, temperature, seed=3, stop=("e",))
    texts = [(each.text, each.tokens) for each in generate_texts(model, PROMPTS, options)]
    asks = [Ask(tuple(model.tokenizer(prompt)["input_ids"]), options) for prompt in PROMPTS]
    written = dict(BlockWriter(model).write(asks))
    assert [(written[n].text, written[n].tokens) for n in range(len(PROMPTS))] == texts


def test_texts_that_share_a_seed_have_seeds_of_their_own() -> None:
    seeds = [seed_of(seed, number) for seed in (0, 1, 2**32 - 1, -1) for number in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
