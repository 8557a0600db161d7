"""Routes of labelled prompts, counted; and what --json holds of a route."""

from __future__ import annotations

import json

import pytest

from tessellm.errors import PromptError
from tessellm.inspect.routes import Confusion, checked_labels, draw, route_entry
from tessellm.routing.route import Route
from tessellm.text.inputs import LabelledPrompt, read_labelled

MEMBERS = ("base", "math", "sql")


def confusion(*pairs: tuple[str, str]) -> Confusion:
    return Confusion.of(
        MEMBERS, [label for label, _ in pairs], [Route({selected: 1.0}, selected) for _, selected in pairs]
    )


def test_accuracy_is_the_experts_and_retention_the_bases():
    found = confusion(
        ("math", "math"), ("math", "math"), ("math", "base"), ("sql", "math"), ("base", "base"), ("base", "sql")
    )
    assert found.accuracy == 2 / 4
    assert found.base_retention == 1 / 2
    assert found.labels == ["base", "math", "sql"]
    assert found.total("math") == 3
    assert found.errors() == [("base", "sql", 1), ("math", "base", 1), ("sql", "math", 1)]
    assert confusion(("math", "sql")).base_retention is None
    assert confusion(("base", "base")).accuracy is None


def test_an_entry_is_json_whatever_the_scores():
    route = Route({"base": 0.7, "math": 0.3}, "base", {"math": None}, 1.5)
    entry = route_entry(LabelledPrompt("a", "math"), route)
    assert json.loads(json.dumps(entry, allow_nan=False)) == {
        "prompt": "a",
        "label": "math",
        "selected": "base",
        "prior": {"base": 0.7, "math": 0.3},
        "scores": {"math": None},
        "threshold": 1.5,
    }
    assert "label" not in route_entry(LabelledPrompt("a"), route)


def test_labels_are_read_and_checked(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "skill": "math"}\n{"prompt": "b", "label": "base"}\n')
    assert checked_labels(read_labelled(file), MEMBERS) == ["math", "base"]
    file.write_text('{"prompt": "a", "skill": "maths"}\n')
    with pytest.raises(PromptError, match=r"line 1: there is no member 'maths'; did you mean 'math'"):
        checked_labels(read_labelled(file), MEMBERS)
    file.write_text('{"prompt": "a", "skill": "math"}\n{"prompt": "b"}\n')
    with pytest.raises(PromptError, match="line 2 has no label, which others have"):
        checked_labels(read_labelled(file), MEMBERS)
    file.write_text('{"prompt": "a", "skill": 3}\n')
    with pytest.raises(PromptError, match="line 1: expected"):
        read_labelled(file)


def test_a_picture_of_many_members(tmp_path):
    pytest.importorskip("matplotlib")
    names = ["base", *(f"expert{n}" for n in range(20))]
    routes = [Route({name: 1.0}, name) for name in names]
    draw(Confusion.of(names, names, routes), tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")
    draw(Confusion.of(names, names[:1], routes[:1]), tmp_path / "matrix.svg")
    assert "<svg" in (tmp_path / "matrix.svg").read_text()
