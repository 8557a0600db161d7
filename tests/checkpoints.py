"""Compositions to be saved, and what is seen of a saved one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tessellm


def composed(members: Path, adapters: bool = False, **options: Any) -> Any:
    prefix = "lora_" if adapters else ""
    experts = {name: members / f"{prefix}{name}" for name in ("math", "coding")}
    return tessellm.compose(members / "base", experts, weights={"math": 0.7}, **options)


def tokens(model: Any) -> list[int]:
    ids = torch.arange(4, 10)[None]
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[0].tolist()


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def size(folder: Path, pattern: str = "*") -> int:
    return sum(file.stat().st_size for file in folder.rglob(pattern) if file.is_file())


def save(kind: str, members: Path, target: Path) -> Any:
    model = composed(members, adapters="adapters" in kind)
    model.save_pretrained(target, self_contained="self-contained" in kind)
    return model
