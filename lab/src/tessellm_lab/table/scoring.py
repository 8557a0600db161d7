"""Samples judged by those who judge the real benchmarks: lm-eval's GSM8K task, evalplus' tests of HumanEval+.

Nothing is generated here. lm-eval and evalplus build their prompts from the problems and are given what was written for
that very prompt; a prompt that nobody was asked is an error. What models wrote runs confined, each text once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessellm.errors import TessellmError, require

from .problems import Problem
from .writing import Sample

METRIC = {"math": "exact_match,flexible-extract", "code": "pass@1,plus", "mixed": "pass@1,plus"}
Scores = dict[tuple[str, str], list[float]]  # by kind and column, in the problems' order


def score(asked: Mapping[str, Sequence[Problem]], samples: Sequence[Sample], workers: int = 2) -> Scores:
    """Every column's scores on one seed's problems."""
    names = list(dict.fromkeys(sample.column for sample in samples))
    found: Scores = {}
    for kind, problems in asked.items():
        texts = {name: _texts(problems, samples, kind, name) for name in names}
        judged = judge_answers(problems, texts) if kind == "math" else judge_functions(problems, texts, workers)
        found |= {(kind, name): scores for name, scores in judged.items()}
    return found


def _texts(problems: Sequence[Problem], samples: Sequence[Sample], kind: str, column: str) -> dict[str, str]:
    """What a column wrote, by prompt."""
    own = {sample.number: sample.text for sample in samples if (sample.kind, sample.column) == (kind, column)}
    if sorted(own) != list(range(len(problems))):
        raise TessellmError(f"{column} has {len(own)} samples of {len(problems)} {kind} problems: write them anew")
    return {problem.prompt: own[number] for number, problem in enumerate(problems)}


def judge_answers(problems: Sequence[Problem], texts: Mapping[str, Mapping[str, str]]) -> dict[str, list[float]]:
    """By lm-eval's own GSM8K task, without examples in the prompt."""
    require("lm_eval", "eval")
    from tessellm.evaluate.protocol import run_task

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.jsonl"
        path.write_text("".join(json.dumps(problem.facts) + "\n" for problem in problems), encoding="utf-8")
        task = gsm8k_task(path, folder)
        lm: Any = _written_lm()
        return {name: run_task(lm(own), task).scores(METRIC["math"]) for name, own in texts.items()}


def gsm8k_task(path: Path, cache: str) -> Any:
    import datasets
    from lm_eval.api.task import ConfigurableTask

    from tessellm.evaluate.tasks import gsm8k

    datasets.disable_progress_bars()
    local = {"dataset_path": "json", "dataset_name": None, "training_split": None, "fewshot_split": None}
    files = {"data_files": {"test": str(path)}, "cache_dir": cache}
    return ConfigurableTask(config={**gsm8k(), **local, "dataset_kwargs": files, "num_fewshot": 0})


def _written_lm() -> type:
    """A model of lm-eval that has written everything before."""
    from lm_eval.api.model import LM

    class Written(LM):
        def __init__(self, texts: Mapping[str, str]):
            super().__init__()
            self.texts = texts

        def entry(self, prompt: str, arguments: dict[str, Any]) -> dict[str, Any]:
            if prompt not in self.texts:
                raise TessellmError(f"lm-eval asks what no model was asked: {prompt!r}")
            text = {"text": self.texts[prompt], "tokens": 0, "finish_reason": None, "error": None}
            return {**text, "seconds": 0.0, "prompt_tokens": 0}

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [self.entry(*request.args)["text"] for request in requests]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            raise NotImplementedError("only texts are kept")

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError("only texts are kept")

    return Written


def judge_functions(
    problems: Sequence[Problem], texts: Mapping[str, Mapping[str, str]], workers: int
) -> dict[str, list[float]]:
    """By evalplus; a text that several columns wrote is run once."""
    from tessellm.evaluate.code_tasks import FILES, judge_texts

    unique = {
        problem.prompt: list(dict.fromkeys(own[problem.prompt] for own in texts.values())) for problem in problems
    }
    with tempfile.TemporaryDirectory() as folder:
        lines = [{"task_id": f"HumanEval/{number}", **problem.facts} for number, problem in enumerate(problems)]
        path = Path(folder) / FILES["humaneval"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        judged = judge_texts("humaneval", Path(folder), unique, workers)
    verdict = {
        (prompt, text): scores[METRIC["code"]]
        for prompt, every in unique.items()
        for text, scores in zip(every, judged[prompt], strict=True)
    }
    return {name: [verdict[problem.prompt, own[problem.prompt]] for problem in problems] for name, own in texts.items()}
