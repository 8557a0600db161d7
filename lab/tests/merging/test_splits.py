"""Development problems are never test problems, nor worked examples of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessellm.errors import PromptError
from tessellm.evaluate import code_tasks
from tessellm.evaluate.runner import Runner
from tessellm.evaluate.tasks import make_task, text_column
from tessellm_lab.merging.splits import Part, check, draw, remaining, take, take_lines

DATA = Path(__file__).resolve().parents[3] / "tests" / "evaluate" / "data"
TEXTS = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=20)


def made(name: str, part: Part) -> Any:
    return take(make_task(name, DATA), part, text_column(name))


def prompts(task: Any) -> list[str]:
    task.build_all_requests()
    return [instance.args[0] for instance in task.instances]


@given(TEXTS, st.integers(1, 30), st.integers(0, 5))
def test_problems_set_aside_are_in_no_test(texts: list[str], develop: int, seed: int) -> None:
    found = draw(texts, "test", Part(develop, seed))
    developed, tested = [texts[place] for place in found.places], [texts[n] for n in remaining(texts, found)]
    assert not set(developed) & set(tested)
    assert set(developed) | set(tested) == set(texts)
    assert 1 <= len(developed) <= max(1, len(texts) // 4)
    assert found == draw(texts, "test", Part(develop, seed))


@given(TEXTS, TEXTS, st.integers(1, 30))
def test_training_problems_that_are_test_problems_too_are_not_drawn(
    texts: list[str], tested: list[str], develop: int
) -> None:
    if set(texts) <= set(tested):
        with pytest.raises(PromptError, match="there are no problems to develop on"):
            draw(texts, "train", Part(develop), tested)
        return
    found = draw(texts, "train", Part(develop), tested)
    assert not {texts[place] for place in found.places} & set(tested)
    assert len(found.places) == min(develop, sum(text not in tested for text in texts))


def test_gsm8k_develops_on_its_training_split_and_is_tested_as_published() -> None:
    training = [json.loads(line)["question"] for line in (DATA / "gsm8k" / "train.jsonl").read_text().splitlines()]
    development = made("gsm8k", Part(2, development=True))
    asked = [doc["question"] for doc in development.eval_docs]
    assert len(asked) == 2
    assert set(asked) <= set(training)
    for prompt, question in zip(prompts(development), asked, strict=True):
        assert prompt.count("Question: ") == 9
        assert all(prompt.count(f"Question: {other}\n") == (other == question) for other in asked)
    stored = json.loads((DATA / "prompts" / "gsm8k.json").read_text(encoding="utf-8"))
    assert prompts(made("gsm8k", Part(2))) == [prompt for prompt, _ in stored]


def test_a_task_without_a_training_split_sets_problems_aside() -> None:
    every = [doc["problem"] for doc in make_task("math", DATA).eval_docs]
    developed, tested = (
        [doc["problem"] for doc in made("math", Part(2, development=flag)).eval_docs] for flag in (True, False)
    )
    assert (len(developed), len(tested)) == (1, 3)  # at most a quarter
    assert sorted(developed + tested) == sorted(every)
    assert prompts(made("math", Part(2, development=True)))[0].endswith(f"{developed[0]}\n\nSolution:")
    lines = code_tasks.problem_lines("humaneval", DATA)
    assert sorted(take_lines(lines, Part(1, development=True)) + take_lines(lines, Part(1))) == sorted(lines)


def test_examples_of_the_tested_split_are_left_when_problems_are_set_aside(tmp_path: Path) -> None:
    """A task of lm-eval's kind that is tested on its validation split and takes its examples from there."""
    from lm_eval.api.task import ConfigurableTask

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {n}", "answer": str(n)}) + "\n" for n in range(8)))

    def numbers(part: Part) -> Any:
        config = {
            "task": "numbers",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"validation": str(path)}},
            "validation_split": "validation",
            "fewshot_split": "validation",
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"]},
            "num_fewshot": 3,
        }
        task = ConfigurableTask(config=config)
        task.set_fewshot_seed(0)
        return take(task, part)

    developed = [doc["text"] for doc in numbers(Part(2, development=True)).eval_docs]
    assert len(developed) == 2
    for prompt in prompts(numbers(Part(2))):
        assert not any(text in prompt for text in developed)
    for prompt, own in zip(prompts(numbers(Part(2, development=True))), developed, strict=True):
        assert [text for text in developed if text in prompt] == [own]


def test_what_cannot_be_split_is_named_before_anything_runs() -> None:
    with pytest.raises(PromptError, match=r"gsm8k needs 8 worked examples, and 5 of the 10 .* 5 are left"):
        check(Runner(DATA), ("gsm8k",), Part(5))
    with pytest.raises(PromptError, match="the test split has 1, 1 of them usable"):
        draw(["only one"], "test", Part(1))
    found = check(Runner(DATA), ("gsm8k", "mbpp"), Part(2))
    assert str(found["gsm8k"]) == "2 of the 10 of its train split"
    assert str(found["mbpp"]) == "1 set aside from the 2 of its test split"
