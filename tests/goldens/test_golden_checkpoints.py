"""Compositions that were saved earlier load, and say what they said then, unless data/checkpoints/expected.json names
another rule for them by now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checkpoint_goldens import KINDS, loaded, saved_rule
from golden_compare import differences, logit_differences
from golden_files import DATA, read

SAVED = DATA / "checkpoints"
EXPECTED = json.loads((SAVED / "expected.json").read_text())
COMPUTED = ("logits", "written")  # what another rule may change


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: loading must leave nothing beside what is kept."""
    return Path(shutil.copytree(SAVED, tmp_path_factory.mktemp("checkpoints") / "saved"))


def test_every_kind_is_expected_to_load() -> None:
    assert sorted(EXPECTED) == sorted(KINDS) == sorted(read("checkpoints/loaded.json.gz"))


@pytest.mark.filterwarnings("ignore:.*non-writable:UserWarning")  # of GGUF files
@pytest.mark.parametrize("kind", KINDS)
def test_loads_as_expected(kind: str, copied: Path) -> None:
    found, golden = loaded(copied / kind), read("checkpoints/loaded.json.gz")[kind]
    assert {key: found.pop(key) for key in EXPECTED[kind]} == EXPECTED[kind]
    if EXPECTED[kind]["rule"] == saved_rule(copied / kind):
        assert logit_differences(kind, golden["logits"], found["logits"]) == []
        assert found["written"] == golden["written"]
    as_saved = [{key: each[key] for key in golden if key not in COMPUTED} for each in (golden, found)]
    assert differences(*as_saved, kind) == []
