"""A rule that was made for other members, or edited, is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tessellm
from tessellm.errors import RecipeError
from tessellm.load import load_model

HABITS = [[0.0] * 5 + [1.0] * 5] * 2


@pytest.fixture(scope="module")
def believing(members_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("believing") / "out"
    experts = {"math": members_dir / "math", "lora": members_dir / "lora_math"}
    rule = {"name": "belief", "habits": HABITS, "opening": [4], "turn": [5]}
    tessellm.compose(members_dir / "base", experts, rule=rule).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"habits": HABITS[:1]}, "expected the habits of 2 experts; got those of 1"),
        ({"habits": HABITS * 2}, "got those of 4"),
        ({"habits": [[1e308] * 10] * 2}, "expected habits within"),
        ({"opening": [10**30]}, "expected tokens from 0 to"),
        ({"opening": [5] * 10_000}, "expected an opening of at most"),
        ({"turn": [-1]}, r"in its opening, turn and user; got -1"),
    ],
)
def test_habits_of_others_are_refused(believing: Path, change: dict[str, Any], told: str) -> None:
    file = believing / "config.json"
    whole = file.read_text()
    config = json.loads(whole)
    assert config["rule"]["habits"] == HABITS
    config["rule"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=f"does not fit these members: .*{told}"):
        load_model(str(believing))
    file.write_text(whole)
