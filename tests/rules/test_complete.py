"""A complete rule: weights, equality, and what every rule tells of itself."""

from importlib.metadata import EntryPoints
from types import SimpleNamespace

import pytest
import torch

from tessellm.rules import (
    RULES,
    BaseRule,
    ComposedRule,
    Explanation,
    FunctionRule,
    Product,
    RuleEntry,
    make_rule,
    product,
    tilt,
)

from stateful import BestPredictor

WEIGHTS = (0.7, -0.3, 1.5)


def rows(vocabulary: int = 9, batch: int = 2, steps: int = 6):
    generator = torch.Generator().manual_seed(vocabulary)
    logp = (torch.randn(4, batch, steps, vocabulary, generator=generator) * 3).log_softmax(-1)
    tokens = torch.randint(vocabulary, (batch, steps), generator=generator)
    return logp, tokens, torch.ones_like(tokens, dtype=torch.bool)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_tells_why_and_says_the_same(name, weights):
    rule, given = ComposedRule.make(name, weights), rows()
    said, state = rule(*given, None)
    told, its_state, why = rule.explain(*given, None)
    assert torch.equal(told, said)
    assert (state is None) == (its_state is None) == (not rule.stateful)
    assert why.share_BTM.shape == (2, 6, 4)
    torch.testing.assert_close(why.share_BTM.sum(-1), torch.ones(2, 6))
    assert (why.share_BTM >= 0).all()
    assert why.owner_BT.shape == why.log_z_BT.shape == (2, 6)
    assert why.log_z_BT.isfinite().all()
    last = why.map(lambda each: each[:, -1:])
    assert torch.equal(last.owner_BT, why.owner_BT[:, -1:])
    assert {name: each.shape[:2] for name, each in last.more.items()} == dict.fromkeys(why.more, (2, 1))


def test_weights_tilt_experts_and_product_weighs_exactly():
    given = rows()
    assert torch.equal(make_rule("product", WEIGHTS)(*given, None)[0], product(given[0], WEIGHTS))
    weighted = ComposedRule.make(BestPredictor(), WEIGHTS)(*given, None)[0]
    assert torch.equal(weighted, BestPredictor()(tilt(given[0], WEIGHTS), *given[1:], None)[0])


@pytest.mark.parametrize("rule", ["product", BestPredictor()], ids=["product", "tilted"])
def test_gradients_reach_weights(rule):
    weights = torch.ones(3, requires_grad=True)
    ComposedRule.make(rule, weights)(*rows(), None)[0][..., 3].sum().backward()
    assert weights.grad is not None
    assert weights.grad.abs().sum() > 0


def test_rules_made_alike_are_equal():
    made = [ComposedRule.make(rule, WEIGHTS) for rule in ("product", {"name": "product"}, Product())]
    assert len(set(made)) == 1
    others = made[0].with_("mixture"), made[0].with_(weights=(1, 1, 1))
    assert len({made[0], *others, made[0].with_({"name": "mixture", "most": 3})}) == 4
    assert made[0].with_() == made[0]


def test_weights_that_come_with_a_rule_go_first():
    for rule in (Product(WEIGHTS), make_rule("product", WEIGHTS), {"name": "product", "weights": WEIGHTS}):
        made = ComposedRule.make(rule, (1, 1, 1))
        assert made.weights == WEIGHTS
        assert made.rule == Product()
        assert made.with_(weights=(1, 0, 0)).weights == (1, 0, 0)


def test_what_is_described():
    assert make_rule("mixture", WEIGHTS, most=8).describe() == {"name": "mixture", "most": 8}
    assert Product(WEIGHTS).describe() == {"name": "product"}
    assert FunctionRule("mine", torch.Tensor.sum).describe() == {"name": "mine"}


def test_a_rule_of_ones_own_needs_little():
    class Mine(BaseRule):
        name = "mine"

        def __call__(self, logp_MBTV, tokens_BT, mask_BT, state):
            return logp_MBTV[1], None

    given = rows()
    for rule in (Mine(), FunctionRule("mine", lambda logp_MBTV: logp_MBTV[1])):
        said, _, why = ComposedRule.make(rule).explain(*given, None)
        assert isinstance(why, Explanation)
        assert (why.owner_BT == 1).all()
        torch.testing.assert_close(said.exp().sum(-1), torch.ones(2, 6))


def test_what_is_no_rule_is_refused():
    with pytest.raises(TypeError, match=r"rule's name.*got 5.*BaseRule"):
        ComposedRule.make(5)
    with pytest.raises(NotImplementedError, match="__call__"):
        type("Half", (BaseRule,), {"name": "half"})()(*rows(), None)


def test_a_rule_of_the_lab_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("tessellm.rules.table.entry_points", lambda **_: EntryPoints())
    with pytest.raises(ValueError, match=r"'evidence' belongs to the lab, which is not installed. In a clone: pip"):
        make_rule("evidence")


def test_a_rule_by_entry_point_is_told_the_end_tokens(monkeypatch):
    told = []

    class Own(FunctionRule):
        def with_ends(self, end_ids):
            told.append(end_ids)
            return self

    entry = RuleEntry(lambda: Own("own", torch.Tensor.sum), "mine", "nowhere")
    monkeypatch.setattr("tessellm.rules.table.entry_points", lambda **_: [SimpleNamespace(load=lambda: entry)])
    assert ComposedRule.make("own", None, [[1], [2, 3]]).name == "own"
    assert told == [((1,), (2, 3))]
