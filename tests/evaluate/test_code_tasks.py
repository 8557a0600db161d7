"""HumanEval+ and MBPP+ by the real evalplus, confined, on small data in its format."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tessellm
from tessellm.errors import EngineError, PromptError
from tessellm.evaluate import code_tasks, confined
from tessellm.evaluate.code_tasks import problem_lines, run_code_task, stop_texts
from tessellm.evaluate.harness import ComposedLM
from tessellm.evaluate.tasks import GREEDY

from conftest import build_model, character_tokenizer, perturbed

DATA = Path(__file__).parent / "data"
WRITTEN = {  # what a model could have written; whether it passes the base tests, and the extra tests too
    "humaneval": [
        ("    return len([n for n in numbers if n >= bound])\n", 1, 0),  # wrong at the bound alone
        ("    return text + text[::-1]\n", 1, 1),
    ],
    "mbpp": [
        ("def largest_gap(numbers):\n\twhile True:\n\t\tpass\n", 0, 0),
        ("\ndef average(a, b):\n    return a / 2 + b / 2\n", 1, 1),
    ],
}


@pytest.fixture(scope="module")
def model() -> Any:
    base = build_model("llama", 0, max_position_embeddings=1024)
    return tessellm.compose(base, {"math": perturbed(base, 1)}, rule="product", tokenizer=character_tokenizer())


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_prompts_are_evalplus_own_and_judged_by_it(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = ComposedLM(model)
    expected = json.loads((DATA / "prompts" / f"{name}.json").read_text(encoding="utf-8"))
    assert stop_texts(name) == expected["until"]
    for prompt, (text, *_) in zip(expected["prompts"], WRITTEN[name], strict=True):
        told = {"text": text, "tokens": 7, "finish_reason": "stop", "error": None, "seconds": 1.0, "prompt_tokens": 9}
        lm.journal.add(lm._key(prompt, {"until": expected["until"], **GREEDY}), **told)
    held = len(lm.journal)
    outcome = run_code_task(lm, name, problem_lines(name, DATA))
    assert len(lm.journal) == held + 1  # evalplus asked for these prompts, character by character, and for no other
    found = [tuple(problem.scores.values()) for problem in outcome.problems]
    assert found == [(base, plus) for _, base, plus in WRITTEN[name]]
    with monkeypatch.context() as patched:  # what was judged once is not run again
        patched.setattr(code_tasks, "score_samples", None)
        assert run_code_task(lm, name, problem_lines(name, DATA)) == outcome


def test_a_composition_runs_end_to_end(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(code_tasks.GREEDY, "max_gen_toks", 6)
    outcome = run_code_task(ComposedLM(model), "humaneval", problem_lines("humaneval", DATA)[:1])
    (problem,) = outcome.problems
    assert problem.id == "HumanEval/0"
    assert problem.scores == {"pass@1,base": 0.0, "pass@1,plus": 0.0}
    assert 0 < problem.tokens <= 6


def confined_run(scratch: Path, code: str, seconds: int = 20, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, confined.__file__, str(scratch), str(seconds), str(4 << 30), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_confined_code_writes_in_its_scratch_alone(tmp_path: Path) -> None:
    scratch, outside = tmp_path / "scratch", tmp_path / "outside"
    scratch.mkdir()
    outside.write_text("mine")
    assert confined_run(scratch, "open('made', 'w').write('x')").returncode == 0
    assert (scratch / "made").read_text() == "x"
    for attempt in (
        f"open({str(outside)!r}, 'w')",
        f"open('{tmp_path}/new', 'w')",
        f"import os; os.remove({str(outside)!r})",
    ):
        ran = confined_run(scratch, attempt)
        assert "PermissionError" in ran.stderr, attempt
    assert outside.read_text() == "mine"


def test_confined_code_reaches_no_network_and_no_other_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = confined_run(tmp_path, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
        assert "OSError" in ran.stderr
    ran = confined_run(tmp_path, f"import os; os.kill({os.getpid()}, 0)")
    assert "ProcessLookupError" in ran.stderr


def test_confined_code_ends_when_whoever_asked_is_killed(tmp_path: Path) -> None:
    code = "import time; open('began', 'w'); time.sleep(60); open('went on', 'w')"
    command = [sys.executable, confined.__file__, str(tmp_path), "60", str(4 << 30), sys.executable, "-c", code]
    asker = f"import subprocess; subprocess.run({command!r})"
    process = subprocess.Popen([sys.executable, "-c", asker])
    deadline = time.monotonic() + 30
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    while (left := _running_with(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def _running_with(argument: str) -> list[str]:
    """Processes that were started with that argument, or in whose program it stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace")
            if argument in words or "went on" in words:
                found.append(words)
    return found


def test_confined_code_has_limits(tmp_path: Path) -> None:
    assert "MemoryError" in confined_run(tmp_path, "bytearray(5 << 30)").stderr
    assert confined_run(tmp_path, "while True: pass", seconds=1).returncode != 0


def test_a_system_that_cannot_confine_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "confined.py"
    refusing.write_text(Path(confined.__file__).read_text().replace("_NAMESPACES = ", "_NAMESPACES = 0x1 | "))
    monkeypatch.setattr(confined, "__file__", str(refusing))
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"task_id": "HumanEval/0", "solution": ""}\n')
    with pytest.raises(EngineError, match="runs only where it can be confined"):
        code_tasks.score_samples("humaneval", samples, DATA / "HumanEvalPlus.jsonl")


def test_bad_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"HumanEvalPlus\.jsonl is missing"):
        problem_lines("humaneval", tmp_path)
    (tmp_path / "MbppPlus.jsonl").write_text('{"task_id": "Mbpp/1"}\n')
    with pytest.raises(PromptError, match="line 1: expected a problem of evalplus; it lacks prompt"):
        problem_lines("mbpp", tmp_path)
