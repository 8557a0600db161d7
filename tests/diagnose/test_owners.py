"""Whose word a token is: under a rule that believes in laws, that of whom it believes; and each member's share."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from tessellm.diagnose.row_statistics import Statistics, statistics
from tessellm.diagnose.speaking import Terminal, show
from tessellm.rules import ComposedRule, Mixture
from tessellm.text.generate import Generated

from conftest import build_model, perturbed

STEPS, VOCABULARY = 30, 9
ENDS = ((), (), (), ())


def laws(*loud: float, seed: int = 0) -> Tensor:
    """A base and experts, each with a favourite of its own that is so much louder, but on every third row all the
    same: [M, 1, T, V]."""
    base = torch.randn(1, STEPS, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    members = [base]
    for number, loudness in enumerate(loud):
        own = base.clone()
        own[:, torch.arange(STEPS) % 3 > 0, number] += loudness
        members.append(own)
    return torch.stack(members).log_softmax(-1)


def read(rule: Mixture, logp: Tensor, tokens: list[int]) -> Statistics:
    ids = torch.tensor([tokens])
    complete = ComposedRule(rule)
    said, _, why = complete.explain(logp, ids, torch.ones_like(ids, dtype=torch.bool), None)
    return statistics(logp, said, complete, ENDS[: len(logp)], why)


@pytest.fixture(scope="module")
def model() -> Any:
    base = build_model()
    members = {"one": perturbed(base, 1), "capitals": perturbed(base, 2)}
    return tessellm.compose(base, members, rule={"name": "mixture", "styles": [2]})


def test_a_trace_tells_shares(model: Any) -> None:
    written = tessellm.trace(model, torch.arange(5, 25))
    tokens = json.loads(written.to_json())["tokens"]
    for position, token in enumerate(tokens, 1):
        assert list(token["share"]) == ["base", "one", "capitals"]
        assert token["share"]["capitals"] == pytest.approx(float(written.share[0, position, 2]))
        assert token["share"]["capitals"] > 0
        assert sum(token["share"].values()) == pytest.approx(1, abs=1e-5)
    model.set_rule("product")
    token = json.loads(tessellm.trace(model, torch.arange(5, 25)).to_json())["tokens"][0]
    assert sum(token["share"].values()) == pytest.approx(1, abs=1e-5)


def test_one_owner_is_named_once(model: Any) -> None:
    found = read(Mixture(), laws(6.0, 6.0), [1] * STEPS)
    written = tessellm.trace(model, torch.arange(5, 25))
    owner = found.owner_BT[:, -20:]
    letters = type("Letters", (), {"decode": staticmethod(lambda ids, **_: "x" * len(ids))})
    shown = type(written)(written.members, written.tokens, written.scored, {"owner": owner}, "mixture", letters)
    stream = io.StringIO()
    show(Generated("", "x" * 20, 20, "length"), shown, Terminal(stream, written.members))
    assert stream.getvalue() == f"[capitals|{'x' * 20}]\n"
