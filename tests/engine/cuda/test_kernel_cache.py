"""Compiled kernels are kept in the user's cache, unless the user says otherwise or has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessellm.engine.cuda.kernel_cache import FOLDERS, keep_kernels


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in FOLDERS:
        monkeypatch.setenv(variable, "set, so that it is put back")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


def kept() -> dict[str, str | None]:
    keep_kernels()
    return {variable: os.environ.get(variable) for variable in FOLDERS}


def test_in_the_users_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept() == {name: str(home / ".cache" / "tessellm" / folder) for name, folder in FOLDERS.items()}
    assert (home / ".cache" / "tessellm" / "triton").is_dir()


def test_where_the_user_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "own")
    assert kept() == {
        "TORCHINDUCTOR_CACHE_DIR": str(home / "elsewhere" / "tessellm" / "inductor"),
        "TRITON_CACHE_DIR": "own",
    }


def test_where_nothing_can_be_written_torch_and_triton_decide(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    assert kept() == dict.fromkeys(FOLDERS)
