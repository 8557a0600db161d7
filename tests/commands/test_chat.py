"""A chat in the terminal: who answers, commands, Ctrl-C; as a real process, on a terminal where it needs one."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm import checkpoint
from tessellm.engine.engine import Engine
from tessellm.errors import PromptError
from tessellm.load import load_speaker
from tessellm.routing import calibrated
from tessellm.routing.calibration import calibration_prompts
from tessellm.text.chat import Chat
from tessellm.text.conversation import Conversation
from tessellm.text.options import TextOptions
from tessellm.vocabulary.chats import encode_chat

COMMAND = [sys.executable, "-m", "tessellm.cli", "chat"]


@pytest.fixture(scope="module")
def folder(chatting: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A routed composition that answers chats."""
    folder = tmp_path_factory.mktemp("chat") / "out"
    with pytest.MonkeyPatch.context() as patch:
        few = [text for text in calibration_prompts() if len(text) < 60][:40]
        patch.setattr(calibrated, "calibration_prompts", lambda: few)
        tessellm.compose(**chatting, rule="mixture").save_pretrained(folder)
    return folder


def chat(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, str(folder), *options], input=text, capture_output=True, text=True, timeout=180, check=False
    )


def test_answers_are_routed_and_go_on(folder: Path, tmp_path: Path) -> None:
    """Each is what the reference writes after the same turns, and who answers stands before it."""
    said = chat(folder, "hello\n\n/route abc\nabc\n", "--max-new-tokens", "6", "--json", str(tmp_path / "turns.json"))
    assert (said.returncode, said.stderr) == (0, "")
    turns = json.loads((tmp_path / "turns.json").read_text())
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    model: Any = checkpoint.load(folder)
    plain = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    for number in (1, 3):
        route = model.route(plain[:number])
        assert turns[number]["routing"]["selected"] == route.selected
        assert set(turns[number]["answered"]) == set(route.active(model.rule.rule.alone, model.rule.rule.most))
        ids = encode_chat(model.tokenizer, plain[:number])
        written = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :]
        text = model.tokenizer.decode(written, skip_special_tokens=True)
        assert turns[number]["content"] == text
        assert f":\n{text}" in said.stdout
    asked = [*plain[:2], {"role": "user", "content": "abc"}]
    assert f"selected: {model.route(asked).selected}; threshold" in said.stdout


def test_commands(folder: Path) -> None:
    lines = [
        "/experts two",
        "abc",
        "/experts",
        "/experts base",
        "abc",
        "/reset",
        "/help",
        "/nope",
        "/experts x",
        "/route",
    ]
    said = chat(folder, "\n".join([*lines, "/quit", "abc"]), "--max-new-tokens", "3")
    assert said.returncode == 0
    assert [line for line in said.stdout.splitlines() if line in ("two:", "base:")] == ["two:", "base:"]
    assert "Ctrl-C stops an answer." in said.stdout
    for told in ("there is no command /nope; did you mean", "there is no member 'x'", "/route: expected a message"):
        assert told in said.stderr
    assert said.stderr.count("\n") == 3


def test_a_member_alone_and_a_system_prompt(folder: Path, tmp_path: Path) -> None:
    options = ("--max-new-tokens", "5", "--system", "be kind", "--json", str(tmp_path / "turns.json"))
    assert chat(Path(f"{folder}:two"), "hi\n", *options).returncode == 0
    _, answer = json.loads((tmp_path / "turns.json").read_text())
    model: Any = checkpoint.load(folder)
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    ids = encode_chat(model.tokenizer, turns)
    (request,) = Engine(load_speaker(f"{folder}:two")).generate([ids])
    assert model.tokenizer.decode(request.tokens, skip_special_tokens=True).startswith(answer["content"])
    assert answer["answered"] == {"two": None}


def test_what_cannot_be_answered_is_said_and_forgotten(folder: Path) -> None:
    said = chat(folder, f"{'x' * 600}\nabc\n", "--max-new-tokens", "3")
    assert said.returncode == 0
    assert "error: the chat has" in said.stderr
    assert said.stdout.count(":\n") == 1
    ran = chat(folder / "nowhere", "abc\n")
    assert (ran.returncode, ran.stdout) == (2, "")


def test_it_needs_a_template(composed: tuple[Any, Path]) -> None:
    model = composed[0]
    tokenizer, template = model.tokenizer, model.tokenizer.chat_template
    tokenizer.chat_template = None
    try:
        with pytest.raises(PromptError, match="which a chat needs: use tessellm generate"):
            Conversation(model, TextOptions())
    finally:
        tokenizer.chat_template = template


def test_stopping_keeps_what_was_written(folder: Path) -> None:
    conversation = Conversation(checkpoint.load(folder), TextOptions(40, chat=Chat()))
    stops = iter([False, False, True])
    whole = "".join(piece for _, piece in conversation.answer("abc", lambda: next(stops)))
    assert conversation.turns[-1]["content"] == whole
    assert 0 < len(whole) < 10
    assert not conversation.engine.busy
    assert "".join(piece for _, piece in conversation.answer("go on"))  # the engine is free


def on_terminal(folder: Path, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, str(folder), *options], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def read_until(terminal: int, text: str) -> None:
    """Read up to a text, and no further."""
    found, until = b"", time.monotonic() + 120
    while not found.endswith(text.encode()):
        assert time.monotonic() < until, found
        assert select.select([terminal], [], [], 120)[0], found
        found += os.read(terminal, 1)


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(folder: Path, tmp_path: Path) -> None:
    """No token ends an answer here, so each is still being written when it is interrupted."""
    endless = shutil.copytree(folder, tmp_path / "endless")
    config = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    process, terminal = on_terminal(endless, "--max-new-tokens", "400", "--temperature", "5")
    try:
        read_until(terminal, "one, two on their base; /help lists commands\r\n> ")
        os.write(terminal, b"abc\n")
        read_until(terminal, ":\r\n")
        os.kill(process.pid, signal.SIGINT)
        read_until(terminal, "(stopped)\r\n> ")
        os.write(terminal, b"half a li")
        read_until(terminal, "half a li")
        time.sleep(0.5)  # readline looks for signals while it waits
        os.kill(process.pid, signal.SIGINT)
        read_until(terminal, "(/quit or Ctrl-D ends)\r\n> ")
        os.write(terminal, b"/he\t\n")  # completed
        read_until(terminal, "Ctrl-C stops an answer.\r\n> ")
        os.write(terminal, b"/reset\n")
        read_until(terminal, "> ")
        os.write(terminal, b"\x1b[A\x1b[A\x1b[A")  # three lines back
        read_until(terminal, "abc")
        os.write(terminal, b"\n")
        read_until(terminal, ":\r\n")
        os.kill(process.pid, signal.SIGINT)
        read_until(terminal, "(stopped)\r\n> ")
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
