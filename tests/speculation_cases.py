"""Compositions to draft for, a clock that charges for passes, and a verification that is wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from draft_distribution import draft_always
from tessellm.decoding.engine import Engine
from tessellm.decoding.requests import Request
from tessellm.decoding.sampling import TokenChoice, uniform
from tessellm.decoding.speculation import Speculation, verification

from conftest import build_model, perturbed


def agreeing(apart: float = 0.002, **settings: Any) -> Any:
    """Members so alike that one alone is mostly, but not always, right."""
    base = build_model("llama")
    return tessellm.compose(base, {f"e{i}": perturbed(base, i, apart) for i in range(2)}, **settings)


def texts(requests: Sequence[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


def drafting(model: Any, slots: int, draft: str, length: int = 8, **settings: Any) -> Engine:
    """An engine that always drafts so many tokens."""
    return draft_always(Engine(model, slots=slots, speculation=Speculation(draft), **settings), length)


def bias(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection sampling as it is often written: a fallen draft gives way to a draw from p, not from p without it."""
    plain = verification.choose_along

    def biased(work: Any, logp_BTV: Tensor, choice: TokenChoice) -> Tensor:
        chosen_BT = plain(work, logp_BTV, choice)
        rows, width = chosen_BT.shape
        draft_BG = engine.speculator.drafts.draft_SG[:rows, : width - 1]  # type: ignore[union-attr]
        share_BG = logp_BTV[:, :-1].gather(-1, draft_BG.clamp_min(0)[..., None])[..., 0].exp()
        position_BG = work.slots.position_S[:rows, None] + 1 + torch.arange(width - 1)
        coin_BG = uniform(work.slots.seed_S[:rows, None] + 10**6, position_BG)
        taken_BG = (draft_BG >= 0) & (coin_BG < share_BG)
        return torch.cat([torch.where(taken_BG, draft_BG, chosen_BT[:, :-1]), chosen_BT[:, -1:]], 1)

    monkeypatch.setattr(verification, "choose_along", biased)


class Priced:
    """A clock that passes move: one for a step, and so much more for each token that is drafted or verified with it."""

    def __init__(self, engine: Engine, drafting: float, verifying: float):
        self.now, steps = 0.0, engine.steps
        prices = {"draft": lambda length: drafting * length, "verify": lambda length: 1 + verifying * length}
        self._charge(steps, "decode", lambda *given: 1.0)
        self._charge(steps, "run", lambda name, run, rows, length, *given: prices[name.split()[0]](length))
        engine.speculator.pace.clock = lambda: self.now  # type: ignore[union-attr]

    def _charge(self, steps: Any, name: str, price: Any) -> None:
        inner = getattr(steps, name)

        def charged(*given: Any) -> None:
            self.now += price(*given)
            inner(*given)

        setattr(steps, name, charged)


def tiny() -> Any:
    """Four tokens, no ends: all texts can be counted."""
    small = {"vocab_size": 4, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    base = build_model("llama", eos_token_id=None, pad_token_id=None, bos_token_id=None, **small)
    return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)})
