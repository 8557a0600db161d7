"""`reproduce table`: the paper's table in miniature, end to end.

A base, a math expert and a coding expert, trained on texts that are written here; beside them their composition, merges
of them, and LoRA experts. Problems are held out; answers are judged by lm-eval, functions by evalplus' tests, and mixed
problems, for which nobody was trained, are functions that need a word problem solved first. Whatever a seed's models
wrote is kept in `table/SIZE-SEED.jsonl`: a run that was stopped goes on with the next seed, and where all samples are
there, as after a run on a GPU without lm-eval and evalplus, they are judged and nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tessellm.errors import MissingExtraError, TessellmError
from tessellm.files import going_on, stored, write_text
from tessellm.provenance import environment

from ..common.claims import Result
from ..common.panels import drawn
from .cells import Pooled, pooled, quality_claims, speed_claim, table_of
from .making import Library, held_out, key, make
from .plan import PLANS, Plan
from .scoring import score
from .writing import check_unchanged, fingerprint, read_samples

JUDGES = ("lm_eval", "evalplus")
UNJUDGED = 'the judges are not installed: {}. Fix: pip install "tessellm[eval]"'
Log = Callable[[str], None]


def run(seed: int, out: Path, size: str, log: Log = print) -> dict[str, Any]:
    """Claims, `table.json` and a picture in `out`; samples and what was measured while making them in `out/table`."""
    plan = PLANS[size]
    seeds = [seed + number for number in range(plan.seeds)]
    missing = [name for name in JUDGES if find_spec(name) is None]
    if missing and not lacking(plan, seeds, out / "table", size):
        raise MissingExtraError(f"the samples are there, but {UNJUDGED.format(' and '.join(missing))}")
    with going_on(out / "table"):
        facts = write_samples(plan, seeds, out / "table", size, log)
    speed = speed_claim(facts, firm=size == "full")
    seconds = sum(sum(each["seconds"].values()) for each in facts)
    if missing:
        log(f"not judged, no table: {UNJUDGED.format(' and '.join(missing))}; then run it again beside the samples")
        return asdict(Result("table", [speed], seed, size, seconds))
    found = judge(plan, seeds, out / "table", size, log)
    claims = [*quality_claims(found), speed]
    tables = {"cells": table_of(found), "seeds": facts}
    result = Result("table", claims, seed, size, seconds, drawn(lambda: _draw(found, out)), tables)
    content = {**asdict(result), **made_on(facts), "judged on": environment()}
    write_text(out / "table.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return content


def made_on(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where the samples were made, which may be another machine than this one."""
    return {name: facts[0][name] for name in ("hardware", "threads", "commit", "versions")}


def _draw(found: Pooled, out: Path) -> str:
    from .figure import draw

    return draw(found, out)


def write_samples(plan: Plan, seeds: Sequence[int], folder: Path, size: str, log: Log) -> list[dict[str, Any]]:
    """What was measured while making each seed's samples; those that are there are left as they are."""
    library, device = None, "cuda" if torch.cuda.is_available() else "cpu"
    wanted = lacking(plan, seeds, folder, size)
    for seed in seeds:
        samples_path, facts_path = paths(folder, size, seed)
        if seed not in wanted:
            log(f"seed {seed}: the samples in {samples_path} are kept; remove them to write new ones")
            continue
        if size == "full" and device == "cpu":
            raise TessellmError(f"{samples_path} lacks samples of these problems, and without a GPU none can be made")
        library = library or Library(plan, log)
        log(f"seed {seed}: training on {device}")
        samples, facts = make(plan, seed, library, device, log)
        lines = (json.dumps(asdict(sample), ensure_ascii=False) for sample in samples)
        write_text(samples_path, "".join(f"{line}\n" for line in lines))
        facts["samples"] = fingerprint(samples_path)
        write_text(facts_path, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    return [json.loads(paths(folder, size, seed)[1].read_text(encoding="utf-8")) for seed in seeds]


def lacking(plan: Plan, seeds: Sequence[int], folder: Path, size: str) -> list[int]:
    """The seeds without samples of these problems."""
    found = []
    for seed in seeds:
        samples_path, facts_path = paths(folder, size, seed)
        known = None
        if facts_path.is_file() and samples_path.is_file():
            with stored(facts_path):
                known = json.loads(facts_path.read_text(encoding="utf-8"))["problems"]
        if known != key(plan, seed):
            found.append(seed)
    return found


def paths(folder: Path, size: str, seed: int) -> tuple[Path, Path]:
    return folder / f"{size}-{seed}.jsonl", folder / f"{size}-{seed}.json"


def judge(plan: Plan, seeds: Sequence[int], folder: Path, size: str, log: Log) -> Pooled:
    """Scores of all columns, the seeds' problems one after the other."""
    parts = []
    for seed in seeds:
        log(f"seed {seed}: judged by lm-eval and evalplus")
        asked = held_out(plan, seed)
        samples_path, facts_path = paths(folder, size, seed)
        samples = read_samples(samples_path, asked, seed)
        check_unchanged(samples_path, facts_path)
        parts.append((samples, score(asked, samples)))
    return pooled(parts)
