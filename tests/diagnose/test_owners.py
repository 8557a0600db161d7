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
from tessellm.rules import ComposedRule
from tessellm.rules.belief import Belief
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


def read(rule: Belief, logp: Tensor, tokens: list[int]) -> Statistics:
    ids = torch.tensor([tokens])
    complete = ComposedRule(rule)
    said, _, why = complete.explain(logp, ids, torch.ones_like(ids, dtype=torch.bool), None)
    return statistics(logp, said, complete, ENDS[: len(logp)], why)


def test_an_answer_by_one_expert_is_of_one_colour() -> None:
    """Also where the base would say the same; who is nearest changes from row to row there."""
    found = read(Belief(), laws(6.0, 6.0), [1] * STEPS)  # the second expert's favourite
    assert found.law_BTL is not None
    sure = found.law_BTL[0, :, 2] > 0.5
    assert sure[6:].all()
    assert (found.owner_BT[0, sure] == 2).all()


def test_where_eq_2_is_believed_most_the_nearest_owns_and_the_base_what_all_say() -> None:
    found = read(Belief(), laws(6.0, 0.5), [5] * STEPS)
    assert found.law_BTL is not None
    assert found.law_BTL[0, 0].argmax() == 3
    assert found.owner_BT[0, :2].tolist() == [0, 1]


def test_eq_2_over_one_expert_is_that_expert() -> None:
    found = read(Belief(), laws(6.0), [0] * STEPS)
    assert (found.owner_BT == 1).all()


@pytest.mark.parametrize(("tokens", "owner"), [([2] * STEPS, 2), ([0, 2, 2] * 10, 1)], ids=["the style", "in it"])
def test_the_base_in_a_style_is_the_styles_and_an_expert_in_it_is_the_experts(tokens: list[int], owner: int) -> None:
    logp = laws(6.0, 0.0)
    logp[2, ..., 2] += 5.0
    logp[1, :, torch.tensor([*tokens[1:], 0]) == 0, 0] += 8.0
    found = read(Belief(styles=(2,)), logp.log_softmax(-1), tokens)
    assert found.owner_BT[0, -6:].tolist() == [owner] * 6
    torch.testing.assert_close(found.share_BTM.sum(-1), torch.ones(1, STEPS))
    assert found.share_BTM[0, -6:, 2].max() > 0.1
    assert found.law_BTL is not None
    assert not found.law_BTL[..., 2].any()


@pytest.fixture(scope="module")
def model() -> Any:
    base = build_model()
    members = {"one": perturbed(base, 1), "capitals": perturbed(base, 2)}
    return tessellm.compose(base, members, rule={"name": "belief", "styles": [2]})


def test_a_trace_tells_shares_and_beliefs(model: Any) -> None:
    written = tessellm.trace(model, torch.arange(5, 25))
    tokens = json.loads(written.to_json())["tokens"]
    for position, token in enumerate(tokens, 1):
        assert list(token["share"]) == ["base", "one", "capitals"]
        assert list(token["belief"]) == ["base", "one", "capitals", "Eq. 2"]
        assert token["share"]["capitals"] == pytest.approx(float(written.share[0, position, 2]))
        assert token["share"]["capitals"] > 0 == token["belief"]["capitals"]
        assert sum(token["share"].values()) == pytest.approx(1, abs=1e-5)
    model.set_rule("product")
    token = json.loads(tessellm.trace(model, torch.arange(5, 25)).to_json())["tokens"][0]
    assert sum(token["share"].values()) == pytest.approx(1, abs=1e-5)
    assert "belief" not in token


def test_one_owner_is_named_once(model: Any) -> None:
    found = read(Belief(), laws(6.0, 6.0), [1] * STEPS)
    written = tessellm.trace(model, torch.arange(5, 25))
    owner = found.owner_BT[:, -20:]
    letters = type("Letters", (), {"decode": staticmethod(lambda ids, **_: "x" * len(ids))})
    shown = type(written)(written.members, written.tokens, written.scored, {"owner": owner}, "belief", letters)
    stream = io.StringIO()
    show(Generated("", "x" * 20, 20, "length"), shown, Terminal(stream, written.members))
    assert stream.getvalue() == f"[capitals|{'x' * 20}]\n"
