"""Compositions that were saved before the modules were put into folders still load, and say what they said then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tessellm.model

DATA = Path(__file__).parent / "data" / "saved-before-the-move"
KINDS = ("linked", "self-contained")
WITHOUT_IMPORT = """
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
expected = load_file(sys.argv[2])
torch.testing.assert_close(model(expected["input_ids"]).logits, expected["logprobs"])
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A copy: loading must not leave anything beside the files that are kept."""
    return Path(shutil.copytree(DATA, tmp_path / "saved"))


@torch.no_grad()
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loads_and_says_what_it_said(saved: Path, kind: str, trust: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved / kind, trust_remote_code=trust)
    expected = load_file(saved / "expected.safetensors")
    assert [member["kind"] for member in model.config.members] == ["full", "full", "adapter"]
    assert type(model) is tessellm.model.ComposedForCausalLM
    torch.testing.assert_close(model(expected["input_ids"]).logits, expected["logprobs"])


def test_loads_without_importing_tessellm(saved: Path, tmp_path: Path) -> None:
    assert "tessellm" not in WITHOUT_IMPORT
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_IMPORT, saved / "self-contained", saved / "expected.safetensors"],
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
