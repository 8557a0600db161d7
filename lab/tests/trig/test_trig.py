"""`trig`: expressions, rules, the checker and the provers; laws by hypothesis."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm_lab.trig import experiment as trig
from tessellm_lab.trig.expressions import (
    ExpressionError,
    equal_numerically,
    equal_symbolically,
    parse,
    skeleton,
    text,
    tokens,
    value,
)
from tessellm_lab.trig.problems import NAMES, VOCABULARY, Prover, is_test, random_problem
from tessellm_lab.trig.proofs import IDENTITIES, check, follows, prove, redexes, step

from trig_laws import ALL, kinds, line, quick, sums


@quick
@given(sums)
def test_tokens_and_trees_are_inverse(expression):
    assert parse(tokens(expression)) == expression


def test_marks_say_where_a_term_came_from():
    marked = line("① 2 ② 2 tan² ③ 5 ( sin² + cos² )")
    assert [term.mark for term in marked.terms] == ["①", "②", "③"]
    assert text(step(marked, ALL)) == "① 2 ( 1 + tan² ) ③ 5 ( 1 )"
    assert not follows(marked, line("① 2 ( 1 + tan² ) ② 5 ( 1 )"))
    assert follows(marked, line("① 2 ( 1 + tan² ) ③ 5 ( sin² + cos² )"))


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
