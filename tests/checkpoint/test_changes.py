"""Experts added to and removed from a composition on disk: as if composed so, and only what is new is measured."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tessellm
from tessellm import checkpoint
from tessellm.checkpoint import changes
from tessellm.checkpoint.changes import add_expert, remove_expert
from tessellm.errors import CheckpointError, MemberError, VocabularyError
from tessellm.members import MemberSpec
from tessellm.routing import calibrated, router
from tessellm.routing.calibration import calibration_prompts

from conftest import build_model, character_tokenizer, logits, save_lora, save_member

PROMPTS = ["what is 3 + 4?", "hello", "write a loop"]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = [text for text in calibration_prompts() if len(text) < 60][:40]
    monkeypatch.setattr(calibrated, "calibration_prompts", lambda: few)
    monkeypatch.setenv("TESSELLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many experts were measured on the calibration prompts, each time."""
    counts, measure = [], router._measure

    def counting(base: Any, own: list[Any], *rest: Any) -> Any:
        counts.append(len(own))
        return measure(base, own, *rest)

    monkeypatch.setattr(router, "_measure", counting)
    return counts


def composed(members: Path, *names: str, rule: Any = "mixture") -> Any:
    experts = {name: {"source": members / f"lora_{name}", "description": f"Does {name}."} for name in names}
    return tessellm.compose(members / "base", experts, rule=rule)


def check_same(found: Any, expected: Any) -> None:
    assert found.config.member_names == expected.config.member_names
    assert found.config.weights == expected.config.weights
    assert found.config.rule == expected.config.rule
    for name in expected.members:
        assert logits(found.member(name)).equal(logits(expected.member(name)))
    if expected.router is not None:
        for ours, theirs in zip(found.route(PROMPTS), expected.route(PROMPTS), strict=True):
            assert (ours.selected, ours.threshold) == (theirs.selected, pytest.approx(theirs.threshold))
            assert ours.prior == pytest.approx(theirs.prior, rel=1e-3)


@pytest.mark.parametrize("self_contained", [False, True])
def test_added_and_removed_is_as_composed(
    own_members: Path, tmp_path: Path, measured: list[int], self_contained: bool
) -> None:
    both, one = composed(own_members, "math", "coding"), composed(own_members, "math")
    one.save_pretrained(tmp_path / "out", self_contained=self_contained)
    inodes = {path.name: path.stat().st_ino for path in (tmp_path / "out" / "members" / "base").glob("*")}
    shutil.rmtree(tmp_path / "cache")
    measured.clear()
    spec = MemberSpec(str(own_members / "lora_coding"), description="Does coding.")
    added = add_expert(tmp_path / "out", spec, "coding")
    assert measured == [1]  # the new one alone
    for found in (added, checkpoint.load(tmp_path / "out")):
        check_same(found, both)
    if self_contained:  # nothing is written twice, and nothing is linked to
        stored = {path.name: path.stat().st_ino for path in (tmp_path / "out" / "members" / "base").glob("*")}
        assert stored == inodes
        shutil.rmtree(own_members / "lora_coding")
    measured.clear()
    removed = remove_expert(tmp_path / "out", "coding")
    assert measured == [0]
    for found in (removed, checkpoint.load(tmp_path / "out")):
        check_same(found, one)
    assert not (tmp_path / "out" / "members" / "coding").exists()
    assert not any("coding" in note for note in removed.notes)


def test_a_style_keeps_its_number(own_members: Path, tmp_path: Path) -> None:
    experts = {
        "math": {"source": own_members / "lora_math", "description": "x."},
        "tone": {"source": own_members / "lora_coding", "style": True, "weight": 0.5},
    }
    tessellm.compose(own_members / "base", experts, rule="mixture").save_pretrained(tmp_path / "out")
    more = save_lora(own_members / "base", tmp_path / "more", 9)
    add_expert(tmp_path / "out", MemberSpec(str(more), description="y."))
    remove_expert(tmp_path / "out", "math")
    found = checkpoint.load(tmp_path / "out")
    assert found.config.member_names == ["base", "tone", "more"]
    assert list(found.config.rule["styles"]) == [1]
    assert found.config.weights == (0.5, 1.0)


def test_full_models_and_other_rules(own_members: Path, tmp_path: Path) -> None:
    composed(own_members, "math", rule="product").save_pretrained(tmp_path / "out", self_contained=True)
    add_expert(tmp_path / "out", MemberSpec(str(own_members / "coding")))
    shutil.rmtree(own_members / "coding")
    found = checkpoint.load(tmp_path / "out")
    assert [member["kind"] for member in found.config.members] == ["full", "adapter", "full"]
    assert logits(found).isfinite().all()


def test_the_command_line(cli: Any, own_members: Path, tmp_path: Path) -> None:
    composed(own_members, "math").save_pretrained(tmp_path / "out")
    ran = cli("add", tmp_path / "out", own_members / "lora_coding", "--name", "code", "--description", "Writes code.")
    assert (ran.code, ran.out) == (0, f"added code → {tmp_path / 'out'}\n")
    assert checkpoint.read_config(tmp_path / "out").members[-1]["description"] == "Writes code."
    assert cli("generate", tmp_path / "out", "abc", "--max-new-tokens", 2).code == 0
    ran = cli("remove", tmp_path / "out", "code", "--json", tmp_path / "report.json")
    assert (ran.code, ran.out) == (0, f"removed code → {tmp_path / 'out'}\n")
    ran = cli("add", tmp_path / "out", own_members / "lora_coding")
    assert ran.out == f"added lora_coding → {tmp_path / 'out'}\n"
    assert "no description: lora_coding. A line" in ran.err


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_cannot_be_changed_is_left_alone(own_members: Path, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    composed(own_members, "math").save_pretrained(out)
    before = files(out)
    coding = MemberSpec(str(own_members / "lora_coding"))
    grown = character_tokenizer()
    grown.add_tokens(["<new>"])
    other = save_member(build_model("llama", 3, vocab_size=72), tmp_path / "other", grown)
    for refused, says in (
        (lambda: add_expert(out, coding, "math"), "has an expert 'math' already"),
        (lambda: add_expert(out, coding, "no name"), "cannot be an expert's name"),
        (lambda: add_expert(out, MemberSpec(str(tmp_path / "nowhere"))), "there is no folder"),
        (lambda: add_expert(own_members / "base", coding), "holds no composition"),
        (lambda: remove_expert(out, "maths"), "did you mean 'math'?"),
        (lambda: remove_expert(out, "base"), "has no expert 'base'"),
        (lambda: remove_expert(out, "math"), "a composition needs one at least"),
    ):
        with pytest.raises((MemberError, CheckpointError), match=says):
            refused()
    with pytest.raises(VocabularyError, match="<new>"):
        add_expert(out, MemberSpec(str(other)))
    monkeypatch.setattr(changes, "prepare_router", lambda *_, **__: (out / "config.json").write_bytes(b"{}"))
    with pytest.raises(CheckpointError, match="was changed meanwhile"):
        add_expert(out, coding)
    assert files(out) | {str(out / "config.json"): b""} == before | {str(out / "config.json"): b""}
