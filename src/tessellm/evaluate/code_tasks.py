"""HumanEval+ and MBPP+: prompts, samples and scores by evalplus; the model's texts by the engine.

evalplus runs what the model wrote. Its guard is, by its own word, no sandbox, so it runs confined (confined.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from ..errors import EngineError, PromptError, require
from .harness import ComposedLM
from .journal import key_of
from .programs import run_confined
from .protocol import Outcome, Problem
from .tasks import GREEDY, downloading

TASKS = ("humaneval", "mbpp")
FILES = {"humaneval": "HumanEvalPlus.jsonl", "mbpp": "MbppPlus.jsonl"}
NEEDED = ("task_id", "prompt", "canonical_solution", "entry_point", "base_input", "plus_input", "contract", "atol")
SECONDS_A_PROBLEM = 150  # more than evalplus gives one: sixty seconds for each of two sets of tests
SCORER = """import os, sys
from evalplus.evaluate import evaluate
evaluate(dataset=sys.argv[1], samples="samples.jsonl", parallel=int(sys.argv[2]))
os._exit(0)"""  # a thread of evalplus sleeps for twenty seconds after the work is done
WORKERS = max(1, (os.cpu_count() or 1) // 2)  # as evalplus
MEMORY = 16 << 30  # address space of the scorer; evalplus gives each solution four gigabytes


def run_code_task(lm: ComposedLM, name: str, lines: Sequence[str], workers: int = WORKERS) -> Outcome:
    """Have evalplus ask its problems, a JSON line each, the engine write, evalplus clean and judge."""
    with _problems(name, lines) as path, tempfile.TemporaryDirectory() as folder:
        prompts = _samples(name, Path(folder) / "none.jsonl", {})
        stops = stop_texts(name)
        asked: list[tuple[str, dict[str, Any]]] = [(prompt, {"until": stops, **GREEDY}) for prompt in prompts]
        written = lm.write(asked)
        texts = {prompt: [each.text.replace("\t", "    ")] for prompt, each in zip(prompts, written, strict=True)}
        key = key_of("judged", path.read_text(encoding="utf-8"), texts)
        if key not in lm.journal:  # judging takes minutes, and a busy machine may judge what is slow otherwise
            samples = Path(folder) / "samples.jsonl"
            _samples(name, samples, texts)
            lm.journal.add(key, judged=score_samples(name, samples, path, workers))
        judged = lm.journal[key]["judged"]
    entries = [lm.entry(*each) for each in asked]
    kept = ("text", "tokens", "finish_reason", "error", "seconds", "prompt_tokens")
    return Outcome(
        name,
        [
            Problem(id, scores, **{key: entry[key] for key in kept})
            for (id, scores), entry in zip(judged.items(), entries, strict=True)
        ],
    )


def stop_texts(name: str) -> list[str]:
    """Those at which evalplus ends a completion."""
    from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

    return list(dict.fromkeys([*EOS, *extra_eos_for_direct_completion(name)]))


def judge_texts(
    name: str, data: Path, texts: Mapping[str, Sequence[str]], workers: int = 1
) -> dict[str, list[dict[str, float]]]:
    """evalplus' verdicts on texts that were written before, by prompt, in their order."""
    with _problems(name, problem_lines(name, data)) as path, tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.jsonl"
        prompts = _samples(name, samples, texts)
        return dict(zip(prompts, verdicts(name, samples, path, workers).values(), strict=True))


def score_samples(name: str, samples: Path, problems: Path, workers: int = WORKERS) -> dict[str, dict[str, float]]:
    """evalplus' verdict on every problem: base tests, and base and extra tests together."""
    return {id: scores[0] for id, scores in verdicts(name, samples, problems, workers).items()}


def verdicts(name: str, samples: Path, problems: Path, workers: int = WORKERS) -> dict[str, list[dict[str, float]]]:
    """The same for every sample of a problem."""
    with tempfile.TemporaryDirectory() as scratch:
        for path, called in ((samples, "samples.jsonl"), (problems, "problems.jsonl")):
            shutil.copy(path, Path(scratch) / called)
        seconds = 120 + SECONDS_A_PROBLEM * len(_lines(samples))
        program = [sys.executable, "-c", SCORER, name, str(workers)]
        ran = run_confined(program, scratch, seconds, MEMORY, _environment(scratch))
        result = Path(scratch) / "samples_eval_results.json"
        if ran.returncode or not result.is_file():
            raise EngineError(f"evalplus failed (exit code {ran.returncode}): {ran.stderr.strip()[-500:]}")
        found = json.loads(result.read_text(encoding="utf-8"))["eval"]
    return {id: [_scores(verdict) for verdict in found[id]] for id in _ids(problems)}


def _scores(verdict: dict[str, Any]) -> dict[str, float]:
    base = verdict["base_status"] == "pass"
    return {"pass@1,base": float(base), "pass@1,plus": float(base and verdict["plus_status"] == "pass")}


def _environment(scratch: str) -> dict[str, str]:
    """Nothing of the user's own: no keys, no home."""
    paths = {f"{name.upper()}_OVERRIDE_PATH": f"{scratch}/problems.jsonl" for name in TASKS}
    places = {"HOME": scratch, "TMPDIR": scratch, "XDG_CACHE_HOME": scratch}
    kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    return {**kept, **places, **paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _samples(name: str, target: Path, texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Let evalplus build its prompts, give it texts for each, and let it write its samples; the prompts in order."""
    from evalplus.codegen import codegen
    from evalplus.provider.base import DecoderBase

    asked: list[str] = []

    class Written(DecoderBase):
        def codegen(self, prompt: str, do_sample: bool = True, num_samples: int = 200) -> Sequence[str]:
            asked.append(prompt)
            return texts.get(prompt, [""])

        def is_direct_completion(self) -> bool:
            return True

    with redirect_stdout(StringIO()):
        codegen(str(target), Written(name="tessellm", temperature=0.0), name, greedy=True, resume=False)
    return asked


@contextmanager
def _problems(name: str, lines: Sequence[str]) -> Iterator[Path]:
    """The problems' file, which evalplus reads instead of its own while this lasts."""
    import evalplus.data.humaneval
    import evalplus.data.mbpp

    module: Any = evalplus.data.humaneval if name == "humaneval" else evalplus.data.mbpp
    variable = f"{name.upper()}_OVERRIDE_PATH"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILES[name]
        path.write_text("".join(lines), encoding="utf-8")
        before = getattr(module, variable)
        setattr(module, variable, str(path))
        try:
            yield path
        finally:
            setattr(module, variable, before)


def problem_lines(name: str, data: Path | None) -> list[str]:
    """evalplus' problems, from the folder or as it downloads them."""
    require("evalplus", "eval")
    from evalplus.data import humaneval, mbpp

    check_data(name, data)
    ready = humaneval._ready_human_eval_plus_path if name == "humaneval" else mbpp._ready_mbpp_plus_path
    with downloading(name):
        return _lines(data / FILES[name] if data is not None else Path(ready()))


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.strip()]


def _ids(problems: Path) -> list[str]:
    return [json.loads(line)["task_id"] for line in _lines(problems)]


def check_data(name: str, data: Path | None) -> None:
    """Complain of a folder whose file evalplus could not use."""
    require("evalplus", "eval")
    if data is None:
        return
    path = data / FILES[name]
    if not path.is_file():
        raise PromptError(f"{path} is missing: expected evalplus' problems, one JSON line each")
    for number, line in enumerate(_lines(path), 1):
        entry: Any = None
        with suppress(ValueError):
            entry = json.loads(line)
        missing = [key for key in NEEDED if key not in entry] if isinstance(entry, dict) else list(NEEDED)
        if missing:
            raise PromptError(f"{path}, line {number}: expected a problem of evalplus; it lacks {', '.join(missing)}")
