"""A complete rule: weights, stopping, equality, and what every rule tells of itself."""

import pytest
import torch

from tessellm.rules import RULES, BaseRule, ComposedRule, Explanation, FunctionRule, Product, make_rule, product, tilt
from tessellm.rules.evidence import Evidence
from tessellm.rules.termination import POLICIES

ENDS = ((0,), (0, 1), (2,), (0,))
WEIGHTS = (0.7, -0.3, 1.5)


def rows(vocabulary: int = 9, batch: int = 2, steps: int = 6):
    generator = torch.Generator().manual_seed(vocabulary)
    logp = (torch.randn(4, batch, steps, vocabulary, generator=generator) * 3).log_softmax(-1)
    tokens = torch.randint(vocabulary, (batch, steps), generator=generator)
    return logp, tokens, torch.ones_like(tokens, dtype=torch.bool)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_tells_why_and_says_the_same(name, policy, weights):
    if name == "mixture" and policy != "rule":
        pytest.skip("its components say where it ends")
    rule, given = ComposedRule.make(name, weights, ENDS, policy), rows()
    said, state = rule(*given, None)
    told, its_state, why = rule.explain(*given, None)
    assert torch.equal(told, said)
    assert (state is None) == (its_state is None) == (rule.window == 0)
    assert set(why.more) == rule.tells
    assert why.belief_BTM.shape == (2, 6, 4)
    torch.testing.assert_close(why.belief_BTM.sum(-1), torch.ones(2, 6))
    assert (why.belief_BTM >= 0).all()
    assert why.owner_BT.shape == why.log_z_BT.shape == (2, 6)
    assert why.log_z_BT.isfinite().all()
    last = why.map(lambda each: each[:, -1:])
    assert torch.equal(last.owner_BT, why.owner_BT[:, -1:])
    assert {name: each.shape[:2] for name, each in last.more.items()} == dict.fromkeys(why.more, (2, 1))


def test_an_owner_is_believed():
    logp, tokens, mask = rows()
    _, _, why = Evidence(interference=0.0).explain(logp, tokens, mask, None)
    alone = ~why.more["blended_BT"]
    assert alone.any()
    assert torch.equal(why.belief_BTM.max(-1).values[alone], torch.ones(int(alone.sum())))


@pytest.mark.parametrize("name", sorted(RULES))
def test_weights_tilt_experts_and_product_weighs_exactly(name):
    given = rows()
    weighted = make_rule(name, WEIGHTS)(*given, None)[0]
    if name == "product":
        assert torch.equal(weighted, product(given[0], WEIGHTS))
    elif name != "mixture":  # in which experts with a negative weight are components' parts
        assert torch.equal(weighted, make_rule(name)(tilt(given[0], WEIGHTS), *given[1:], None)[0])


def test_gradients_reach_weights():
    given = rows()
    for policy in ("rule", "owner"):
        for name in ("product", "evidence"):
            weights = torch.ones(3, requires_grad=True)
            ComposedRule.make(name, None, ENDS, policy).weighted(weights)(*given, None)[0][..., 3].sum().backward()
            assert weights.grad is not None
            assert weights.grad.abs().sum() > 0


def test_rules_made_alike_are_equal():
    made = [ComposedRule.make(rule, WEIGHTS, ENDS) for rule in ("evidence", {"name": "evidence"}, Evidence())]
    assert len(set(made)) == 1
    others = made[0].with_("product"), made[0].with_(weights=(1, 1, 1)), made[0].with_(termination="any")
    assert len({made[0], *others, made[0].with_({"name": "evidence", "window": 3})}) == 5
    assert made[0].with_() == made[0]


def test_weights_that_come_with_a_rule_go_first():
    for rule in (Product(WEIGHTS), make_rule("product", WEIGHTS), {"name": "product", "weights": WEIGHTS}):
        made = ComposedRule.make(rule, (1, 1, 1))
        assert made.weights == WEIGHTS
        assert made.rule == Product()
        assert made.with_(weights=(1, 0, 0)).weights == (1, 0, 0)


def test_a_new_rule_stops_as_suits_it():
    made = ComposedRule.make("product", None, ENDS)
    assert (made.policy, made.with_("evidence").policy) == ("rule", "owner")
    assert made.with_("evidence", termination="base").with_(weights=WEIGHTS).policy == "base"
    assert ComposedRule.make("evidence", None, ((), ())).policy == "rule"  # nobody has an end token


def test_what_is_described():
    assert make_rule("evidence", WEIGHTS, window=8).describe() == {"name": "evidence", "window": 8}
    assert Product(WEIGHTS).describe() == {"name": "product"}
    assert FunctionRule("mine", torch.Tensor.sum).describe() == {"name": "mine"}


def test_a_rule_of_ones_own_needs_little():
    class Mine(BaseRule):
        name = "mine"

        def __call__(self, logp_MBTV, tokens_BT, mask_BT, state):
            return logp_MBTV[1], None

    given = rows()
    for rule in (Mine(), FunctionRule("mine", lambda logp_MBTV: logp_MBTV[1])):
        said, _, why = ComposedRule.make(rule, None, ENDS, "owner").explain(*given, None)
        assert isinstance(why, Explanation)
        assert (why.owner_BT == 1).all()
        torch.testing.assert_close(said.exp().sum(-1), torch.ones(2, 6))


def test_what_is_no_rule_is_refused():
    with pytest.raises(TypeError, match=r"rule's name.*got 5.*BaseRule"):
        ComposedRule.make(5)
    with pytest.raises(NotImplementedError, match="__call__"):
        type("Half", (BaseRule,), {"name": "half"})()(*rows(), None)
