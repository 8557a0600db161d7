"""Compositions and prompts to draft for, and a clock that charges for forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tessellm
from draft_distribution import draft_always
from tessellm.engine import sampling
from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.speculation import Speculation

from conftest import build_model, perturbed
from decoding_cases import prompts


def agreeing(apart: float = 0.002, **settings: Any) -> Any:
    """Members so alike that one alone is mostly, but not always, right."""
    base = build_model("llama")
    return tessellm.compose(
        base, {f"e{i}": perturbed(base, i, apart) for i in range(2)}, **{"rule": "product", **settings}
    )


def texts(requests: Sequence[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


def drafting(model: Any, slots: int, length: int = 8, **settings: Any) -> Engine:
    """An engine that always drafts so many tokens."""
    return draft_always(Engine(model, slots=slots, speculation=Speculation("lookup"), **settings), length)


def bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample with noise of the seed alone, not of the position: tokens of a text depend on one another."""
    plain = sampling.uniform
    monkeypatch.setattr(sampling, "uniform", lambda seed_B, position_B: plain(seed_B, torch.zeros_like(position_B)))


class Priced:
    """A clock that forwards move: one for a step, and so much more for each token that is verified with it."""

    def __init__(self, engine: Engine, verifying: float):
        self.now, executor = 0.0, engine.executor
        self._charge(executor, "decode", lambda *given: 1.0)
        self._charge(executor, "verify", lambda running, slots, drafts, length: 1 + verifying * length)
        engine.speculator.pace.clock = lambda: self.now  # type: ignore[union-attr]

    def _charge(self, executor: Any, name: str, price: Any) -> None:
        inner = getattr(executor, name)

        def charged(*given: Any) -> Any:
            self.now += price(*given)
            return inner(*given)

        setattr(executor, name, charged)


def repeating(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that repeat themselves, as what follows them does now and then."""
    return [(text * 6)[:60] for text in prompts(count, 12, seed)]


def tiny() -> Any:
    """Four tokens, no ends: all texts can be counted."""
    small = {"vocab_size": 4, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    base = build_model("llama", eos_token_id=None, pad_token_id=None, bos_token_id=None, **small)
    return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")
