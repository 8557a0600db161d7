"""Tables: intervals, paired tests, and a run that is killed and goes on."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessellm
from tessellm.errors import CheckpointError, RecipeError
from tessellm.evaluate import tasks
from tessellm.evaluate.evaluation import EvaluationPlan, check_folder, columns_of
from tessellm.evaluate.intervals import bootstrap, compare, sign_flip_test
from tessellm.evaluate.journal import Journal
from tessellm.evaluate.protocol import Outcome, Problem
from tessellm.evaluate.table import make_table, markdown

from conftest import build_model, character_tokenizer, perturbed, press_ctrl_c, save_member

DATA = Path(__file__).parent / "data"


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    found = [bootstrap((generator.random(80) < 0.4).astype(float).tolist()) for _ in range(60)]
    assert 0.85 <= np.mean([each.low <= 0.4 <= each.high for each in found]) <= 1


def test_problems_without_an_exception_leave_something_open() -> None:
    assert bootstrap([0.0] * 100).high == pytest.approx(0.0362, abs=1e-4)  # Clopper and Pearson's for 0 of 100
    assert bootstrap([1.0] * 10).low == pytest.approx(1 - 0.3085, abs=1e-4)
    assert compare([1.0] * 10, [1.0] * 10).interval.low == pytest.approx(-0.3085, abs=1e-4)


@pytest.mark.parametrize("values", [[1.0, 1, 1, -1, 1, 1, 0, 1], [1.0] * 9, [0.0] * 4, [1.0, -1.0]])
def test_the_exact_test_is_the_sum_over_all_signs(values: list[float]) -> None:
    moved = np.array([value for value in values if value])
    sums = [abs(np.dot(signs, moved)) for signs in itertools.product((-1, 1), repeat=len(moved))]
    assert sign_flip_test(np.array(values)) == pytest.approx(np.mean([each >= abs(moved.sum()) for each in sums]))


def test_differences_of_other_sizes_are_tested_by_draws() -> None:
    values = np.array([0.5, 0.25, 1.0, -0.125, 0.75, 0.5, 0.25])
    sums = [abs(np.dot(signs, values)) for signs in itertools.product((-1, 1), repeat=len(values))]
    assert sign_flip_test(values) == pytest.approx(np.mean([each >= values.sum() for each in sums]), abs=0.01)
    assert compare([1.0, 0.0], [0.0, 0.0]).interval.mean == 0.5
    with pytest.raises(ValueError, match="same problems"):
        compare([1.0], [1.0, 0.0])


def outcome(scores: str) -> Outcome:
    problems = [
        Problem(str(n), {"equal,none": float(score), "as_published,none": 0.0}, "", 10, "length" if n else "stop")
        for n, score in enumerate(scores)
    ]
    return Outcome("math", problems)


def test_a_table_as_markdown() -> None:
    table = make_table({"math": {"base": outcome("0000"), "a_b": outcome("1110")}}, "a_b")
    assert table.cells["math"]["a_b"].score.mean == 0.75
    assert table.cells["math"]["a_b"].went_on == 0.75
    assert table.against["math"]["base"].p == 0.25
    assert "| MATH | 0.0 (0.0–60.2) | 75.0 (25.0–100.0) |" in markdown(table)
    assert "+75.0 (+25.0 to +100.0) | 0.25 |" in markdown(table)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    base = build_model("llama", 0, max_position_embeddings=4096)
    save_member(base, folder / "base", character_tokenizer())
    save_member(perturbed(base, 1), folder / "math", character_tokenizer())
    path = folder / "recipe.yaml"
    path.write_text("base: ./base\nexperts:\n  math: ./math\nrule: product\n")
    return path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.GREEDY, "max_gen_toks", 6)


def without_times(folder: Path) -> list[str]:
    """The table in all its forms, byte for byte, without what was timed."""
    table = json.loads((folder / "table.json").read_text())
    for row in table["cells"].values():
        for cell in row.values():
            del cell["seconds"]
    lines = (folder / "table.md").read_text().splitlines()
    cells = [line.split(" | ") for line in lines]
    shown = [" | ".join(row[:6] + row[7:]) if len(row) == 9 else line for row, line in zip(cells, lines, strict=True)]
    return [json.dumps(table), "\n".join(shown)]


@pytest.mark.timeout(600)  # a busy machine
def test_a_run_over_two_tasks_that_is_killed_ends_with_the_same_table(recipe: Path, tmp_path: Path) -> None:
    """SIGKILL at random points: while texts are written, while code is judged."""
    arguments = ["evaluate", recipe, "--tasks", "math,humaneval", "--data", DATA, "--columns", "composition"]
    arguments += ["--rules", "product,mixture"]
    command = [sys.executable, Path(__file__).with_name("killed.py"), 0, 4, tmp_path, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=580, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert len(ran.stdout.split()) >= 3, ran.stdout  # so many runs were killed before their end
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")


@pytest.mark.usefixtures("short")
def test_a_run_that_is_killed_anywhere_ends_with_the_same_table(cli: Any, recipe: Path, tmp_path: Path) -> None:
    arguments = ("evaluate", recipe, "--tasks", "math,gsm8k", "--data", DATA, "--limit", 2)
    ran = cli(*arguments, "-o", tmp_path / "whole", "--json", tmp_path / "whole.json")
    assert ran.code == 0, ran.err
    assert "| MATH | " in ran.out
    assert json.loads((tmp_path / "whole.json").read_text())["columns"] == ["base", "math", "composition"]
    cut = tmp_path / "whole"
    expected = without_times(cut)
    journals = sorted((cut / "journals").rglob("*.jsonl"))
    assert len(journals) == 6
    (cut / "table.json").unlink()
    for number, journal in enumerate(journals):  # as a killed run leaves them: whole, cut in a line, not begun
        content = journal.read_bytes()
        journal.write_bytes(content[: len(content) * number // len(journals)])
    assert cli(*arguments, "-o", cut).code == 0
    assert without_times(cut) == expected


@pytest.mark.usefixtures("short")
def test_members_alone_another_rule_and_a_chat(cli: Any, recipe: Path, tmp_path: Path) -> None:
    arguments = ("--tasks", "gsm8k", "--data", DATA, "--limit", 1)
    ran = cli("evaluate", recipe, f"{recipe}:math", *arguments, "--columns", "composition", "-o", tmp_path / "two")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "two" / "table.json").read_text())["columns"] == ["recipe", "recipe-math"]
    ran = cli("evaluate", f"{recipe}:math", *arguments, "--system", "be brief", "-o", tmp_path / "chat")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "chat" / "table.json").read_text())["columns"] == ["recipe-math"]
    plain, chat = (
        json.loads((tmp_path / name / "journals" / "recipe-math" / "gsm8k.jsonl").read_text().splitlines()[-1])
        for name in ("two", "chat")
    )
    assert chat["prompt_tokens"] > plain["prompt_tokens"] + len("be brief")  # a character is a token
    run = json.loads((tmp_path / "chat" / "run.json").read_text())
    assert run["chat"] == {"system": "be brief"}
    for wrong, said in (
        ((recipe, "--tasks", "humaneval", "--data", DATA, "--chat"), "humaneval is evaluated as evalplus completes"),
        (
            (recipe, *arguments, "--rule", "product", "--rules", "product"),
            "--rule is the rule of the column composition",
        ),
        ((f"{recipe}:math", *arguments, "--rules", "product"), "'recipe-math' is a member and speaks alone"),
    ):
        ran = cli("evaluate", *wrong, "-o", tmp_path / "none")
        assert (ran.code, said in ran.err) == (2, True), ran.err
        assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("short")
def test_ctrl_c_says_how_to_go_on(cli: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("evaluate", recipe, "--tasks", "math", "--data", DATA, "--limit", 2, "-o", tmp_path / "out")
    add = Journal.add

    def add_and_stop(journal: Journal, key: str, **content: Any) -> Any:
        return add(journal, key, **content) if not list(tmp_path.rglob("*.jsonl")) else press_ctrl_c()

    with monkeypatch.context() as pressed:
        pressed.setattr(Journal, "add", add_and_stop)
        ran = cli(*arguments)
    kept = f"interrupted; what is done is kept in {tmp_path / 'out'}: run the same command again to go on\n"
    assert ran == (130, "", kept)
    assert cli(*arguments).code == 0


def test_a_run_that_was_killed_at_its_first_word_can_begin(tmp_path: Path) -> None:
    (tmp_path / ".run.json.123-456.tmp").write_text("{")
    check_folder(tmp_path, {"plan": {}})
    journal = tmp_path / "journals" / "base" / "math.jsonl"
    journal.parent.mkdir(parents=True)
    journal.touch()
    check_folder(tmp_path, {"plan": {"limit": 1}})  # nothing came of the other
    assert json.loads((tmp_path / "run.json").read_text()) == {"plan": {"limit": 1}}
    journal.write_text("{}\n")
    with pytest.raises(CheckpointError, match="holds another evaluation"):
        check_folder(tmp_path, {"plan": {}})
    (tmp_path / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="holds another evaluation"):
        check_folder(tmp_path, {"plan": {}})
    (tmp_path / "run.json").unlink()
    with pytest.raises(CheckpointError, match="holds something else"):
        check_folder(tmp_path, {"plan": {}})
    (tmp_path / "run.json").mkdir()
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read: Is a directory"):
        check_folder(tmp_path, {"plan": {}})


@pytest.mark.usefixtures("short")
def test_a_journal_of_another_version_is_named(cli: Any, recipe: Path, tmp_path: Path) -> None:
    arguments = ("evaluate", recipe, "--data", DATA, "--limit", 1, "--columns", "base", "-o", tmp_path / "out")
    assert cli(*arguments, "--tasks", "gsm8k").code == 0
    journal = tmp_path / "out" / "journals" / "base" / "gsm8k.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"finish_reason"', b'"reason"'))
    ran = cli(*arguments, "--tasks", "gsm8k")
    assert ran.code == 2
    assert "gsm8k.jsonl: an entry lacks 'finish_reason'. It is damaged or another version's" in ran.err


@pytest.mark.usefixtures("short")
def test_another_evaluation_is_not_mixed_in(cli: Any, recipe: Path, tmp_path: Path) -> None:
    arguments = ("evaluate", recipe, "--data", DATA, "--limit", 1, "--columns", "composition", "-o", tmp_path / "out")
    assert cli(*arguments, "--tasks", "math").code == 0
    ran = cli(*arguments, "--tasks", "gsm8k")
    assert ran.code == 2
    assert "holds another evaluation" in ran.err


def test_without_lm_eval_the_extra_is_named(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ran = cli("evaluate", tmp_path / "nothing", "--tasks", "math", "-o", tmp_path / "out")
    assert ran.code == 2
    assert 'pip install "tessellm[eval]"' in ran.err


def test_bad_usage_is_named(cli: Any, recipe: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--tasks", "math", "--columns", "compositoin"), "did you mean 'composition'"),
        (("--tasks", ","), "no task was given"),
        (("--tasks", "math", "--data", tmp_path), "test.jsonl is missing"),
    ):
        ran = cli("evaluate", recipe, *arguments, "-o", tmp_path / "out")
        assert ran.code == 2
        assert message in ran.err
        assert not (tmp_path / "out").exists()


def test_columns_of_one_name_are_refused(members_dir: Path) -> None:
    model = tessellm.compose(members_dir / "base", {"mixture": members_dir / "coding"}, rule="product")
    with pytest.raises(RecipeError, match="two columns would be called 'mixture'"):
        columns_of({"model": model}, EvaluationPlan(("math",), rules=("product", "mixture")))


def test_rules_are_columns(cli: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.GREEDY, "max_gen_toks", 6)
    arguments = ("--tasks", "math", "--data", DATA, "--limit", 1, "-o", tmp_path / "out")
    assert cli("evaluate", recipe, *arguments, "--rules", "product,mixture").code == 0
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert table["columns"] == ["base", "math", "product", "mixture"]
    assert table["subject"] == "product"
    assert {"commit", "hardware", "versions"} <= set(table)
    assert cli("evaluate", recipe, *arguments, "--rules", "prodct").code == 2
