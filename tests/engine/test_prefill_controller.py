"""Prompts are fed in chunks, and a beginning that several share is fed once; neither changes what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tessellm
from tessellm.engine.branch_executor import BranchExecutor
from tessellm.engine.engine import Engine
from tessellm.engine.prefill_controller import PASS_TOKENS
from tessellm.engine.sampling import Sampling

from conftest import VOCAB, build_model, perturbed
from decoding_cases import alone, unexcused

NEW = Sampling(max_new_tokens=8)


@pytest.fixture(scope="module", params=["product"])
def model(request: pytest.FixtureRequest) -> Any:
    base = build_model("llama", eos_token_id=None, max_position_embeddings=1024)
    return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule=request.param)


def random_text(length: int, seed: int) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of a member each prefill reads."""
    counts: list[int] = []
    plain = BranchExecutor.prefill

    def counting(self: Any, chunk: Any, *running: Any) -> Any:
        counts.append(sum(part.count for part in chunk.parts if part.member == 1))
        return plain(self, chunk, *running)

    monkeypatch.setattr(BranchExecutor, "prefill", counting)
    return counts


def test_prompts_longer_than_a_chunk(model: Any, fed: list[int]) -> None:
    lengths = [1, 255, 256, 257, 320, 321, 500, 577, 800]
    texts = [random_text(length, length) for length in lengths]
    requests = Engine(model, slots=4).generate(texts, NEW)
    assert sum(fed) == sum(lengths)
    assert max(fed) <= PASS_TOKENS
    assert not unexcused(model, requests)


def test_decoding_goes_on_while_a_long_prompt_is_fed(model: Any) -> None:
    engine = Engine(model, slots=2)
    first = engine.submit(random_text(10, 0), Sampling(max_new_tokens=50))
    engine.step()
    long = engine.submit(random_text(900, 1), NEW)
    before = len(first.tokens)
    steps = 0
    while not long.tokens:
        engine.step()
        steps += 1
    assert steps > 1
    assert len(first.tokens) == before + steps
    assert not unexcused(model, [first])


def test_a_prompt_that_begins_like_an_earlier_one_is_fed_from_there(model: Any, fed: list[int]) -> None:
    engine = Engine(model, slots=3)
    start = random_text(400, 2)
    first = engine.generate([start + random_text(100, 3)], NEW)[0]
    fed.clear()
    again = engine.generate([first.prompt + first.tokens[:4]], NEW)[0]  # a chat that goes on
    assert sum(fed) == 1
    assert again.tokens[:4] == first.tokens[4:]
    fed.clear()
    longer = start + random_text(120, 4)
    second = engine.generate([longer], NEW)[0]
    assert sum(fed) == 120
    assert second.tokens == alone(model, longer, NEW).tokens
    assert not unexcused(model, [first, second, again])


def test_prompts_submitted_together_feed_what_they_share_once(model: Any, fed: list[int]) -> None:
    start = random_text(600, 5)
    texts = [start + random_text(80 + n, 10 + n) for n in range(6)]
    engine = Engine(model, slots=8)
    requests = engine.generate(texts, NEW)
    assert engine.prefixes.reused_tokens == 3 * 5 * 600
    assert sum(fed) == 600 + sum(80 + n for n in range(6))
    assert [r.tokens for r in requests] == [alone(model, text, NEW).tokens for text in texts]
    assert not unexcused(model, requests)


def test_a_prompt_whose_reader_was_cancelled_halfway_is_not_taken_for_read(model: Any) -> None:
    engine = Engine(model, slots=1)
    text = random_text(900, 6)
    halfway = engine.submit(text, NEW)
    engine.step()
    assert 0 < halfway.branches[0].computed < 900
    engine.cancel(halfway)
    again = engine.generate([text], NEW)[0]
    assert engine.prefixes.reused_tokens == 3 * 256
    assert not unexcused(model, [again])


def test_one_who_waited_for_a_cancelled_reader_reads_by_itself(model: Any) -> None:
    engine = Engine(model, slots=2)
    start = random_text(700, 7)
    reader, waiter = (engine.submit(start + random_text(90, 20 + n), NEW) for n in range(2))
    engine.step()
    assert (waiter.branches[0].computed, waiter in engine.in_slot) == (0, True)
    engine.cancel(reader)
    while not waiter.done:
        engine.step()
    assert engine.prefixes.reused_tokens == 3 * 256
    assert not unexcused(model, [waiter])


def test_prompts_wait_to_be_read_together_while_others_wait_for_a_slot(model: Any, fed: list[int]) -> None:
    """As on a GPU. Texts end one by one; the last ones, behind which nobody waits, are read at once."""
    texts = [random_text(20, n) for n in range(40)]
    asked = [Sampling(max_new_tokens=12 + n % 9) for n in range(40)]
    passes, found = [], []
    for patient in (False, True):
        fed.clear()
        engine = Engine(model, slots=10)
        engine.controller.patient = patient
        found.append([request.tokens for request in engine.generate(texts, asked)])
        passes.append(len(fed))
        late = engine.submit(texts[0] * 2, asked[0])
        engine.submit(texts[1] * 2, Sampling(max_new_tokens=30))
        engine.step()
        assert late.tokens  # nobody waits for a slot
    assert found[0] == found[1]
    assert passes[1] < 0.7 * passes[0]
