"""`trig`: what members are taught, what they prove, and that they are kept as they were."""

import json
import random
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessellm.errors import CheckpointError
from tessellm_lab.common.stacked import Shape
from tessellm_lab.trig import experiment as trig
from tessellm_lab.trig import members as trig_members
from tessellm_lab.trig import trained
from tessellm_lab.trig.expressions import skeleton
from tessellm_lab.trig.problems import NAMES, VOCABULARY, random_problem
from tessellm_lab.trig.proofs import check, prove, redexes

from trig_laws import ALL, kinds, line, quick


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
    assert set(result.tables["trained"][0]["steps"]) == {"base", "experts"}
    assert set(result.tables["trained"][0]["proved"]) == {*trig_members.MEMBERS, trained.EQ2, trained.DEFAULT}
    assert claims["trained-two-eq2"].value == 0.0  # three steps teach nothing
    assert claims["trained-alone"].holds
    assert not claims["trained-own"].holds
    assert any("base: step 3 of 3" in text for text in heard)
    monkeypatch.setattr(trig, "KEPT", tmp_path / "trig-members.safetensors")
    again = trig.run(0, tmp_path, "cpu", heard.append)
    assert again.tables["trained"][0]["proved"] == result.tables["trained"][0]["proved"]
    monkeypatch.setattr(trig, "KEPT", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"expected trained members of trig at .*nowhere, .* no such file"):
        trig.run(0, tmp_path, "cpu", heard.append)


def test_where_members_are_missing_the_command_that_is_told_puts_them_there(tiny, tmp_path):
    (tmp_path / "my package").mkdir()
    expected = tmp_path / "my package" / "members.safetensors"
    with pytest.raises(CheckpointError) as told:
        trig_members.load(expected)
    train, put = str(told.value).rpartition(": ")[2].split(" && ")
    assert train == "tessellm reproduce trig --size full -o OUT"
    trig.run(0, tmp_path, "full", lambda text: None)
    subprocess.run(shlex.split(put.replace("OUT", str(tmp_path))), check=True)
    assert trig_members.load(expected)[1]["seed"] == 0


def test_what_another_machine_wrote_is_kept_with_commit_pictures_and_members(tiny, tmp_path, monkeypatch):
    sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
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
    everything, steps = trig_members.train_members(
        *trig_members.pool(8, 0, 1), trig.TRAINING["full"], generator, lambda text: None
    )
    planned = trig.TRAINING["full"].steps
    assert [each["planned"] for each in steps.values()] == [each["reached"] for each in steps.values()] == [*planned]
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
        with pytest.raises(CheckpointError, match=r"kept\.safetensors is damaged, or another version's\. Install"):
            trig_members.load(tmp_path / "kept.safetensors")
        (tmp_path / "kept.safetensors").write_bytes(b"cut")


def test_the_kept_members_prove_by_eq_2():
    assert trig_members.KEPT.stat().st_size <= 16 * 2**20
    members, about = trig_members.load(trig_members.KEPT)
    assert about["seeds"] >= 1
    asked = {name: group for name, group in trained.problems(4, 1).items() if name == "two"}
    found, _, _ = trained.shares(trained.models(members)[trained.EQ2], asked)
    assert found["two"] >= 0.75


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
    alone = trained.models(copies)["base"]
    for each, at in zip(found["elsewhere"], [t for t, yes in enumerate(busy) if yes], strict=True):
        before = [*proof.prompt, *proof.continuation[:at]]
        favourite = alone(torch.tensor([trig_members.encode(before)])).logits[0, -1].argmax()
        assert each == {
            "before": " ".join(before),
            "word": proof.continuation[at],
            "base": VOCABULARY[favourite],
            "departs": [],
            "should": [name for name, expert in zip(NAMES, experts, strict=True) if expert[at] != base[at]],
        }


def test_a_short_run_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(trig, "EXACT_PROBLEMS", 2)
    monkeypatch.setattr(trig, "evaluations", lambda *_: iter(()))  # the exact provers alone
    result = trig.run(seed=0, out=tmp_path, size="cpu")
    assert result.holds
    assert len(json.loads((tmp_path / "trig.json").read_text())["claims"]) == 8
    assert (tmp_path / "trig.png").stat().st_size > 10_000
