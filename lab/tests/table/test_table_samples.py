"""Samples of the table: written, read, judged later; others than those of this experiment are refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessellm.errors import CheckpointError, MissingExtraError, TessellmError
from tessellm_lab.table import experiment
from tessellm_lab.table.making import key
from tessellm_lab.table.plan import PLANS
from tessellm_lab.table.problems import KINDS, problems
from tessellm_lab.table.writing import Sample, check_unchanged, fingerprint, read_samples

from test_table import COLUMNS, SMALL, TINY


def test_full_size_needs_samples_or_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TessellmError, match="without a GPU none can be made"):
        experiment.run(0, tmp_path, "full", lambda text: None)


def test_samples_that_are_damaged_are_named(tmp_path: Path) -> None:
    samples, facts = experiment.paths(tmp_path, "cpu", 0)
    samples.write_text('{"kind": "math"}\n')
    facts.write_text("{")
    with pytest.raises(CheckpointError, match=r"cpu-0\.json is damaged, or another version's"):
        experiment.write_samples(PLANS["cpu"], [0], tmp_path, "cpu", lambda text: None)
    with pytest.raises(CheckpointError, match=r"cpu-0\.jsonl is damaged, or another version's"):
        experiment.judge(PLANS["cpu"], [0], tmp_path, "cpu", lambda text: None)


@pytest.fixture
def whole() -> list[Sample]:
    return [Sample(7, column, kind, n, "text", 1, "stop") for column in COLUMNS for kind in KINDS for n in range(2)]


def kept(path: Path, samples: list[Sample]) -> list[Sample]:
    path.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))
    return read_samples(path, {kind: problems(kind, 2, SMALL, 7) for kind in KINDS}, 7)


def test_samples_are_read_as_they_were_written(whole: list[Sample], tmp_path: Path) -> None:
    assert kept(tmp_path / "full-7.jsonl", whole) == whole


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda whole: [], "78 are missing, and 0 are others"),
        (lambda whole: whole[:-6], "6 are missing, and 0 are others"),  # a whole column
        (lambda whole: [*whole, whole[0]], "0 are missing, and 1 are others"),
        (lambda whole: [replace(sample, seed=8) for sample in whole], "78 are missing, and 78 are others"),
        (lambda whole: [replace(whole[0], text=None), *whole[1:]], "is damaged"),
        (lambda whole: [replace(whole[0], number=[0]), *whole[1:]], "is damaged"),
    ],
)
def test_samples_of_something_else_are_refused(change: Any, told: str, whole: list[Sample], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"full-7\.jsonl .*{told}"):
        kept(tmp_path / "full-7.jsonl", change(whole))


def test_samples_without_judges_are_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "find_spec", lambda name: None)
    monkeypatch.setitem(experiment.PLANS, "cpu", replace(TINY, seeds=1))
    heard: list[str] = []
    made = experiment.run(0, tmp_path, "cpu", heard.append)
    assert [claim["id"] for claim in made["claims"]] == ["speed"]
    facts = json.loads((tmp_path / "table" / "cpu-0.json").read_text())
    assert {name: steps["planned"] for name, steps in facts["steps"].items()} == {
        "base": TINY.base.steps,
        "experts": TINY.experts.steps,
        "LoRA experts": TINY.lora.steps,
    }
    assert all(1 <= steps["reached"] <= steps["planned"] for steps in facts["steps"].values())
    assert 'pip install "tessellm[eval]"; then run it again' in heard[-1]
    with pytest.raises(MissingExtraError, match=r"the judges are not installed: lm_eval and evalplus\. Fix: pip"):
        experiment.run(0, tmp_path, "cpu", heard.append)
    assert [path.name for path in tmp_path.iterdir()] == ["table"]


def test_samples_that_are_kept_are_of_the_problems_that_are_asked() -> None:
    stored = sorted((Path(__file__).parents[2] / "results" / "table").glob("*.json"))
    assert stored
    for path in stored:
        size, seed = path.stem.split("-")
        assert json.loads(path.read_text(encoding="utf-8"))["problems"] == key(PLANS[size], int(seed))
        check_unchanged(path.with_suffix(".jsonl"), path)


def test_samples_that_were_edited_are_noticed(whole: list[Sample], tmp_path: Path) -> None:
    samples, facts = experiment.paths(tmp_path, "full", 7)
    kept(samples, whole)
    facts.write_text(json.dumps({"samples": fingerprint(samples)}))
    check_unchanged(samples, facts)
    kept(samples, [replace(whole[0], text="another text"), *whole[1:]])
    with pytest.raises(CheckpointError, match=r"full-7\.jsonl was changed after it was written"):
        check_unchanged(samples, facts)
