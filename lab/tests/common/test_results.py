"""The committed results of full size hold what they claim, and the page that tells of them is current."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tessellm_lab.bridge import experiment as bridge
from tessellm_lab.images import experiment as images
from tessellm_lab.neurons import experiment as neurons
from tessellm_lab.scale import experiment as scale
from tessellm_lab.scale.stacks import stacks

ROOT = Path(__file__).resolve().parents[3]


FULL = ["skills", "many-experts", "endings", "rule-cost", "trig", "scale", "bridge", "images", "table"]


@pytest.mark.parametrize("name", FULL)
def test_full_results_hold_and_say_where_they_come_from(name):
    content = json.loads((ROOT / "lab" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert content["size"] == "full"
    assert content["commit"]
    assert content["hardware"]
    assert any(claim["target"] for claim in content["claims"])
    assert all(claim["holds"] for claim in content["claims"] if claim["target"])


@pytest.mark.parametrize(
    ("name", "claims_of"),
    [
        ("scale", lambda tables: scale.claims_of(tables["runs"], full=True)),
        ("bridge", lambda tables: bridge.claims_of(tables["experts"], tables["models"])),
        ("images", lambda tables: images.claims_of(tables["models"])),
        ("neurons", lambda tables: neurons.claims_of(tables["approximate"], tables["exact"])),
    ],
)
def test_claims_are_what_the_tables_beside_them_show(name, claims_of):
    content = json.loads((ROOT / "lab" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    claims = [claim for claim in content["claims"] if claim["id"] != "finished"]
    assert claims == [asdict(claim) for claim in claims_of(content["tables"])]


def test_all_runs_of_scale_are_there():
    content = json.loads((ROOT / "lab" / "results" / "scale.json").read_text(encoding="utf-8"))
    found = [(row["stack"], row["steps"]) for row in content["tables"]["runs"]]
    assert found == [(stack.name, stack.steps) for stack in stacks("full", content["seed"]) for _ in stack.runs]


def test_pages_show_the_results():
    spec = importlib.util.spec_from_file_location("generate_rules", ROOT / "lab" / "docs" / "generate_rules.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    for name in page.BLOCKS:
        assert page.current(name) == (page.ROOT / name).read_text(encoding="utf-8")
    for name, lines in page.TABLES.items():
        assert sum(line.startswith("|") for line in lines()) > 2, name
