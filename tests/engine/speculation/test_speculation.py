"""Speculation changes how fast a text comes, never which text: at any batch size, greedy and sampled."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation import Speculation
from tessellm.errors import EngineError

from chi_square import chi_square_p_value
from decoding_cases import prompts
from speculation_cases import agreeing, bias, drafting, repeating, texts, tiny


def test_an_end_inside_a_draft_ends_the_text_and_frees_the_slot() -> None:
    model, given = agreeing(), repeating(6)
    asked = Sampling(max_new_tokens=30)
    free_running = texts(Engine(model, slots=4).generate(given, Sampling(max_new_tokens=8, ignore_end=True)))
    ends = frozenset(text[7] for text in free_running)
    plain, engine = Engine(model, slots=4), drafting(model, 4)
    plain.ends = engine.ends = ends
    expected, found = plain.generate(given, asked), engine.generate(given, asked)
    assert texts(found) == texts(expected)
    assert all(r.finish_reason == "stop" and r.tokens[-1] in ends and not ends & {*r.tokens[:-1]} for r in found)
    assert engine.speculator is not None
    assert engine.speculator.drafted > 0
    longer = [[*r.prompt, *r.tokens[:-1], *range(4, 40)] for r in found]  # begin as the slots' caches do
    fresh = Engine(model, slots=1)
    fresh.ends, fresh.prefixes.on = ends, False
    asked = Sampling(max_new_tokens=12)
    assert texts(engine.generate(longer, asked)) == texts(fresh.generate(longer, asked))
    assert engine.prefixes.reused_tokens > 0


def test_never_more_tokens_than_asked_for() -> None:
    model, given = agreeing(), prompts(14, 40)
    whole = texts(Engine(model, slots=8).generate(given, Sampling(max_new_tokens=14, ignore_end=True)))
    asked = [Sampling(max_new_tokens=1 + i, ignore_end=True) for i in range(14)]
    found = drafting(model, 8).generate(given, asked)
    assert texts(found) == [text[: 1 + i] for i, text in enumerate(whole)]
    assert all(r.finish_reason == "length" and len(r.logprobs) == len(r.tokens) for r in found)


def test_a_draft_never_runs_past_the_context() -> None:
    model, given = agreeing(), prompts(3, 20)
    length = max(map(len, given)) + 10
    asked = Sampling(max_new_tokens=10, ignore_end=True)
    engine = drafting(model, 3, context=length)
    assert texts(engine.generate(given, asked)) == texts(Engine(model, slots=3).generate(given, asked))


def test_cancel_in_the_middle_leaves_the_others_alone() -> None:
    model, given = agreeing(), prompts(6, 40)
    asked = Sampling(max_new_tokens=24, ignore_end=True)
    expected = texts(Engine(model, slots=4).generate(given, asked))
    engine = drafting(model, 4, 4)
    requests = [engine.submit(prompt, asked) for prompt in given]
    for _ in range(2):
        engine.step()
    gone = requests[1]
    assert 0 < len(gone.tokens) < 24
    engine.cancel(gone)
    kept = list(gone.tokens)
    while engine.busy:
        assert len(arrived := engine.step()) == len({*arrived})
    assert gone.finish_reason == "cancelled"
    assert gone.tokens == kept == expected[1][: len(kept)]
    assert [r.tokens for r in requests if r is not gone] == [t for i, t in enumerate(expected) if i != 1]


def p_value(model: Any, engine: Engine, prompt: list[int], length: int, draws: int) -> float:
    """Of the texts drawn, given the probability of every text by the reference model."""
    every = list(itertools.product(range(4), repeat=length))
    rows = torch.tensor([[*prompt, *text] for text in every])
    with torch.no_grad():
        logp_NTV = model(rows, use_cache=False).logits[:, len(prompt) - 1 : -1]
    chance_N = logp_NTV.gather(-1, rows[:, len(prompt) :, None])[..., 0].sum(1).double().exp()
    assert abs(float(chance_N.sum()) - 1) < 1e-5
    asked = [Sampling(max_new_tokens=length, temperature=1.0, seed=seed) for seed in range(draws)]
    drawn = Counter(tuple(r.tokens) for r in engine.generate([prompt] * draws, asked))
    return chi_square_p_value(torch.tensor([float(drawn[text]) for text in every]), chance_N.float())


def test_sampled_texts_have_the_composed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a test that would see otherwise: with noise of the seed alone, not of the position, texts are other ones."""
    model, prompt = tiny(), [0, 1, 2, 3, 0, 1, 2]
    engine = drafting(model, 8, 2)
    assert p_value(model, engine, prompt, 3, 1000) > 1e-3
    assert engine.speculator is not None
    assert engine.speculator.accepted > 50
    bias(monkeypatch)
    assert p_value(model, engine, prompt, 3, 1000) < 1e-9


def test_the_command(cli: Any, members_dir: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {members_dir / 'base'}\nexperts: {{math: {members_dir / 'math'}}}\n")
    asked = ("generate", recipe, "abcabcab", "--max-new-tokens", 20)
    plain = cli(*asked)
    assert cli(*asked, "--speculate", "lookup") == plain
    for wrong, said in (
        (("members",), "or 'none'; got 'members'"),
        (("lookup", "--engine", "reference"), "leave out --speculate or --engine reference"),
    ):
        ran = cli(*asked, "--speculate", *wrong)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err.replace("\n", " ")


def test_memory_that_runs_out_while_verifying_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = agreeing(), repeating(3)
    asked = Sampling(max_new_tokens=10, ignore_end=True)
    engine = drafting(model, 3, 4)
    plain = engine.executor.verify

    def small(running: Any, *given: Any) -> Any:
        if len(running) > 2:
            raise torch.OutOfMemoryError(f"{len(running)} rows")
        return plain(running, *given)

    monkeypatch.setattr(engine.executor, "verify", small)
    found = engine.generate(given, asked)
    assert [r.finish_reason for r in found] == ["length", "length", "error"]
    assert texts(found[:2]) == texts(Engine(model, slots=2).generate(given[:2], asked))


def test_refuses_what_it_cannot_draft_with() -> None:
    with pytest.raises(EngineError, match="'lookup' or 'none'; got"):
        Speculation("members")
