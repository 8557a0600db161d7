"""The tasks that lm-eval runs: GSM8K as it has it, with eight examples; MATH as ours; any other by its name.

Data come from the hub, or, where a folder is given, from its files: FOLDER/gsm8k/train.jsonl, FOLDER/math/test.jsonl …
in the datasets' own formats. Prompts are built by lm-eval.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

from ..errors import PromptError
from . import answers

NEW_TOKENS = 512
FEWSHOT_SEED = 1234  # lm-eval's own
COLUMNS = {"gsm8k": ("question", "answer"), "math": ("problem", "solution")}  # that the data must have
HEADLINE = {"gsm8k": "exact_match,flexible-extract", "math": "equal,none"}  # the metric that the table shows
GREEDY = {"do_sample": False, "temperature": 0.0, "max_gen_toks": NEW_TOKENS}

MATH_EXAMPLES = [
    {
        "problem": "Compute $2^{10}$.",
        "solution": "We have $2^5 = 32$, and $2^{10} = (2^5)^2 = 32^2 = 1024$. The answer is $\\boxed{1024}$.",
    },
    {
        "problem": "Simplify $\\frac{x^2-1}{x-1}$ for $x \\neq 1$.",
        "solution": "The numerator factors as $x^2-1 = (x-1)(x+1)$. Since $x \\neq 1$, we may divide by $x-1$, which "
        "leaves $x+1$. The answer is $\\boxed{x+1}$.",
    },
]


def make_task(name: str, data: Path | None = None) -> Any:
    """A task of lm-eval, ready to be asked for its problems."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    if name not in COLUMNS:
        with downloading(name):
            return _by_name(name)
    config = gsm8k() if name == "gsm8k" else math()
    if data is not None:
        config |= _local(name, data)
    datasets.disable_progress_bars()
    with downloading(name):
        task = ConfigurableTask(config=config)
    task.set_fewshot_seed(FEWSHOT_SEED)
    return task


@contextmanager
def downloading(name: str) -> Iterator[None]:
    """A task's data come from elsewhere while this lasts; one message, if that cannot be reached."""
    try:
        yield
    except (ConnectionError, URLError) as error:
        raise PromptError(
            f"the data of the task {name!r} cannot be reached ({error}). Check the network, HF_ENDPOINT and "
            "HF_HUB_OFFLINE, or give local files with --data FOLDER (gsm8k, math, humaneval and mbpp: docs/evaluate.md)"
        ) from error


def text_column(name: str) -> str | None:
    """The column that holds a problem's text, where we know it."""
    return COLUMNS[name][0] if name in COLUMNS else None


def gsm8k() -> dict[str, Any]:
    """lm-eval's own task; eight examples, the paper's number of new tokens."""
    import lm_eval
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml")
    return {**config, "num_fewshot": 8, "generation_kwargs": {**config["generation_kwargs"], **GREEDY}}


def math() -> dict[str, Any]:
    """MATH with two worked examples; boxed answers, compared as mathematics and as the paper did."""
    return {
        "task": "math",
        "dataset_path": "DigitalLearningGmbH/MATH-lighteval",
        "dataset_name": "default",
        "output_type": "generate_until",
        "training_split": "train",
        "test_split": "test",
        "doc_to_text": "Problem:\n{{problem}}\n\nSolution:",
        "doc_to_target": "{{solution}}",
        "target_delimiter": "\n",
        "fewshot_delimiter": "\n\n",
        "fewshot_config": {"sampler": "first_n", "samples": MATH_EXAMPLES},
        "num_fewshot": len(MATH_EXAMPLES),
        "generation_kwargs": {"until": ["Problem:"], **GREEDY},
        "process_results": judge_math,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("equal", "as_published")
        ],
        "metadata": {"version": 1.0},
    }


def judge_math(doc: Mapping[str, str], results: list[str]) -> dict[str, int]:
    """One solution against the dataset's."""
    return {
        "equal": int(answers.equal(answers.boxed(results[0]), answers.boxed(doc["solution"]))),
        "as_published": int(answers.equal_as_published(results[0], doc["solution"])),
    }


def _local(name: str, data: Path) -> dict[str, Any]:
    files = {split: data / name / f"{split}.jsonl" for split in ("train", "test")}
    found = {split: str(path) for split, path in files.items() if path.is_file()}
    needed = ("train", "test") if name == "gsm8k" else ("test",)  # GSM8K's examples come from its training split
    for split in needed:
        if split not in found:
            raise PromptError(f"{files[split]} is missing: expected JSON lines with {' and '.join(COLUMNS[name])}")
    for path in found.values():
        _check_columns(Path(path), COLUMNS[name])
    splits: dict[str, Any] = {} if "train" in found else {"training_split": None}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": found}, **splits}


def _check_columns(path: Path, columns: tuple[str, ...]) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise PromptError(f"{path}, line {number}: no valid JSON ({error})") from error
        if not isinstance(entry, dict) or not all(isinstance(entry.get(column), str) for column in columns):
            raise PromptError(f"{path}, line {number}: expected the texts {' and '.join(columns)}")


def _by_name(name: str) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name not in manager.all_subtasks:
        raise PromptError(
            f"unknown task {name!r}. Known: {', '.join(COLUMNS)}, humaneval, mbpp, and lm-eval's own single tasks "
            "(`lm_eval ls subtasks`)"
        )
    task = manager.load([name])["tasks"][name]
    task.set_fewshot_seed(FEWSHOT_SEED)
    return task
