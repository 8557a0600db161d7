"""`trig`: expressions, rules, the checker and the provers; laws by hypothesis."""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.errors import CheckpointError
from tessellm.experiments.stacked import Shape
from tessellm.experiments.trig import experiment as trig
from tessellm.experiments.trig import members as trig_members
from tessellm.experiments.trig import trained
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
    texts, labels = trig_members.pool(80, 0, processes=1)
    base, sine, tangent, cotangent, union = labels
    counted, taught = labels[0] != trig_members.NOTHING, labels != trig_members.NOTHING
    assert counted.any(1).all()  # the base learns from every text
    following = torch.roll(texts, -1, 1)
    assert torch.equal(union[taught[4]], following[taught[4]])  # one model of all learns the proofs themselves
    departs = torch.stack([(expert != base) & (expert >= 0) for expert in (sine, tangent, cotangent)])
    assert int(departs.sum(0).max()) == 1
    assert (departs.any(2).sum(0) <= 1).all()
    lengths = (texts != trig_members.PADDING).sum(1)
    assert torch.equal(lengths, lengths.sort().values)


def test_a_bystander_is_learned_from_by_nobody_who_knows_it():
    texts, labels = trig_members.pool(80, 0, processes=1)
    taught_PN = (labels != trig_members.NOTHING).any(2)
    assert 10 < int((~taught_PN[4]).sum()) < 45
    for row in (~taught_PN[4]).nonzero().flatten().tolist():
        (standing,) = [m for m in (1, 2, 3) if not taught_PN[m, row]]
        words = trained.words(texts[row].tolist())
        right = line(" ".join(words[words.index("=") + 1 : words.index(":")]))
        assert set(redexes(right)) == {NAMES[standing - 1]}
        assert check(line(" ".join(words[1 : words.index("=")])), right, words[words.index(":") + 1 :]).proved


@pytest.mark.slow
def test_the_pool_is_the_same_however_many_processes_make_it(monkeypatch):
    monkeypatch.setattr(trig_members, "CHUNK", 5)
    for one, other in zip(trig_members.pool(12, 7, processes=1), trig_members.pool(12, 7, processes=2), strict=True):
        assert torch.equal(one, other)


def test_no_test_problem_shares_its_skeleton_with_training():
    texts, _ = trig_members.pool(300, 0, processes=1)
    read = {" ".join(trained.words(row)[1 : trained.words(row).index("=")]) for row in texts.tolist()}
    trained_on = {skeleton(line(left)) for left in read}
    tested = {skeleton(p.left) for group in trained.problems(30, 0).values() for p in group}
    assert len(trained_on) > 100
    assert not trained_on & tested


def test_exact_members_in_the_trained_ones_places_prove_everything(monkeypatch):
    """The evaluation itself, on models that say what the symbolic provers say: every share is what it must be."""
    asked = trained.problems(3, 0)
    for number, name in enumerate(trig_members.MEMBERS):
        prover = trig_members.PROVERS[number]
        monkeypatch.setattr(
            trained, "write", lambda _, problems, p=prover: [trig.prove_alone(p, q.prompt) for q in problems]
        )
        found, proved, failed = trained.shares(None, asked)
        assert len(proved) == sum(share * 3 for share in found.values())
        assert all(each["why"] for each in failed)
        assert bool(failed) == (prover.known != ALL)
        for group, share in found.items():
            known = prover.known
            assert share == (1.0 if known >= trained.GROUPS[group][0] or known == ALL else 0.0), (name, group)


@pytest.fixture
def tiny(monkeypatch):
    shape = Shape(len(VOCABULARY) + 1, width=16, layers=1, heads=2, context=80)
    monkeypatch.setattr(trig_members, "SHAPE", shape)
    monkeypatch.setattr(trained, "SHAPE", shape)
    monkeypatch.setattr(trig, "pool", lambda count, seed: trig_members.pool(count, seed, processes=1))
    training = trig_members.Training(2, 20, 4, (3, 2), (1e-3, 1e-3), (60.0, 60.0))
    monkeypatch.setitem(trig.TRAINING, "full", training)
    monkeypatch.setattr(trig, "EXACT_PROBLEMS", 1)
    for size in trig.PROBLEMS:
        monkeypatch.setitem(trig.PROBLEMS, size, 1)


def test_a_full_run_trains_keeps_and_evaluates_members_and_a_cpu_run_takes_them(tiny, tmp_path, monkeypatch):
    heard = []
    result = trig.run(0, tmp_path, "full", heard.append)
    claims = {claim.id: claim for claim in result.claims}
    assert len(result.tables["trained"]) == 2
    assert set(result.tables["trained"][0]["proved"]) == {*trig_members.MEMBERS, trained.EQ2, trained.DEFAULT}
    assert claims["trained-two-eq2"].value == 0.0  # three steps teach nothing
    assert claims["trained-alone"].holds
    assert not claims["trained-own"].holds
    assert any("base: step 3 of 3" in text for text in heard)
    monkeypatch.setattr(trig, "KEPT", tmp_path / "trig-members.safetensors")
    again = trig.run(0, tmp_path, "cpu", heard.append)
    assert again.tables["trained"][0]["proved"] == result.tables["trained"][0]["proved"]
    monkeypatch.setattr(trig, "KEPT", tmp_path / "nowhere")
    without = trig.run(0, tmp_path, "cpu", heard.append)
    assert without.holds
    assert "--size full" in heard[-1]


def test_what_another_machine_wrote_is_kept_with_commit_pictures_and_members(tiny, tmp_path, monkeypatch):
    sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))
    from keep_results import keep

    monkeypatch.setattr(trig, "drawn", lambda draw: [])  # no matplotlib there
    trig.run(0, tmp_path, "full", lambda text: None)
    content = json.loads((tmp_path / "trig.json").read_text())
    assert content["figures"] == []
    (tmp_path / "trig.json").write_text(json.dumps({**content, "commit": None}))
    monkeypatch.undo()
    (tmp_path / "results").mkdir()
    names = keep(tmp_path, tmp_path / "results", tmp_path / "results" / "members.safetensors", "abc")
    assert names == ["trig.json", "trig.png", "members.safetensors"]
    assert json.loads((tmp_path / "results" / "trig.json").read_text())["commit"] == "abc"
    assert (tmp_path / "results" / "trig.png").stat().st_size > 10_000


def test_members_are_kept_as_they_were(tiny, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    everything = trig_members.train_members(
        *trig_members.pool(8, 0, 1), trig.TRAINING["full"], generator, lambda text: None
    )
    second = trig_members.members_of(everything, 1)
    trig_members.save(second, tmp_path / "kept.safetensors", {"seed": 1})
    stored, about = trig_members.load(tmp_path / "kept.safetensors")
    assert about == {"seed": 1}
    assert all(torch.equal(stored[name], second[name]) for name in second)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="could not be written"):
        trig_members.save(second, tmp_path / "folder", {"seed": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "kept.safetensors"]
    monkeypatch.setattr(trig_members, "SHAPE", replace(trig_members.SHAPE, layers=7))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"kept\.safetensors is damaged, or another version's"):
            trig_members.load(tmp_path / "kept.safetensors")
        (tmp_path / "kept.safetensors").write_bytes(b"cut")


@pytest.mark.skipif(not trig_members.KEPT.is_file(), reason="no trained members are kept")
def test_the_kept_members_prove_by_eq_2():
    members, about = trig_members.load(trig_members.KEPT)
    assert about["seeds"] >= 1
    asked = {name: group for name, group in trained.problems(4, 1).items() if name == "two"}
    found, _, _ = trained.shares(trained.models(members)[trained.EQ2], asked)
    assert found["two"] >= 0.5


def test_stopping_times_of_members_that_never_depart(tiny):
    """Five copies of one model: nobody departs, so agreement is the share of words at which nobody should."""
    generator = torch.Generator().manual_seed(0)
    one = trig_members.initialise(trig_members.SHAPE, 1, generator)
    copies = trig_members.select(one, [0] * len(trig_members.MEMBERS))
    proof = prove(line("① 2 ( sin² + cos² ) ② 2 tan²"), ALL)
    found = trained.stopping_times(trained.models(copies)[trained.EQ2], [proof])
    base, *experts = (trig_members.said(p, proof) for p in trig_members.PROVERS[:4])
    busy = [any(expert[t] != base[t] for expert in experts) for t in range(len(base))]
    assert sum(busy) >= 2
    assert found["agree"] == pytest.approx(1 - sum(busy) / len(busy))
    assert found["at once"] == 0
    assert found["idle"] == pytest.approx(0.0, abs=1e-6)


def test_a_short_run_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(trig, "EXACT_PROBLEMS", 2)
    monkeypatch.setattr(trig, "KEPT", tmp_path / "nowhere")
    result = trig.run(seed=0, out=tmp_path, size="cpu")
    assert result.holds
    assert len(json.loads((tmp_path / "trig.json").read_text())["claims"]) == 8
    assert (tmp_path / "trig.png").stat().st_size > 10_000
