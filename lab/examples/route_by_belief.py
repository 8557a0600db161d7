"""Who answers under `belief`, the default rule until commit 5bd08e1: for the table of `tessellm reproduce routing`.

It runs that commit's library on this commit's prompts and adapters:

    git worktree add ../older 5bd08e1
    PYTHONPATH=../older/src python lab/examples/route_by_belief.py --prompts 2 --out lab/results/routing-belief.json

Every expert reads every prompt, so it takes minutes. A run that was stopped goes on: it keeps OUT.jsonl.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
from pathlib import Path

import torch
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling

import tessellm

LAB = Path(__file__).resolve().parents[1]
DATA = LAB / "data" / "skills"
FIVE = ("math", "bash", "intents", "sql", "code")


def lines(part: str, count: int) -> list[dict]:
    with gzip.open(DATA / f"{part}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file.readlines()[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2, help="per skill and wording")
    parser.add_argument("--ordinary", type=int, default=30, help="plain prompts; as many near ones")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folders = {path.name: path for path in sorted((LAB / "adapters").iterdir()) if path.is_dir()}
    folders = {name: LAB.parent / "adapters" / "smollm2" / name for name in FIVE} | folders
    asked = [("plain", "base", line) for line in lines("plain.test", given.ordinary)]
    asked += [("near", "base", line) for line in lines("near.test", given.ordinary)]
    for name in folders:
        asked += [("seen", name, line) for line in lines(f"{name}.test", given.prompts)]
        asked += [("unseen", name, line) for line in lines(f"{name}.unseen", given.prompts)]
    kept = given.out.with_suffix(".jsonl")
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    model = tessellm.compose("smollm2", {name: str(path) for name, path in folders.items()}, dtype="float32")
    names = list(model.members)
    engine = Engine(model, 1, 1024, compiled=False)
    for cell, expected, line in asked[len(known) :]:
        row = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": line["prompt"]}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        request = engine.submit(row, Sampling(1), observer=lambda *seen: {"belief": seen[3].belief_BTM[:, 0]})
        while not request.done:
            engine.step()
        belief = request.seen[0]["belief"]
        top = max(range(len(belief)), key=belief.__getitem__)
        known.append({"cell": cell, "expected": expected, "selected": names[top] if top < len(names) else "Eq. 2"})
        with kept.open("a") as file:
            file.write(json.dumps(known[-1]) + "\n")
        print(len(known), "of", len(asked), known[-1], flush=True)
    cells = {}
    for cell in ("seen", "unseen", "plain", "near"):
        here = [each for each in known if each["cell"] == cell]
        cells[cell] = {"share": sum(e["selected"] == e["expected"] for e in here) / len(here), "of": len(here)}
    older = Path(tessellm.__file__).resolve().parents[2]
    commit = subprocess.run(["git", "-C", older, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "name": "routing-belief", "rule": "belief", "commit": commit, "seed": 0, "size": f"{given.prompts} prompts",
        "hardware": f"{platform.machine()} CPU", "versions": {"torch": torch.__version__}, "cells": cells,
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
