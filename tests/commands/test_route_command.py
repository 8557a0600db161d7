"""`tessellm route`: tables, JSON, labelled prompts, and bad usage."""

from __future__ import annotations

import json

import pytest

import tessellm
from tessellm.routing import calibrated
from tessellm.routing.calibration import calibration_prompts


@pytest.fixture(scope="module")
def out(members_dir, tmp_path_factory):
    few = [text for text in calibration_prompts() if len(text) < 60][:40]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated, "calibration_prompts", lambda: few)
        experts = {"math": members_dir / "lora_math", "coding": {"source": members_dir / "lora_coding", "weight": 0.5}}
        model = tessellm.compose(members_dir / "base", experts, rule="mixture")
    folder = tmp_path_factory.mktemp("routed") / "out"
    model.save_pretrained(folder)
    return folder, model


def test_prompts_are_routed_as_in_python(cli, out, tmp_path):
    folder, model = out
    (tmp_path / "more.txt").write_text("one line\nanother line\n")
    asked = ["hello there", "7 + 5"]
    ran = cli("route", folder, *asked, "--file", tmp_path / "more.txt", "--json", tmp_path / "routes.json")
    assert ran.code == 0
    entries = json.loads((tmp_path / "routes.json").read_text())
    asked += ["one line", "another line"]
    for prompt, entry, route in zip(asked, entries, model.route(asked), strict=True):
        assert (entry["prompt"], entry["selected"]) == (prompt, route.selected)
        assert entry["prior"] == pytest.approx(dict(route.prior), rel=1e-3)
        assert set(entry["scores"]) == {"math", "coding"}
        assert entry["threshold"] == pytest.approx(route.threshold)
        assert prompt in ran.out
    assert "threshold: " in ran.out


def test_labelled_prompts_are_counted(cli, out, tmp_path):
    pytest.importorskip("matplotlib")
    folder, model = out
    asked = [("1 + 1", "math"), ("sort", "coding"), ("hello", "base"), ("how are you?", "base")]
    file = tmp_path / "labelled.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "skill": skill}) + "\n" for text, skill in asked))
    ran = cli("route", folder, "--file", file, "--plot", tmp_path / "matrix.png", "--json", tmp_path / "routes.json")
    assert ran.code == 0
    routes = model.route([text for text, _ in asked])
    kept = sum(route.selected == "base" for route in routes[2:]) / 2
    right = sum(route.selected == skill for route, (_, skill) in zip(routes[:2], asked, strict=False)) / 2
    assert f"accuracy: {right:.3f}" in ran.out
    assert f"base retention: {kept:.3f}" in ran.out
    assert "label" in ran.out
    assert (tmp_path / "matrix.png").stat().st_size > 1000
    assert [entry["label"] for entry in json.loads((tmp_path / "routes.json").read_text())] == [
        "math",
        "coding",
        "base",
        "base",
    ]


def test_many_members_have_their_errors_listed(out, capsys):
    from tessellm.commands.route import _show_confusion
    from tessellm.inspect.routes import Confusion
    from tessellm.routing.route import Route

    names = ["base", *(f"e{n}" for n in range(15))]
    routes = [Route({"base": 1.0}, "base") for _ in names]
    _show_confusion(Confusion.of(names, names, routes))
    shown = capsys.readouterr().out
    assert "e0 → base: 1 of 1" in shown
    assert "and 5 more pairs" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no prompt was given"),
        (["a", "--plot", "matrix.png"], "--plot draws a confusion matrix, which needs labels"),
        (["--file", "empty.txt"], "empty.txt holds no prompts"),
        (["--file", "wrong.jsonl"], "there is no member 'chemistry'"),
    ],
)
def test_bad_usage_is_told_in_one_message(cli, out, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a", "label": "chemistry"}\n')
    ran = cli("route", out[0], *arguments)
    assert ran.code == 2
    assert told in ran.err


def test_a_composition_without_a_router_says_so(cli, members_dir, tmp_path):
    model = tessellm.compose(members_dir / "base", {"math": members_dir / "lora_math"}, rule="product")
    model.save_pretrained(tmp_path / "out")
    ran = cli("route", tmp_path / "out", "a")
    assert ran.code == 2
    assert "the rule 'product' routes nothing" in ran.err
