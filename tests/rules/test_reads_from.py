"""Whoever starts a rule within a text, from where it says, gets what reading the whole text gives."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessellm.rules import ComposedRule
from tessellm.rules.belief import Belief
from tessellm.rules.chat_turns import last_turn
from tessellm.rules.evidence import Evidence
from tessellm.rules.product import Product

from stateful import BestPredictor

HABITS = ((0.0, 0.0, -1.0, -1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.7),) * 2
VOCABULARY, STEPS = 5, 60
ENDS = ((2,), (0,), (2, 4))
RULES: dict[str, ComposedRule] = {
    "belief": ComposedRule(Belief(HABITS, (4, 3), (3, 1), 6)),
    "belief, long turn": ComposedRule(Belief(HABITS, (4,), (1, 2, 3), 6)),
    "belief, token 0 in the turn": ComposedRule(Belief(HABITS, (), (0, 0, 1), 6)),
    "belief, opening with a turn": ComposedRule(Belief(HABITS, (4, 3, 1), (3, 1), 6)),
    "belief, stops by policy": ComposedRule(Belief(HABITS, (4, 3), (4, 1), 6), stops=ENDS, policy="owner"),
    "belief, a style": ComposedRule(Belief(HABITS[:1], (4, 3), (3, 1), 6, (2,))),
    "belief, a user who speaks again": ComposedRule(Belief(HABITS, (4, 3), (3, 1), 6, user=(0, 2))),
    "belief, weights": ComposedRule(Belief(HABITS, (4, 3), (3, 1), 6), weights=(0.5, 2.0)),
    "belief without habits": ComposedRule(Belief(span=6)),
    "evidence": ComposedRule(Evidence(window=6)),
    "evidence, stops by policy": ComposedRule(Evidence(window=6), stops=ENDS, policy="owner"),
    "product": ComposedRule(Product()),
    "one of a user's own": ComposedRule(BestPredictor(window=4)),
}


def text(seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens of a text in which turns are likely."""
    generator = torch.Generator().manual_seed(seed)
    logp = (torch.randn(3, 1, STEPS, VOCABULARY, generator=generator) * 2).log_softmax(-1)
    return logp, torch.randint(VOCABULARY, (1, STEPS), generator=generator)


def read(rule: ComposedRule, logp: Tensor, tokens: Tensor, state: Any = None) -> Tensor:
    return rule(logp, tokens, torch.ones_like(tokens, dtype=torch.bool), state)[0]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), first=st.integers(0, STEPS - 1), sooner=st.integers(0, 20))
def test_rows_from_there_on_are_those_of_the_whole(rule: ComposedRule, seed: int, first: int, sooner: int) -> None:
    logp, tokens = text(seed)
    begin = rule.reads_from(tokens[0].tolist(), first)
    assert 0 <= begin <= first
    begin = max(0, begin - sooner)  # more does no harm
    found = read(rule, logp[:, :, begin:], tokens[:, begin:])
    torch.testing.assert_close(found[:, first - begin :], read(rule, logp, tokens)[:, first:], atol=1e-4, rtol=1e-4)


def test_belief_reads_from_before_the_last_answer() -> None:
    rule = RULES["belief"]  # looks back 8
    tokens = [2] * 20 + [3, 1] + [2] * 30 + [3, 1] + [2] * 40
    assert rule.reads_from(tokens, 10) == 2
    assert rule.reads_from(tokens, 20) == 12  # the turn is not over
    assert rule.reads_from(tokens, 21) == 13
    assert rule.reads_from(tokens, 50) == 13
    assert rule.reads_from(tokens, len(tokens) - 1) == 53 - 8
    assert RULES["belief without habits"].reads_from(tokens, 90) == 0


def test_an_end_token_within_the_turn_is_heard_as_the_event_that_it_is() -> None:
    """With stopping by policy a rule hears every end token as one; answers begin all the same."""
    (logp, tokens), rule = text(3), RULES["belief, stops by policy"]
    real, found = torch.ones_like(tokens, dtype=torch.bool), {}
    for turn in ((4, 1), (3, 1)):
        for written in (1, 3):
            tokens[0] = torch.tensor([3] * 20 + [*turn, written] + [3] * 37)
            found[turn, written] = rule.explain(logp, tokens, real, None)[2].more["law_BTL"][0, -1]
    torch.testing.assert_close(found[(3, 1), 1], found[(3, 1), 3])  # no answer has begun: nothing is evidence
    assert (found[(4, 1), 1] - found[(4, 1), 3]).abs().max() > 1e-3
    assert rule.reads_from([3] * 40 + [4, 1] + [3] * 40, 81) == 41 - 8


def test_the_last_turn() -> None:
    assert last_turn((3, 1), [3, 1, 3, 1, 2], 4) == 3
    assert last_turn((3, 1), [3, 1, 3, 1, 2], 2) == 1
    assert last_turn((3, 1), [1, 3], 1) is None
    assert last_turn((3, 1), [1], 0) is None
