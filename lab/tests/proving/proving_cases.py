"""A small proving ground: three skills' prompts from the repository, a random base and random adapters of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tessellm_lab.proving.skills import FIVE, Places
from tessellm_lab.proving.two_skills import STYLE

from conftest import build_model, character_tokenizer, save_lora, save_member

NAMES = ("bash", "clinc", "isodate")


def small_places(folder: Path, lines: int = 6) -> Places:
    """The first lines of every file that the names need, and adapters that respond to different tokens."""
    base = save_member(build_model("llama", 0, max_position_embeddings=256), folder / "base", character_tokenizer())
    data = folder / "data"
    data.mkdir()
    kept = Places.found().data
    parts = [f"{name}.{part}" for name in NAMES for part in ("dev", "test", "unseen")]
    for part in (*parts, "plain.test", "near.test", "conversations.test"):
        with gzip.open(kept / f"{part}.jsonl.gz", "rt") as file, gzip.open(data / f"{part}.jsonl.gz", "wt") as short:
            short.writelines(_short(line) for line in file.readlines()[:lines])
    (data / "descriptions.json").write_text((kept / "descriptions.json").read_text())
    for seed, name in enumerate(NAMES):
        save_lora(base, folder / ("five" if name in FIVE else "fifteen") / name, seed=seed)
    save_lora(base, folder / "five" / STYLE, seed=len(NAMES))
    return Places(data, folder / "five", folder / "fifteen", str(base))


def _short(line: str) -> str:
    """The line with prompts that fit into the small context."""
    found = json.loads(line)
    if "prompt" in found:
        found["prompt"] = found["prompt"][:24]
    for message in found.get("messages", ()):
        message["content"] = message["content"][:8]
    return json.dumps(found) + "\n"
