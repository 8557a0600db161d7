"""Compositions to draft for, and a verification that is wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tessellm
from tessellm.decoding.engine import Engine
from tessellm.decoding.requests import Request
from tessellm.decoding.sampling import uniform
from tessellm.decoding.speculation.verification import Verification

from conftest import build_model, perturbed


def agreeing(apart: float = 0.002, **settings: Any) -> Any:
    """Members so alike that one alone is mostly, but not always, right."""
    base = build_model("llama")
    return tessellm.compose(base, {f"e{i}": perturbed(base, i, apart) for i in range(2)}, **settings)


def texts(requests: Sequence[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


def replace_verification(engine: Engine, kind: type[Verification]) -> None:
    speculator = engine.speculator
    assert speculator is not None
    speculator.verification = kind(engine.state, speculator.wanted.longest)
    speculator.drafter.into = speculator.verification  # type: ignore[attr-defined]


class Biased(Verification):
    """Rejection sampling as it is often written: a fallen draft gives way to a draw from p, not from p without it."""

    def _choose(self, logp_BTV: Tensor, position_BT: Tensor, how: str) -> Tensor:
        chosen_BT = super()._choose(logp_BTV, position_BT, how)
        draft_BG = self.draft_SG[: len(chosen_BT), : chosen_BT.shape[1] - 1]
        share_BG = logp_BTV[:, :-1].gather(-1, draft_BG.clamp_min(0)[..., None])[..., 0].exp()
        coin_BG = uniform(self.state.seed_S[: len(chosen_BT), None] + 10**6, position_BT[:, :-1])
        taken_BG = (draft_BG >= 0) & (coin_BG < share_BG)
        return torch.cat([torch.where(taken_BG, draft_BG, chosen_BT[:, :-1]), chosen_BT[:, -1:]], 1)


def tiny() -> Any:
    """Four tokens, no ends: all texts can be counted."""
    small = {"vocab_size": 4, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    base = build_model("llama", eos_token_id=None, pad_token_id=None, bos_token_id=None, **small)
    return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)})
