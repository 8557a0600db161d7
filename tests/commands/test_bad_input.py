"""Everything that the user can get wrong, through the command line: one clear message, exit 2, nothing half-written."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import tessellm

from conftest import build_model, character_tokenizer, perturbed, save_lora, save_member


class Case(NamedTuple):
    """What is wrong with the folder, what is run there, and what the message has to say."""

    spoil: Callable[[Path], object]
    command: str
    says: tuple[str, ...]


def recipe(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "recipe.yaml").write_text(text)


def cut(name: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return spoil


def pickled(folder: Path) -> None:
    (folder / "math" / "model.safetensors").unlink()
    torch.save({}, folder / "math" / "pytorch_model.bin")


def adapter_of_another_base(folder: Path) -> None:
    other = save_member(perturbed(AutoModelForCausalLM.from_pretrained(folder / "base"), 8), folder / "other")
    save_lora(other, folder / "stranger")
    recipe("base: ./base\nexperts: {x: ./stranger}")(folder)


def other_vocabulary(folder: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<think>", "<answer>"])
    grown = AutoModelForCausalLM.from_pretrained(folder / "math")
    grown.resize_token_embeddings(66, mean_resizing=False)
    save_member(grown, folder / "math", tokenizer)


def taken(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "thesis.tex").write_text("mine")


def prompts(text: str | bytes, name: str = "p.jsonl") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def nothing(folder: Path) -> None:
    """The command itself is wrong."""


COMPOSE = "compose recipe.yaml -o out"
BAD: dict[str, Case] = {
    "no recipe": Case(nothing, "compose nowhere.yaml -o out", ("nowhere.yaml cannot be read: No such file",)),
    "missing member": Case(
        recipe("base: ./base\nexperts: {math: ./maths}"),
        COMPOSE,
        (
            "member 'math': there is no folder",
            "maths",
            "Expected the folder of a checkpoint or adapter, a GGUF file, or a hub id",
        ),
    ),
    "missing repository, offline": Case(
        recipe("base: team/no-such-model\nexperts: {math: ./math}"),
        COMPOSE,
        ("member 'base': team/no-such-model is no folder here", "HF_HUB_OFFLINE"),
    ),
    "misspelt key": Case(
        recipe("base: ./base\nexperts: {math: {source: ./math, wieght: 1}}"),
        COMPOSE,
        ("unknown key 'experts.math.wieght'; did you mean 'weight'?",),
    ),
    "NaN weight": Case(
        recipe("base: ./base\nexperts: {math: {source: ./math, weight: .nan}}"),
        COMPOSE,
        ("experts.math.weight: expected a finite number; got nan",),
    ),
    "unknown rule": Case(
        recipe("base: ./base\nexperts: {math: ./math}\nrule: produkt"), COMPOSE, ("did you mean 'product'?",)
    ),
    "adapter for another base": Case(
        adapter_of_another_base, COMPOSE, ("member 'x': the adapter was trained on", "any_base: true")
    ),
    "differing vocabularies": Case(other_vocabulary, COMPOSE, ("'<think>'", "Fix:")),
    "pickled weights": Case(pickled, COMPOSE, ("pickles (pytorch_model.bin)", "Only safetensors are read")),
    "member cut off": Case(cut("math/model.safetensors"), COMPOSE, ("member 'math'", "is cut off or damaged")),
    "member's config cut off": Case(
        cut("math/config.json"), COMPOSE, ("member 'math'", "config.json is cut off or damaged")
    ),
    "target taken": Case(taken, COMPOSE, ("exists and holds something else. Choose another name",)),
    "target inside a file": Case(nothing, "compose recipe.yaml -o recipe.yaml/out", ("that is a file",)),
    "no composition": Case(nothing, "generate base hi", ("a model of type 'llama'", "or a recipe")),
    "no such composition": Case(nothing, "generate ./nowhere hi", ("the composition: there is no folder ./nowhere",)),
    "composition cut off": Case(cut("done/model.safetensors"), "generate done hi", ("is cut off",)),
    "composition's member cut off": Case(
        cut("done/members/math/own-00001.safetensors"), "generate done hi", ("member 'math'", "is cut off")
    ),
    "composition's config cut off": Case(cut("done/config.json"), "generate done hi", ("config.json is cut off",)),
    "linked member gone": Case(
        lambda folder: shutil.rmtree(folder / "math"),
        "generate linked hi",
        ("member 'math' is missing", "Move it back"),
    ),
    "linked member changed": Case(
        lambda folder: shutil.copy(folder / "base" / "model.safetensors", folder / "math"),
        "generate linked hi",
        ("member 'math' has changed since it was composed",),
    ),
    "no prompt": Case(nothing, "generate done", ("no prompt was given",)),
    "empty prompt": Case(
        lambda folder: prompts('""', "p.jsonl")(folder), "generate done --file p.jsonl", ("is empty",)
    ),
    "prompt too long": Case(
        prompts("x" * 200, "p.txt"),
        "generate done --file p.txt --no-chat",
        (
            "prompt 1 has 200 tokens",
            "room for 128 with what follows (the shortest context among the members)",
            "Shorten it",
        ),
    ),
    "prompt and answer too long": Case(
        nothing, "generate done hi --no-chat --max-new-tokens 127", ("2 tokens and up to 127 more", "--max-new-tokens")
    ),
    "prompts not there": Case(nothing, "generate done --file p.jsonl", ("p.jsonl cannot be read: No such file",)),
    "prompts not JSON": Case(
        prompts('{"prompt": "a"}\n{'), "generate done --file p.jsonl", ("p.jsonl, line 2: no valid JSON",)
    ),
    "prompts without the key": Case(
        prompts('{"text": "a"}'), "generate done --file p.jsonl", ('p.jsonl, line 1: expected {"prompt": "…"}',)
    ),
    "prompts not a list": Case(prompts("{}", "p.json"), "generate done --file p.json", ("expected a list; got dict",)),
    "prompts not text": Case(prompts(b"\xff\xf0", "p.txt"), "generate done --file p.txt", ("it is not UTF-8 text",)),
    "prompts in UTF-16": Case(
        prompts('"ab"\n"cd"'.encode("utf-16")), "diagnose done p.jsonl", ("it is UTF-16 text. Save it as UTF-8",)
    ),
    "prompts in UTF-16 without its mark": Case(
        prompts("ab\ncd".encode("utf-16-le"), "p.txt"), "tune done p.txt", ("it is UTF-16 text",)
    ),
    "a file without prompts": Case(prompts("\n", "p.txt"), "generate done --file p.txt", ("p.txt holds no prompts",)),
    "a file without texts": Case(prompts("\n", "dev.txt"), "tune done dev.txt", ("dev.txt holds no texts",)),
    "a weight past what float32 holds": Case(
        recipe("base: ./base\nexperts: {math: {source: ./math, weight: 1e30}}"), COMPOSE, ("within ±1,000,000; got 1e",)
    ),
    "no chat template": Case(
        lambda folder: (folder / "done" / "chat_template.jinja").unlink(),
        "generate done hi --chat",
        ("no member has a chat template; leave out --chat",),
    ),
    "no chat template, and a system prompt": Case(
        lambda folder: (folder / "done" / "chat_template.jinja").unlink(),
        "generate done hi --system Be",
        ("no member has a chat template; leave out --chat and --system",),
    ),
    "a rule that there is not": Case(
        nothing, "generate done hi --rule prodct", ("there is no rule 'prodct'; did you mean 'product'?",)
    ),
    "a weight of no expert": Case(
        nothing, "generate done hi --weights mth=1", ("there is no expert 'mth'; did you mean 'math'?",)
    ),
    "a weight without a name": Case(
        nothing, "generate done hi --weights 0.5", ("--weights: expected NAME=NUMBER", "such as math=0.5", "got '0.5'")
    ),
    "a weight given twice": Case(nothing, "generate done hi --weights math=1,math=2", ("got 'math' twice",)),
    "a weight that is no number": Case(nothing, "generate done hi --weights math=nan", ("got 'math=nan'",)),
    "a weight past all bounds": Case(
        nothing, "generate done hi --weights math=1e9", ("expected a weight within ±1e+06",)
    ),
    "no weights": Case(nothing, "generate done hi --weights ,", ("--weights: expected NAME=NUMBER", "got ','")),
    "a member that there is not": Case(
        nothing, "generate done:mth hi", ("there is no model 'done:mth'; did you mean 'done:math'?",)
    ),
    "a rule for a member": Case(
        nothing,
        "generate done:math hi --rule product",
        ("'done:math' is a member and speaks alone: rules and weights",),
    ),
    "a member traced": Case(nothing, "generate done:math hi --trace", ("speaks alone", "such as done")),
    "a member diagnosed": Case(
        prompts("hi", "prompts.txt"), "diagnose done:math prompts.txt", ("speaks alone", "how members go together")
    ),
    "a member tuned": Case(prompts("hi", "dev.txt"), "tune done:math dev.txt", ("weights are of several experts",)),
    "texts without prompts in a chat": Case(
        prompts("hi", "dev.txt"), "tune done dev.txt --rule product --chat", ("text 1 has no prompt", "Give one")
    ),
    "a block size that no kernel of vLLM's takes": Case(
        nothing,
        "serve done --engine vllm -- --block-size 7",
        ("--block-size: expected tokens per block in multiples of 16; got 7",),
    ),
    "the same in one word": Case(nothing, "serve done --engine vllm -- --block_size=0", ("multiples of 16; got 0",)),
    "chat template cut off": Case(
        lambda folder: (folder / "done" / "chat_template.jinja").write_text("{% for m in"),
        "generate done hi --chat",
        ("the chat template does not take these messages", "say --no-chat"),
    ),
    "composition's generation settings cut off": Case(
        cut("done/generation_config.json"),
        "generate done hi",
        ("generation_config.json is missing, cut off or damaged",),
    ),
    "unknown dtype": Case(nothing, "generate done hi --dtype bfloat15", ("did you mean 'bfloat16'?",)),
    "unknown device": Case(nothing, "generate done hi --device tpu7", ("member 'base'", "tpu7")),
    "answers into a folder": Case(nothing, "generate done hi --json base", ("base could not be written: it is a",)),
    "answers where nothing can be made": Case(
        nothing, "generate ./nowhere hi --json /proc/none/a.json", ("a.json could not be written: No such file",)
    ),
    "answers inside a file": Case(
        nothing, "probe ./nowhere none --json recipe.yaml/a.json", ("a.json could not be written: Not a directory",)
    ),
    "answers under a name too long": Case(nothing, f"inspect ./nowhere --json {'n' * 300}", ("File name too long",)),
    "a report into a folder": Case(nothing, "diagnose ./nowhere none -o base", ("base could not be written",)),
    "too cold to sample": Case(
        nothing, "generate done hi --temperature 1e-40", ("a temperature of 0, which decodes greedily", "got 1e-40")
    ),
    "too hot to sample": Case(nothing, "generate done hi --temperature inf", ("got inf",)),
    "texts too short": Case(
        prompts("a\nb", "dev.txt"), "tune done dev.txt --rule product", ("texts of at least two tokens",)
    ),
    "prompt of a text no text": Case(
        prompts('{"prompt": 3, "text": "a"}', "dev.jsonl"), "tune done dev.jsonl", ('line 1: expected {"prompt"',)
    ),
    "text too long": Case(
        prompts("x" * 200, "dev.txt"), "tune done dev.txt --rule product", ("text 1 has 200 tokens",)
    ),
    "tuned into another folder": Case(
        prompts("abc", "dev.txt"), "tune done dev.txt --save base", ("holds something else",)
    ),
}


@pytest.fixture(scope="module")
def prepared(members_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "prepared"
    shutil.copytree(members_dir, folder, ignore=shutil.ignore_patterns("lora_*"))
    recipe("base: ./base\nexperts: {math: ./math, coding: ./coding}")(folder)
    model = tessellm.compose(folder / "base", {"math": folder / "math", "coding": folder / "coding"})
    model.save_pretrained(folder / "done", self_contained=True)
    model.save_pretrained(folder / "linked")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", BAD)
def test_one_message_exit_two_nothing_written(
    name: str, cli: Any, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = BAD[name]
    folder = Path(shutil.copytree(prepared, tmp_path / "here"))
    monkeypatch.chdir(folder)
    case.spoil(folder)
    before = contents(tmp_path)
    ran = cli(*case.command.split())
    assert ran.code == 2, ran
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == (4 if name == "differing vocabularies" else 1)
    assert "Traceback" not in ran.err
    for part in case.says:
        assert part in ran.err
    assert ran.out == ""
    assert contents(tmp_path) == before


def test_a_full_disk(cli: Any, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "here"))
    before = contents(tmp_path)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, unlimited[1]))
    try:
        ran = cli("compose", "recipe.yaml", "-o", "new/out", "--self-contained")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert ran.code == 2
    assert "out could not be written" in ran.err
    assert "File too large" in ran.err
    assert ran.err.count("\n") == 1
    assert contents(tmp_path) == before
    assert not Path("new").exists()


@pytest.mark.parametrize(
    "arguments", ["compose recipe.yaml -o /sys/out", "diagnose out prompts.txt --max-new-tokens 2 -o /sys/report.html"]
)
def test_where_nothing_can_be_written(
    cli: Any, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "here"))
    Path("prompts.txt").write_text("abc\n")
    assert cli("compose", "recipe.yaml", "-o", "out").code == 0
    ran = cli(*arguments.split())
    assert ran.code == 2
    assert "not permitted" in ran.err or "Permission denied" in ran.err or "Read-only" in ran.err
    assert "/sys/" in ran.err
    assert "Traceback" not in ran.err


def test_members_with_different_end_tokens_are_composed_with_a_note(
    cli: Any, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(prepared, tmp_path / "here"))
    monkeypatch.chdir(folder)
    save_member(build_model("llama", 5, eos_token_id=7), folder / "math", character_tokenizer())
    ran = cli("compose", "recipe.yaml", "-o", "out")
    assert ran.code == 0
    assert "math" in next(line for line in ran.err.splitlines() if "end" in line)
    assert set(json.loads((folder / "out" / "generation_config.json").read_text())["eos_token_id"]) == {2, 7}
