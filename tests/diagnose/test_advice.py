"""Advice: at most five findings, each with what was measured on the texts, true of the rule in use."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import tessellm
from tessellm.diagnose import kept
from tessellm.diagnose.advice import MOST, Symptoms, advise, nothing_better
from tessellm.diagnose.changes import Change, Effect, likelihoods, other_ways
from tessellm.diagnose.interference import Interference, Pair
from tessellm.diagnose.rates import Rate
from tessellm.model.variants import with_rule

from planted import composition, prompts
from stateful import BestPredictor

GIVEN = [{"prompt": "ab", "text": "c3def"}, {"prompt": "a", "text": "bc3defgh"}, {"text": "abc3def6gh"}]
MEASURED = re.compile(r"→|nothing that was tried is better")


def everything_wrong(names: tuple[str, ...]) -> Interference:
    """All experts at odds with all others, all repeating each other, two of them idle."""
    much, none = Rate(0.5, 0.4, 0.6), Rate(0.0, 0.0, 0.1)
    pairs = tuple(
        Pair((first, second), much, much, Rate(0.4, 0.3, 0.5), (), ())
        for number, first in enumerate(names)
        for second in names[number + 1 :]
    )
    active = {name: none if number < 2 else much for number, name in enumerate(names)}
    return Interference(active, active, active, active, much, pairs, much, much, much, much)


def effect(kind: str, gains: tuple[float, ...], **made: Any) -> Effect:
    before = (-1.0,) * len(gains)
    after = tuple(-1.0 + gain for gain in gains)
    return Effect(Change(kind, made.pop("action", "do it"), **made), before, after, True, tuple(range(len(gains))))


@pytest.mark.parametrize("rule", ["product", "mixture"])
def test_at_most_five_findings_whatever_is_wrong(rule: str) -> None:
    names = ("a", "b", "c", "d", "e")
    effects = (effect("rule", (0.5, -0.1), rule="mixture"), effect("without", (0.2, 0.2), without="a"))
    unsure = Rate(0.1, 0.0, 0.2)
    said = advise(Symptoms(everything_wrong(names), rule, (1.0,) * 5, unsure, 0.0, 2, True, effects))
    assert len(said) == MOST
    assert said[-1].kind == "few"
    assert ("counts it twice" in " ".join(each.text for each in said)) <= (rule == "product")
    told = [each.experts for each in said if each.kind in ("contradict", "repeat")]
    assert len(told) == len(set(told))


def test_what_is_lost_is_told_with_what_is_won() -> None:
    shown = str(effect("rule", (0.5, 0.4, -0.3, -0.1)))
    assert shown == "−1.00 → −0.88, better on 2 of 4 texts, worse on 2 (most on prompt 3: −1.00 → −1.30)"
    assert effect("rule", (0.5, 0.4, -0.3, -0.1)).helps
    assert not effect("rule", (2.0, -0.1, -0.1)).helps  # one text alone
    assert not effect("rule", (0.01, 0.01)).helps


def test_no_action_is_advised_that_does_not_help() -> None:
    found = everything_wrong(("a", "b"))
    effects = (
        effect("rule", (-0.5,), action="use rule: belief"),
        effect("without", (-0.2,), action="leave out a", without="a"),
    )
    said = advise(Symptoms(found, "product", (1.0, 1.0), Rate(1, 1, 1), 0.0, 12, False, effects))
    assert all(each.effect is None for each in said)
    assert (
        "Keep both: nothing that was tried is better by more than 0.02 nats (log-likelihood per token −1.00; leave out "
        "a: −1.20)" in said[0].text
    )
    assert "Keep rule: product: nothing that was tried is better" in said[1].text


def test_how_much_is_noise_is_said_beside_numbers_that_are_better() -> None:
    a_little = replace(effect("rule", (0.009, 0.009)), given=False)
    assert nothing_better([a_little]).startswith("nothing that was tried is better by more than 1\u00a0% (predicted")
    by_one_text = effect("rule", (2.0, -0.1, -0.1))
    assert "by more than 0.02 nats without losing on more texts than it wins on (" in nothing_better([by_one_text])


def test_what_helps_most_comes_first() -> None:
    """And nothing is said of how likely a text is right that was given: it need not be what would be written."""
    found = everything_wrong(("a", "b"))
    effects = (
        effect("rule", (0.6,), action="use rule: belief"),
        effect("without", (0.3,), action="leave out a", without="a"),
    )
    said = advise(Symptoms(found, "product", (1.0, 1.0), Rate(0, 0, 0), 0.0, 12, False, effects))
    assert [each.kind for each in said[:2]] == ["novel", "contradict"]
    assert [each.effect.gain for each in said[:2] if each.effect] == pytest.approx([0.6, 0.3])
    assert "unsure" not in [each.kind for each in said]
    assert "unsure" in [
        each.kind for each in advise(Symptoms(found, "product", (1.0, 1.0), Rate(0, 0, 0), 0.0, 12, True, effects))
    ]


def test_other_ways_are_those_that_differ() -> None:
    model = composition("three", "six", rule="product")
    actions = [change.action for change in other_ways(model, ["six"])]
    assert "use rule: product" not in actions
    assert {"use rule: mixture", "give every expert the weight 1/2", "leave out six"} <= {*actions}
    model.set_rule(weights=[0.5, 0.5])
    assert "give every expert the weight 1/2" not in [each.action for each in other_ways(model, [])]


@pytest.mark.parametrize("rule", ["product", BestPredictor()], ids=["product", "stateful"])
def test_what_is_measured_is_what_the_changed_model_says(rule: Any) -> None:
    model = composition("three", "other_three", rule="product")
    traces = tessellm.diagnose(model, GIVEN).traces
    weights = (0.5, 0.0)
    other = with_rule(model, rule, weights)
    (found_B,) = likelihoods(model, traces, [other.rule])
    for trace, found in zip(traces, found_B.tolist(), strict=True):
        logp_TV = other(trace.tokens).logits[0].detach().log_softmax(-1)
        logp_T = logp_TV[:-1].gather(-1, trace.tokens[0, 1:, None])[:, 0]
        assert found == pytest.approx(float(logp_T[trace.scored[0, 1:]].mean()), abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_texts_are_read_once_where_memory_allows(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept of some batches, of all or of none leads to the same findings, to the last digit."""
    model, block = composition("three", "other_three", rule="mixture"), 3 * 8 * 64
    given, asked, said = [*GIVEN, "abc", {"prompt": "abcd", "text": "ef6gh"}], 0, []
    read = model.member_logits

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal asked
        asked += 1
        return read(*arguments)

    monkeypatch.setattr(model, "member_logits", counted)
    for most in (kept.MOST_BYTES, block * 4 * size, 0):
        monkeypatch.setattr(kept.KeptRows.__init__, "__defaults__", (most,))
        asked = 0
        found = tessellm.diagnose(model, given, batch_size=size, max_new_tokens=2)
        said.append((asked, found.to_json()))
    (once, whole), (some, partly), (twice, none) = said
    assert whole == partly == none
    assert once < twice
    assert once <= some <= twice


@pytest.mark.parametrize("given", [GIVEN, prompts()], ids=["read", "written"])
def test_findings_say_what_was_measured(given: list[Any]) -> None:
    """The texts are those of one of two rivals: composed without the other they are right."""
    model = composition("three", "other_three", rule="product")
    found = tessellm.diagnose(model, given, max_new_tokens=24)
    worst = found.advice[0]
    assert (worst.kind, worst.experts) == ("contradict", ("three", "other_three"))
    for advice in found.advice:
        if advice.kind not in ("few", "unsure", "idle"):
            assert MEASURED.search(advice.text), advice.text
    if given is GIVEN:
        assert worst.effect is not None
        assert worst.effect.change.without == "other_three"
        assert "Leave out other_three: log-likelihood per token" in worst.text
    assert torch.isfinite(
        torch.tensor([value for each in found.advice if each.effect for value in each.effect.after])
    ).all()


def test_a_text_given_twice_counts_once() -> None:
    model = composition("three", "six", rule="product")
    once, twice = tessellm.diagnose(model, GIVEN), tessellm.diagnose(model, [*GIVEN, GIVEN[0], GIVEN[2]])
    assert twice.texts == 3
    assert twice.skipped == (
        "prompt 4: the same as prompt 1, counted once",
        "prompt 5: the same as prompt 3, counted once",
    )
    assert once.to_dict()["found"] == twice.to_dict()["found"]
