"""Saved compositions are whole or not there at all: changed members, files cut off, full disks, killed processes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import tessellm
from tessellm.checkpoint.reader import ROUTER
from tessellm.errors import CheckpointError, MemberError

from checkpoints import composed, listing, save, tokens
from conftest import (
    character_tokenizer,
    logits,
    perturbed,
    press_ctrl_c,
    save_member,
)


def test_a_member_that_changed_is_named_and_one_that_was_only_touched_is_not(own_members: Path, tmp_path: Path) -> None:
    save("linked", own_members, tmp_path / "out")
    weights = own_members / "math" / "model.safetensors"
    weights.touch()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = own_members / "math" / "config.json"
    plain = config.read_text()
    config.write_text(plain.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))
    assert config.read_text() != plain
    with pytest.raises(CheckpointError, match="member 'math' has changed since it was composed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config.write_text(plain)
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(CheckpointError, match="member 'math' has changed since it was composed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights.write_bytes(changed[:-5])
    with pytest.raises(MemberError, match=r"member 'math': .*model.safetensors is cut off"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights.unlink()
    with pytest.raises(MemberError, match=r"member 'math': .* holds no weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_checkpoints_cut_off_half_way(members_dir: Path, tmp_path: Path) -> None:
    save("self-contained", members_dir, tmp_path / "out")
    for file in [path for path in (tmp_path / "out").rglob("*") if path.name.endswith((".safetensors", "x.json"))]:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(tessellm.TessellmError, match="is cut off"):
            tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
        file.unlink()
        if file.name != ROUTER:  # which is calibrated anew
            with pytest.raises(tessellm.TessellmError, match=r"missing|holds no weights"):
                tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
        file.write_bytes(whole)
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text()[:100])
    with pytest.raises(CheckpointError, match=r"config\.json is cut off or damaged"):
        tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
    config.unlink()
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError, match="a model of type 'llama'"):
        tessellm.ComposedForCausalLM.from_pretrained(members_dir / "base")


def test_resaving_replaces_a_composition_and_nothing_else(members_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    model = save("self-contained", members_dir, target)
    model.set_rule(weights=[0.2, 0.3])
    model.save_pretrained(target)
    assert "members" not in listing(target)
    assert AutoConfig.from_pretrained(target).weights == (0.2, 0.3)
    assert listing(tmp_path) == sorted(["out", *(f"out/{name}" for name in listing(target))])
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"also notes\.txt, which would be lost"):
        model.save_pretrained(target)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and holds something else"):
        model.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="exists and is a file"):
        model.save_pretrained(target / "notes.txt")
    with pytest.raises(CheckpointError, match=r"cannot be made in .*notes\.txt: that is a file"):
        model.save_pretrained(target / "notes.txt" / "deeper")
    assert (tmp_path / "other" / "thesis.tex").read_text() == (target / "notes.txt").read_text() == "mine"


def test_links_into_the_folder_that_is_replaced_are_refused(members_dir: Path, tmp_path: Path) -> None:
    save("self-contained", members_dir, tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=r"member 'base' is inside .*out, which would be replaced"):
        model.save_pretrained(tmp_path / "out")
    assert listing(tmp_path) == before
    model.save_pretrained(tmp_path / "out", self_contained=True)
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)


@pytest.mark.parametrize("how", ["config", "link"])
def test_a_self_contained_folder_holds_its_members(members_dir: Path, tmp_path: Path, how: str) -> None:
    model = tessellm.compose(members_dir / "base", {"x": members_dir / "math"})
    model.save_pretrained(tmp_path / "out", self_contained=True)
    shutil.copytree(tmp_path / "out" / "members" / "x", tmp_path / "elsewhere")
    if how == "config":
        file = tmp_path / "out" / "config.json"
        file.write_text(file.read_text().replace("./members/x", "../elsewhere"))
    else:
        shutil.rmtree(tmp_path / "out" / "members" / "x")
        (tmp_path / "out" / "members" / "x").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="member 'x' lies outside its composition"):
        tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")


def test_what_cannot_be_saved(members_dir: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(members_dir / "base")
    model = tessellm.compose(base, {"x": perturbed(base, 3)}, tokenizer=character_tokenizer())
    with pytest.raises(CheckpointError, match=r"member 'base' was given as a loaded model, .*self_contained=True"):
        model.save_pretrained(tmp_path / "deep" / "out")
    assert listing(tmp_path) == []
    model.save_pretrained(tmp_path / "deep" / "out", self_contained=True)
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "out")) == tokens(model)


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """As on a disk with no more room: no file may grow past the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [60_000, 1_000])  # inside the weights; inside config.json
def test_a_full_disk_leaves_nothing_behind(members_dir: Path, tmp_path: Path, limit: int) -> None:
    model = composed(members_dir)
    with pytest.raises(CheckpointError, match=r"could not be written: .*File too large.*Nothing was changed"):  # noqa: SIM117
        with largest_file(limit):
            model.save_pretrained(tmp_path / "new" / "out", self_contained=True)
    assert listing(tmp_path) == []
    model.save_pretrained(tmp_path / "out")
    before = listing(tmp_path)
    with pytest.raises(CheckpointError), largest_file(limit):
        model.save_pretrained(tmp_path / "out", self_contained=True)
    assert listing(tmp_path) == before
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)


KILLED_WHILE_SAVING = """
import os, sys, tessellm, tessellm.checkpoint.card
model = tessellm.compose(f"{sys.argv[1]}/base", {"math": f"{sys.argv[1]}/math"})
tessellm.checkpoint.card.model_card = lambda *_: os.kill(os.getpid(), 9)  # the last thing that is written
model.save_pretrained(sys.argv[2], self_contained=True)
"""


def test_a_process_killed_while_saving_leaves_the_old_composition(members_dir: Path, tmp_path: Path) -> None:
    model = save("linked", members_dir, tmp_path / "out")
    before = listing(tmp_path)
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, members_dir, tmp_path / "out"]
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == -signal.SIGKILL
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)
    [left] = [path for path in tmp_path.iterdir() if path.name != "out"]
    assert left.name.startswith(".out.")
    assert (left / "members" / "base").is_dir()
    model.save_pretrained(tmp_path / "out")  # clears what the killed process left
    assert listing(tmp_path) == before


KILLED_WHILE_TUNING = """
import os, sys, tessellm.checkpoint.card
tessellm.checkpoint.card.model_card = lambda *_: os.kill(os.getpid(), 9)
from tessellm.cli import main
main()
"""


def test_a_process_killed_while_tuning_leaves_nothing_that_loads(members_dir: Path, tmp_path: Path) -> None:
    model = save("linked", members_dir, tmp_path / "out")
    (tmp_path / "texts.txt").write_text("\n".join(f"abc {n} def" for n in range(8)) + "\n")
    command = [
        sys.executable,
        "-c",
        KILLED_WHILE_TUNING,
        "tune",
        "out",
        "texts.txt",
        "--rule",
        "product",
        "--save",
        "tuned",
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert not (tmp_path / "tuned").exists()
    model.save_pretrained(tmp_path / "tuned")  # clears what the killed process left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts.txt", "tuned"]


def test_ctrl_c_while_saving_leaves_nothing(members_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = composed(members_dir)
    monkeypatch.setattr("tessellm.checkpoint.card.model_card", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "new" / "out", self_contained=True)
    assert listing(tmp_path) == []


def test_a_swap_that_was_cut_off_is_undone(members_dir: Path, tmp_path: Path) -> None:
    model = save("linked", members_dir, tmp_path / "out")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "out").rename(tmp_path / f".out.{dead.pid}.old.tmp")  # killed between two renames
    running = tmp_path / f".out.{os.getppid()}.tmp"  # another process is still at work
    running.mkdir()
    with pytest.raises(CheckpointError), largest_file(1_000):
        model.save_pretrained(tmp_path / "out", self_contained=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [running.name, "out"]
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)


def test_aligned_vocabularies_are_saved(members_dir: Path, tmp_path: Path) -> None:
    padded = AutoModelForCausalLM.from_pretrained(members_dir / "math")
    padded.resize_token_embeddings(80, mean_resizing=False)
    save_member(padded, tmp_path / "padded", character_tokenizer())
    model = tessellm.compose(members_dir / "base", {"x": tmp_path / "padded"})
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.vocab_size == 64
    assert torch.equal(logits(again), logits(model))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_tensor("weights").tolist() == [1.0]
