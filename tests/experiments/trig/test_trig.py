"""`trig`: expressions, rules, the checker and the provers; laws by hypothesis."""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.experiments.stacked import Shape
from tessellm.experiments.trig import experiment as trig
from tessellm.experiments.trig import members as trig_members
from tessellm.experiments.trig.expressions import (
    FUNCTIONS,
    ExpressionError,
    Sum,
    Term,
    equal_numerically,
    equal_symbolically,
    parse,
    skeleton,
    text,
    tokens,
    value,
)
from tessellm.experiments.trig.problems import NAMES, VOCABULARY, Prover, is_test, random_problem
from tessellm.experiments.trig.proofs import IDENTITIES, check, follows, prove, redexes, step

ALL = frozenset(NAMES)
kinds = st.sets(st.sampled_from(NAMES)).map(frozenset)
plain = st.builds(Term, st.integers(1, 60), st.none() | st.sampled_from(FUNCTIONS))
sums = st.recursive(
    st.lists(plain, min_size=1, max_size=3).map(lambda terms: Sum(tuple(terms))),
    lambda inner: st.lists(plain | st.builds(Term, st.integers(1, 9), inner), min_size=1, max_size=3).map(
        lambda terms: Sum(tuple(terms))
    ),
    max_leaves=6,
)
quick = settings(max_examples=60, deadline=None)


def line(words: str) -> Sum:
    return parse(words.split())


@quick
@given(sums)
def test_tokens_and_trees_are_inverse(expression):
    assert parse(tokens(expression)) == expression


@pytest.mark.parametrize("wrong", ["", "+", "2 +", "( sin²", "sin² )", "2 3", "sin² cos²", "77"])
def test_what_is_no_expression_is_refused(wrong):
    with pytest.raises(ExpressionError, match="expected"):
        parse(wrong.split())


def test_values_and_algebra():
    assert value(line("2 ( sin² + cos² ) + 3 tan²"), 0.7) == pytest.approx(2 + 3 * math.tan(0.7) ** 2)
    for left, right in IDENTITIES.values():
        assert equal_numerically(left, right)
        assert equal_symbolically(left, right)
    assert not equal_symbolically(line("sin²"), line("cos²"))
    assert not equal_numerically(line("1 + tan²"), line("csc²"))


@quick
@given(sums, kinds)
def test_every_step_is_an_equality_that_follows(expression, known):
    after = step(expression, known)
    assert equal_numerically(expression, after)
    assert after == expression or follows(expression, after)


@quick
@given(kinds, st.integers(0, 10**6), st.booleans())
def test_problems_need_what_they_should_and_their_proofs_hold(needs, seed, test):
    problem = random_problem(needs, random.Random(seed), test)
    assert problem.needs == needs
    assert is_test(problem.left) == test
    assert check(problem.left, problem.right, problem.continuation).proved
    assert set(problem.prompt + problem.continuation) <= set(VOCABULARY)
    for fewer in (needs - {name} for name in needs):
        found = prove(problem.left, fewer)
        assert found is None or found.right != problem.right


def test_a_chain_needs_the_first_identity_before_the_second():
    left = line("2 ( sin² + cos² ) + 2 tan²")
    assert redexes(left) == [NAMES[0]]
    proof = prove(left, ALL)
    assert [text(one) for one in proof.lines] == [
        "2 ( 1 ) + 2 tan²",
        "2 + 2 tan²",
        "2 ( 1 + tan² )",
        "2 ( sec² )",
        "2 sec²",
    ]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("= 2 sec² .", "does not follow"),
        ("= 2 ( 1 ) + 2 tan² .", "the goal is not reached"),
        ("= 2 ( 1 ) + 2 tan²", "does not end"),
        ("= 2 ( sin² + cos² ) + 2 tan² .", "does not follow"),
        ("= 2 ( 1 + 2 tan² .", "no expression"),
        ("2 ( 1 ) .", "does not begin"),
        ("= 2 ( 2 ) + 2 tan² .", "does not follow"),
    ],
)
def test_what_the_checker_refuses(written, why):
    verdict = check(line("2 ( sin² + cos² ) + 2 tan²"), line("2 sec²"), written.split())
    assert not verdict.proved
    assert why in verdict.why


@quick
@given(kinds, st.integers(0, 10**6))
def test_one_changed_word_is_always_found(needs, seed):
    rng = random.Random(seed)
    problem = random_problem(needs, rng, test=True)
    assert not check(problem.left, problem.right, trig.corrupted(problem, rng)).proved


@settings(max_examples=25, deadline=None)
@given(kinds, st.integers(0, 10**6))
def test_definition_4_at_every_prefix_of_every_proof(needs, seed):
    """At most one prover departs from the base, and what it says, else what the base says, is the proof."""
    problem = random_problem(needs, random.Random(seed), test=True)
    base, experts = Prover(frozenset()), [Prover(frozenset([name])) for name in NAMES]
    words = list(problem.prompt)
    for word in problem.continuation:
        usual = base.next_word(words)
        departures = [said for said in (expert.next_word(words) for expert in experts) if said != usual]
        assert len(departures) <= 1
        assert (departures or [usual])[0] == word
        words.append(word)


def test_a_prover_that_is_stuck_copies_and_proves_nothing():
    problem = prove(line("2 ( sin² + cos² )"), ALL)
    written = trig.prove_alone(Prover(frozenset([NAMES[1]])), problem.prompt)
    assert written[:12] == ["=", "2", "(", "sin²", "+", "cos²", ")", "=", "2", "(", "sin²", "+"][:12]
    assert not check(problem.left, problem.right, written).proved


def test_skeletons_blank_numbers_out():
    assert skeleton(line("2 ( 1 + tan² ) + 13")) == "N ( 1 + tan² ) + N"


@quick
@given(kinds, st.integers(0, 10**6))
def test_labels_are_what_each_prover_says_at_each_word(needs, seed):
    problem = random_problem(needs, random.Random(seed), test=True)
    for prover in trig_members.PROVERS:
        words, said = list(problem.prompt), []
        for word in problem.continuation:
            said.append(prover.next_word(words))
            words.append(word)
        assert said == trig_members.said(prover, problem)


def test_training_texts_need_one_identity_at_most_and_their_labels_differ_there_alone():
    texts, labels = trig_members.pool(60, random.Random(0))
    base, sine, tangent, cotangent, union = labels
    counted = base >= 0
    assert torch.equal(counted, union >= 0)
    following = torch.roll(texts, -1, 1)
    assert torch.equal(union[counted], following[counted])  # one model of all identities learns the proofs themselves
    departs = torch.stack([expert != base for expert in (sine, tangent, cotangent)])
    assert int(departs.sum(0).max()) == 1
    assert (departs.any(2).sum(0) <= 1).all()


def test_trained_members_go_through_the_checker(monkeypatch):
    monkeypatch.setattr(trig_members, "SHAPE", Shape(len(VOCABULARY) + 1, width=16, layers=1, heads=2, context=256))
    monkeypatch.setattr(trig, "TRAINING", {"cpu": trig.Training(20, (2, 2), 4)})
    claims = {claim.id: claim for claim in trig.trained_claims(trig.TRAINING["cpu"], 2, seed=0)}
    assert set(claims["trained-table"].value) == {
        "base",
        "expert 1",
        "expert 2",
        "expert 3",
        "one model of all",
        "composed",
    }
    assert claims["trained-two"].value == 0.0
    assert claims["trained-alone"].holds


def test_a_short_run_holds(tmp_path, monkeypatch):
    monkeypatch.setitem(trig.PROBLEMS, "cpu", 2)
    result = trig.run(seed=0, out=tmp_path, size="cpu")
    assert result.holds
    assert len(json.loads((tmp_path / "trig.json").read_text())["claims"]) == 8
    assert (tmp_path / "trig.png").stat().st_size > 10_000
