"""The engine with members as they are: what the reference writes, for architectures that the fast path refuses too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation import Speculation
from tessellm.errors import EngineError, FastPathError

import decoding_cases
from conftest import build_model, perturbed
from decoding_cases import prompts, unexcused

bloom = pytest.fixture(scope="module")(decoding_cases.bloom)


def test_what_the_fast_path_refuses_is_written_as_by_the_reference(bloom: Any) -> None:
    with pytest.raises(FastPathError, match="reference path"):
        Engine(bloom, slots=2)
    requests = Engine(bloom, slots=3, plain=True).generate(prompts(7, 60, seed=1), Sampling(max_new_tokens=12))
    assert not unexcused(bloom, requests)
    row = requests[0]
    written = bloom.generate(torch.tensor([row.prompt]), max_new_tokens=12, do_sample=False)[0, len(row.prompt) :]
    assert row.tokens == written.tolist()


def test_it_writes_what_the_fast_path_writes() -> None:
    """Also for long prompts, which are fed in pieces, for seeds, and after requests that left."""
    base = build_model("llama", max_position_embeddings=512)
    model = tessellm.compose(
        base, {"a": perturbed(base, 1), "b": build_model("gpt2", 3, n_positions=512)}, rule="product"
    )
    texts = prompts(6, 60, seed=4) + [text * 9 for text in prompts(2, 50, seed=5) if len(text) > 20]
    samplings = [Sampling(10, temperature=0.8 * (n % 2), seed=n) for n in range(len(texts))]
    assert max(map(len, texts)) > 256 + 64
    fast = Engine(model, slots=4).generate(texts, samplings)
    engine = Engine(model, slots=4, plain=True)
    left = [engine.submit(text, Sampling(50)) for text in prompts(3, 30, seed=6)]
    for _ in range(3):
        engine.step()
    for request in left[:2]:
        engine.cancel(request)
    assert [r.tokens for r in engine.generate(texts, samplings)] == [r.tokens for r in fast]
    while engine.busy:
        engine.step()
    assert [request.finish_reason for request in left] == ["cancelled", "cancelled", "length"]
    assert not unexcused(model, left[2:])


def test_named_experts_answer_and_drafts_are_refused(bloom: Any) -> None:
    engine = Engine(bloom, slots=2, plain=True)
    (text,) = prompts(1, 40, seed=7)
    request = engine.submit(text, Sampling(10, ignore_end=True), {"coding": 1.0})
    other = engine.submit(text, Sampling(10, ignore_end=True))
    while engine.busy:
        engine.step()
    written = bloom.member("coding").generate(
        torch.tensor([text]), max_new_tokens=10, do_sample=False, eos_token_id=None
    )
    assert request.tokens == written[0, len(text) :].tolist()
    assert not unexcused(bloom, [other])
    with pytest.raises(EngineError, match="drafts are for the fast path"):
        Engine(bloom, slots=1, plain=True, speculation=Speculation("lookup"))
