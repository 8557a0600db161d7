"""The command line: compose, inspect, generate, tune; in this process where it can be, as a real process where not."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.commands.shared import readable_size

from conftest import CONTEXT, character_tokenizer, press_ctrl_c, told_to_end

Cli = Callable[..., Any]


@pytest.fixture
def recipe(own_members: Path) -> Path:
    path = own_members / "recipe.yaml"
    path.write_text("base: ./base\nexperts: {math: ./math, coding: {source: ./coding, weight: 0.5}}\n")
    return path


@pytest.fixture(scope="module")
def out(members_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A composition to read."""
    folder = tmp_path_factory.mktemp("compositions") / "out"
    experts = {"math": members_dir / "math", "lora": {"source": members_dir / "lora_math", "weight": 0.5}}
    tessellm.compose(members_dir / "base", experts, rule="product").save_pretrained(folder, self_contained=True)
    return folder


def expected(folder: Path, prompt: str, new: int, **options: Any) -> str:
    """What `generate` should say, by Hugging Face's own means."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = model.tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**ids, max_new_tokens=new, do_sample=False, **options)[0, ids["input_ids"].shape[1] :]
    return model.tokenizer.decode(tokens, skip_special_tokens=True)


def test_compose(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    ran = cli("compose", recipe, "-o", tmp_path / "linked", "--json", tmp_path / "deep" / "report.json")
    assert ran.code == 0
    assert ran.out == f"composed math, coding on their base → {tmp_path / 'linked'}\n"
    assert "note: The chat template is that of 'base'." in ran.err
    report = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert [member["name"] for member in report["members"]] == ["base", "math", "coding"]
    assert cli("compose", recipe, "-o", tmp_path / "whole", "--self-contained").code == 0
    assert not (tmp_path / "linked" / "members").exists()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert modes == {recipe.stat().st_mode & 0o777}  # as any other file's
    assert (tmp_path / "whole" / "members" / "math").is_dir()
    texts = {expected(tmp_path / name, "abc", 8) for name in ("linked", "whole")}
    assert len(texts) == 1


def test_inspect(cli: Cli, out: Path, recipe: Path, tmp_path: Path) -> None:
    ran = cli("inspect", out, "--json", tmp_path / "report.json")
    assert (ran.code, ran.err) == (0, "")
    for shown in ("lora", "adapter", "0.5", "Llama", "22,688", "float32", "128", "2 '</s>'", "Eq. 2", "sharing saves"):
        assert shown in ran.out
    assert "note: Every member ends with '</s>' (id 2)." in ran.out  # agreed when it was composed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["shared_bytes"] > 0.9 * 4 * 22_688
    added = [member["added_bytes"] for member in report["members"]]
    assert sum(added) == report["bytes"]
    assert added[2] < 0.2 * added[0]  # an adapter
    ran = cli("inspect", recipe)
    assert ran.code == 0
    assert "coding" in ran.out


def test_inspect_fits_eighty_columns(cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessellm.commands.shared.out._width", 80)
    table = cli("inspect", out).out.split("base: ")[0]
    assert "…" not in table
    assert "parameters" in table


def test_one_prompt_is_streamed(cli: Cli, out: Path, tmp_path: Path) -> None:
    ran = cli("generate", out, "abc", "--max-new-tokens", 20, "--json", tmp_path / "text.json")
    text = expected(out, "abc", 20)
    assert (ran.code, ran.out, ran.err) == (0, text + "\n", "")
    [result] = json.loads((tmp_path / "text.json").read_text())
    assert (result["prompt"], result["text"]) == ("abc", text)
    assert len(text) <= result["tokens"] <= 20  # one token a character; special ones are not shown
    assert result["finish_reason"] == ("length" if result["tokens"] == 20 else "stop")


def test_as_many_new_tokens_as_there_is_room_for(cli: Cli, out: Path, tmp_path: Path) -> None:
    prompt = "abc" * 40
    assert cli("generate", out, prompt, "--json", tmp_path / "json").code == 0
    [result] = json.loads((tmp_path / "json").read_text())
    assert result["text"] == expected(out, prompt, CONTEXT - 120)
    asked = cli("generate", out, prompt, "--max-new-tokens", 20)
    assert (asked.code, asked.out) == (2, "")
    assert "up to 20 more were asked for" in asked.err


def test_a_batch_says_what_each_prompt_says_alone(cli: Cli, out: Path, tmp_path: Path) -> None:
    prompts = ["abc", "a longer prompt", "x", "1+1=", "yes"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": p, "id": 3}) for p in prompts) + "\n\n")
    (tmp_path / "prompts.txt").write_text("\r\n".join(prompts) + "\n")
    (tmp_path / "prompts.json").write_text(json.dumps(prompts, indent=2))
    texts = [expected(out, prompt, 6) for prompt in prompts]
    for name in ("prompts.jsonl", "prompts.txt", "prompts.json"):
        ran = cli(
            *("generate", out, "--file", tmp_path / name, "--max-new-tokens", 6, "--batch-size", 2),
            *("--json", tmp_path / "out.json"),
        )
        assert ran.code == 0
        results = json.loads((tmp_path / "out.json").read_text())
        assert [result["prompt"] for result in results] == prompts
        assert [result["text"] for result in results] == texts
        assert ran.out == "".join(p + text + "\n" for p, text in zip(prompts, texts, strict=True))


def test_stop_texts(cli: Cli, out: Path, tmp_path: Path) -> None:
    text = expected(out, "abc", 20)
    stop = text[6:8]
    cut = text[: text.index(stop)]
    ran = cli(
        "generate", out, "abc", "--max-new-tokens", 20, "--stop", stop, "--stop", "never", "--json", tmp_path / "a"
    )
    assert ran.out == cut + "\n"
    [result] = json.loads((tmp_path / "a").read_text())
    assert (result["text"], result["finish_reason"]) == (cut, "stop")
    assert result["tokens"] < 20
    cli("generate", out, "abc", "xyz", "--max-new-tokens", 20, "--stop", stop, "--json", tmp_path / "b")
    both = json.loads((tmp_path / "b").read_text())
    assert both[0]["text"] == cut
    assert both[0]["tokens"] == result["tokens"]  # padding after the stop is not counted


def test_sampling_is_reproducible_and_the_seed_matters(cli: Cli, out: Path) -> None:
    def sample(seed: int) -> str:
        settings = ("--temperature", 1.5, "--top-p", 0.95, "--seed", seed, "--max-new-tokens", 30)
        return cli("generate", out, "abc", *settings).out

    assert sample(1) == sample(1) != sample(2)


def test_options_of_sampling_are_said_to_be_of_no_use_without_a_temperature(cli: Cli, out: Path) -> None:
    ran = cli("generate", out, "abc", "--max-new-tokens", 4, "--top-p", 0.5, "--seed", 3)
    assert (ran.code, ran.out) == (0, expected(out, "abc", 4) + "\n")
    assert ran.err == "note: --top-p and --seed do nothing without --temperature: greedy decoding draws nothing\n"


@pytest.mark.parametrize("closed", [None, io.StringIO()])
def test_standard_input_that_is_closed_is_one_message(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch, closed: io.StringIO | None
) -> None:
    if closed is not None:
        closed.close()
    monkeypatch.setattr(sys, "stdin", closed)
    ran = cli("generate", out, "-")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: standard input is closed. Expected a prompt there")


def test_chat_and_standard_input(cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = cli("generate", out, "hi", "--chat", "--max-new-tokens", 8)
    assert ran.out == expected(out, "u: hi\na: ", 8) + "\n"
    (tmp_path / "typed").write_text("abc")
    with (tmp_path / "typed").open() as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        assert cli("generate", out, "-", "--max-new-tokens", 8).out == expected(out, "abc", 8) + "\n"


def test_dtype_and_device(cli: Cli, out: Path, recipe: Path) -> None:
    for model in (out, recipe):
        ran = cli("generate", model, "abc", "--max-new-tokens", 4, "--dtype", "bfloat16", "--device", "cpu")
        assert ran.code == 0


def test_end_tokens_end_the_text(cli: Cli, tmp_path: Path, members_dir: Path) -> None:
    experts = {"math": members_dir / "math", "lora": {"source": members_dir / "lora_math", "weight": 0.5}}
    ended: Any = tessellm.compose(members_dir / "base", experts)
    assert ended.config.eos_token_id == [2]
    ids = ended.tokenizer("abc", return_tensors="pt")
    written = ended.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    ended.generation_config.eos_token_id = ended.config.eos_token_id = [2, written[5]]
    ended.save_pretrained(tmp_path / "ended")
    cli("generate", tmp_path / "ended", "abc", "--no-chat", "--max-new-tokens", 8, "--json", tmp_path / "json")
    [result] = json.loads((tmp_path / "json").read_text())
    kept = written[: written.index(written[5])]
    assert result["finish_reason"] == "stop"
    assert result["text"] == ended.tokenizer.decode(kept, skip_special_tokens=True)
    assert result["tokens"] == len(kept)


def test_tune(cli: Cli, out: Path, tmp_path: Path) -> None:
    texts, save = ["abc abc", "1+1=2", "x", "hello world", "more text"], ("--json", tmp_path / "tuning.json")
    (tmp_path / "dev.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    ran = cli("tune", out, tmp_path / "dev.jsonl", "--rule", "product", "--save", tmp_path / "tuned", *save)
    assert ran.code == 0, ran.err
    assert "1 texts were left out" in ran.err
    assert "held out:" in ran.out
    tuning = json.loads((tmp_path / "tuning.json").read_text())
    assert tuning["candidates"]["1 each"] == dict.fromkeys(tuning["weights"], 1.0)
    assert ("do not help the texts held out" in ran.err) == (tuning["kept"] != "found")
    assert tuning["held_out_after"] >= tuning["held_out_before"]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert model.config.weights == pytest.approx(list(tuning["weights"].values()))
    asked = [{"prompt": "1+1=", "text": "2"}, {"prompt": "a", "text": "bc"}]
    (tmp_path / "dev.json").write_text(json.dumps(asked))
    assert "nothing judges" in cli("tune", tmp_path / "tuned", tmp_path / "dev.json", "--held-out", 0.1).err
    assert cli("tune", tmp_path / "tuned", tmp_path / "dev.json", "--held-out", 0, *save).err == ""
    assert json.loads((tmp_path / "tuning.json").read_text())["tokens"] == 3  # of the texts alone
    ran = cli("tune", out, tmp_path / "dev.jsonl", "--rule", "product", "--save", out)
    assert ran.code == 2
    assert "is inside" in ran.err


def test_help_and_usage(cli: Cli) -> None:
    for command in ((), ("compose",), ("generate",), ("inspect",), ("tune",)):
        ran = cli(*command, "-h")
        assert ran.code == 0
        assert "Usage: tessellm" in ran.out
    assert cli("conpose").code == 2
    assert cli("generate").code == 2
    assert cli("generate", "x", "y", "--max-new-tokens", 0).code == 2


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tessellm.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_real_processes_say_only_what_was_asked(out: Path, recipe: Path) -> None:
    """Without a terminal: no progress bars, no warnings, no colours, no traceback."""
    text = expected(out, "abc", 12)
    printed = start("generate", out, "abc", "--max-new-tokens", 12)
    wrong = start("generate", out.parent / "nowhere", "abc")
    closed = start("generate", recipe, "abc", "--max-new-tokens", 12)
    assert closed.stdout is not None
    closed.stdout.close()
    assert (*printed.communicate(timeout=120), printed.returncode) == (text + "\n", "", 0)
    stdout, stderr = wrong.communicate(timeout=120)
    assert (stdout, wrong.returncode) == ("", 2)
    assert stderr.startswith("error: the composition: there is no folder")
    assert stderr.count("\n") == 1
    _, stderr = closed.communicate(timeout=120)
    assert (stderr, closed.returncode) == ("", 1)


@pytest.mark.parametrize(("stop", "code", "said"), [(press_ctrl_c, 130, "interrupted\n"), (told_to_end, 143, "")])
def test_stopping_it_leaves_nothing_behind(
    cli: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Any, code: int, said: str
) -> None:
    monkeypatch.setattr("tessellm.checkpoint.card.model_card", stop)
    before = sorted(tmp_path.rglob("*"))
    ran = cli("compose", recipe, "-o", tmp_path / "new" / "out", "--self-contained", "--json", tmp_path / "json")
    assert ran == (code, "", said)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["generate", "inspect", "bench", "evaluate"])
def test_ctrl_c_is_told_of_in_one_line(
    cli: Cli, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    arguments = {"generate": ["abc"], "evaluate": ["--tasks", "math", "-o", tmp_path / "table"]}
    monkeypatch.setattr("tessellm.load.load_model", press_ctrl_c)
    assert cli(command, out, *arguments.get(command, [])) == (130, "", "interrupted\n")
    assert not list(tmp_path.iterdir())


def test_a_real_process_is_interrupted(tmp_path: Path) -> None:
    def hears_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job's children do not

    running = start("reproduce", "theorems", "-o", tmp_path / "new" / "out", preexec_fn=hears_ctrl_c)
    assert running.stderr is not None
    lines = [next(running.stderr), next(running.stderr)]  # it has begun
    running.send_signal(signal.SIGINT)
    stdout, rest = running.communicate(timeout=120)
    assert (stdout, running.returncode) == ("", 130)
    assert all(line.startswith("  ") for line in (*lines, *rest.splitlines())[1:-1]), rest  # progress
    assert rest.splitlines()[-1] == "interrupted"
    assert not list(tmp_path.iterdir())


def test_generation_needs_a_tokenizer(cli: Cli, members_dir: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(members_dir / "base")
    tessellm.compose(base, {"x": base}).save_pretrained(tmp_path / "out", self_contained=True)
    ran = cli("generate", tmp_path / "out", "abc")
    assert ran.code == 2
    assert "no member came with a tokenizer" in ran.err
    assert torch.equal(base.lm_head.weight, AutoModelForCausalLM.from_pretrained(members_dir / "base").lm_head.weight)
    character_tokenizer().save_pretrained(tmp_path / "out")
    assert cli("generate", tmp_path / "out", "abc", "--max-new-tokens", 3).code == 0


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1000, "1,000 B"),
        (1023, "1,023 B"),
        (1010 * 1024, "1,010 KiB"),
        (1024**2, "1 MiB"),
        (3e12, "2,794.0 GiB"),
    ],
)
def test_sizes_are_readable(count: float, shown: str) -> None:
    assert readable_size(count) == shown
