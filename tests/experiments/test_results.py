"""The committed results of full size hold what they claim, and the page that tells of them is current."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


FULL = ["skills", "many-experts", "endings", "rule-cost", "trig", "scale", "bridge", "images", "table"]


@pytest.mark.parametrize("name", FULL)
def test_full_results_hold_and_say_where_they_come_from(name):
    content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert content["size"] == "full"
    assert content["commit"]
    assert content["hardware"]
    assert any(claim["target"] for claim in content["claims"])
    assert all(claim["holds"] for claim in content["claims"] if claim["target"])


def test_the_pages_on_rules_show_the_results():
    spec = importlib.util.spec_from_file_location("generate_rules", ROOT / "docs" / "generate_rules.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    for name in page.BLOCKS:
        assert page.current(name) == (page.DOCS / name).read_text(encoding="utf-8")
