"""The experts of active_members.py, adapters of this repository and noisy copies, and what its server is asked."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count as numbers
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HOME = Path(__file__).resolve().parent.parent
SMOLLM2, DATA = HOME / "adapters" / "smollm2", HOME / "lab" / "data" / "skills"
OURS = ("math", "bash", "intents", "sql", "code")
WEIGHTS = "adapter_model.safetensors"
NOISE = 0.1  # of a tensor's own deviation


@contextmanager
def experts_of(count: int, others: Path) -> Iterator[Mapping[str, Path]]:
    """Return so many experts by name: ours, the folders in `others`, then copies of all of them with seeded noise."""
    real = {name: SMOLLM2 / name for name in OURS}
    if count > len(real):
        real |= {place.name: place for place in sorted(others.iterdir()) if (place / WEIGHTS).is_file()}
    with tempfile.TemporaryDirectory() as place:
        experts = dict(list(real.items())[:count])
        for seed in numbers():
            if len(experts) >= count:
                break
            name, source = list(real.items())[seed % len(real)]
            experts[f"{name}-{seed}"] = noisy_copy(source, Path(place) / f"{name}-{seed}", seed)
        yield experts


def noisy_copy(source: Path, target: Path, seed: int) -> Path:
    """Copy an adapter's folder with noise on its weights."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(target / WEIGHTS)
    for path, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * NOISE
        weights[path] = (tensor.float() + noise).to(tensor.dtype)
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
    return target


def asked_of(tokenizer: Any, count: int, tokens: int = 64) -> list[str]:
    """Return prompts in the chat template of about so many tokens: every second concerns none of our experts."""
    of_experts = [prompt for rows in zip(*map(_prompts, OURS[:4]), strict=False) for prompt in rows]
    plain = _prompts("plain")
    found = []
    for prompts in (of_experts, plain):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        texts.sort(key=lambda text: abs(len(tokenizer(text)["input_ids"]) - tokens))
        found.append(texts[: -(-count // 2)])
    return [text for pair in zip(*found, strict=True) for text in pair][:count]


def _prompts(kind: str) -> list[str]:
    with gzip.open(DATA / f"{kind}.test.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]
