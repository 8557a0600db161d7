"""What calls of the bridge experiment leave for the next one: scores and seconds in one file, what layers held in
another.

Members are too large to carry. What a decoder is to be fitted on is not: it is kept in half precision, so that
decodability, which needs no GPU, can be worked out after the members are gone, and elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tessellm.files import new_file, stored, write_text

from ..common.stopwatch import Stopwatch
from .knowledge import Read

Cells = list[dict[str, Any]]


class State:
    """Scores by kind (experts, models) and features by name; without a folder they are kept in memory alone."""

    def __init__(self, folder: Path | None, seeds: list[int]):
        self.folder, self.seeds = folder, seeds
        self.cells: dict[str, Cells] = {}
        self.features: dict[str, Tensor] = {}
        self.stopwatch = Stopwatch()
        path = self._path("cells.json")
        if path is None or not path.is_file():
            return
        with stored(path):
            content = json.loads(path.read_text(encoding="utf-8"))
            found = dict(content["cells"]) if content["seeds"] == seeds else {}
            seconds = float(content.get("seconds", 0.0)) if found else 0.0  # older states lack it
        tensors = path.with_name("features.safetensors")
        if found and tensors.is_file():
            with stored(tensors, f"Remove the folder {self.folder} to make it anew"):
                self.features = load_file(tensors)
        self.cells, self.stopwatch = found, Stopwatch(seconds)

    def add(self, kind: str, cells: Cells, features: dict[str, Tensor]) -> None:
        self.cells[kind] = cells
        self.features |= {name: value.contiguous() for name, value in features.items()}
        path = self._path("features.safetensors")
        if path is not None:
            with new_file(path) as file:
                save_file(self.features, file)
        self.write()

    def write(self) -> None:
        path = self._path("cells.json")
        if path is not None:
            content = {"seeds": self.seeds, "cells": self.cells, "seconds": self.stopwatch.seconds}
            write_text(path, json.dumps(content) + "\n")

    def read(self, name: str) -> Read:
        """What layers held of that name."""
        with stored(self.folder or Path(), "Remove that folder to make it anew"):
            return Read.of(self.features, name)

    def forget_features(self) -> None:
        """Once every layer is decoded, nothing needs them."""
        self.features = {}
        path = self._path("features.safetensors")
        if path is not None:
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name
