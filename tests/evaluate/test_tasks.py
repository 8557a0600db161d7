"""GSM8K and MATH through lm-eval's own code, on small local data in the datasets' formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tessellm
from tessellm.errors import PromptError
from tessellm.evaluate.harness import ComposedLM
from tessellm.evaluate.protocol import run_task
from tessellm.evaluate.tasks import HEADLINE, MATH_EXAMPLES, make_task

from conftest import build_model, character_tokenizer, perturbed

DATA = Path(__file__).parent / "data"
WRITTEN = {  # what a model could have written, and how it must be judged
    "gsm8k": [
        ("It is 2 * 13 = 26 meters.\n#### 26", {"exact_match,strict-match": 1, "exact_match,flexible-extract": 1}),
        ("They are 1,750 pages", {"exact_match,strict-match": 0, "exact_match,flexible-extract": 1}),
        ("So it was 5 degrees.\n#### 5", {"exact_match,strict-match": 0, "exact_match,flexible-extract": 0}),
    ],
    "math": [
        (r"It is $\boxed{\frac{22}{24}}$.", {"equal,none": 1, "as_published,none": 0}),
        (r"So $x = \boxed{\pm\sqrt{5}}$.", {"equal,none": 1, "as_published,none": 0}),
        (r"$\boxed{[2,11]}$", {"equal,none": 1, "as_published,none": 1}),
        (r"$\boxed{90000}$ seconds", {"equal,none": 0, "as_published,none": 0}),
    ],
}


@pytest.fixture(scope="module")
def model() -> Any:
    base = build_model("llama", 0, max_position_embeddings=4096)
    return tessellm.compose(base, {"math": perturbed(base, 1)}, rule="product", tokenizer=character_tokenizer())


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_prompts_are_the_stored_ones_character_by_character(name: str) -> None:
    task = make_task(name, DATA)
    task.build_all_requests()
    found = [[instance.args[0], instance.args[1]] for instance in task.instances]
    assert found == json.loads((DATA / "prompts" / f"{name}.json").read_text(encoding="utf-8"))


def test_stored_prompts_are_what_the_papers_protocol_says() -> None:
    """Put together by hand: eight training problems and the question; two worked examples and the problem."""

    def rows(path: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (DATA / path).read_text(encoding="utf-8").splitlines()]

    def prompts(name: str) -> list[str]:
        return [prompt for prompt, _ in json.loads((DATA / "prompts" / f"{name}.json").read_text(encoding="utf-8"))]

    known = {f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows("gsm8k/train.jsonl")}
    for prompt, row in zip(prompts("gsm8k"), rows("gsm8k/test.jsonl"), strict=True):
        *examples, last = prompt.split("\n\n")
        assert last == f"Question: {row['question']}\nAnswer:"
        assert len(set(examples)) == 8
        assert set(examples) <= known
    worked = "".join(f"Problem:\n{e['problem']}\n\nSolution:\n{e['solution']}\n\n" for e in MATH_EXAMPLES)
    for prompt, row in zip(prompts("math"), rows("math/test.jsonl"), strict=True):
        assert prompt == f"{worked}Problem:\n{row['problem']}\n\nSolution:"


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_what_was_written_is_judged_by_lm_eval(name: str, model: Any) -> None:
    task, lm = make_task(name, DATA), ComposedLM(model)
    task.build_all_requests()
    for instance, (text, _) in zip(task.instances, WRITTEN[name], strict=True):
        told = {"text": text, "tokens": 7, "finish_reason": "stop", "error": None, "seconds": 1.0, "prompt_tokens": 9}
        lm.journal.add(lm._key(*instance.args), **told)
    outcome = run_task(lm, make_task(name, DATA))
    assert [problem.scores for problem in outcome.problems] == [judged for _, judged in WRITTEN[name]]
    assert [problem.text for problem in outcome.problems] == [text for text, _ in WRITTEN[name]]
    assert outcome.scores(HEADLINE[name]) == [judged[HEADLINE[name]] for _, judged in WRITTEN[name]]


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_a_composition_runs_end_to_end(name: str, model: Any) -> None:
    task, lm = make_task(name, DATA), ComposedLM(model)
    task.config.generation_kwargs["max_gen_toks"] = 6
    outcome = run_task(lm, task, limit=2)
    assert [problem.id for problem in outcome.problems] == ["0", "1"]
    assert all(problem.error is None and 0 < problem.tokens <= 6 for problem in outcome.problems)
    assert all(problem.prompt_tokens > 100 for problem in outcome.problems)


def test_data_that_cannot_be_reached_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PromptError, match=r"the data of the task 'gsm8k' cannot be reached .* --data FOLDER"):
        make_task("gsm8k")


def test_bad_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"train\.jsonl is missing: expected JSON lines with question and answer"):
        make_task("gsm8k", tmp_path)
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "test.jsonl").write_text('{"problem": "?"}\n')
    with pytest.raises(PromptError, match=r"line 1: expected the texts problem and solution"):
        make_task("math", tmp_path)
