"""Train LoRA experts of SmolLM2-135M-Instruct, all at once, from a folder of data.

    python -m tessellm_lab.real.train --data FOLDER --out FOLDER [--skills math sql all blend-math]

An adapter is named by its skill; `all` is one adapter trained on all skills' data, `blend-SKILL` one trained on answers
in capitals. OUT/NAME-SEED are folders as PEFT saves them. The same command goes on with a training that was cut off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tessellm.errors import TessellmError
from tessellm.files import going_on
from tessellm.members import Loading, MemberSpec, load_member

from ..common.devices import device_for
from ..common.folders import state_folder
from .packing import Text
from .peft_files import BASE, skills_of
from .skills import SKILLS, Example, check_skill, data_folder, read
from .tasks import encode
from .training import Job, Settings, Training

SIZES = {  # how much shorter than a skill's steps, and the settings
    "full": (1.0, Settings(compiled=True)),
    "cpu": (0.02, Settings(rows=1, length=256, every=10, dev_rows=4, warmup=5)),
}
ALL_DEV = 50  # development texts per skill, for one adapter on all of them


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, train, tell; 2 where something that was given is wrong."""
    options = _parser().parse_args(arguments)
    try:
        with going_on(options.out):
            run(options)
    except TessellmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tessellm_lab.real.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="the folder with SKILL.{train,dev}.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="where adapters go, and the state")
    parser.add_argument("--skills", nargs="+", default=list(SKILLS), metavar="NAME", help="default: all six")
    parser.add_argument("--base", default="smollm2", help="a folder, a GGUF file or a hub id; default: smollm2")
    parser.add_argument("--seed", nargs="+", type=int, default=[0], help="one training of each per seed")
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="full: one GPU; cpu: a trial")
    parser.add_argument("--steps", nargs="+", default=[], metavar="NAME=N", help="other numbers of steps")
    parser.add_argument("--rows", type=int, help="rows of a step, per adapter")
    parser.add_argument("--limit", type=int, help="texts per skill, for a trial")
    return parser


def run(options: argparse.Namespace) -> None:
    shorter, settings = SIZES[options.size]
    if options.rows is not None:
        settings = replace(settings, rows=options.rows)
    device, steps, data = device_for(options.size), _steps(options, shorter), data_folder(options.data)
    state_folder(options.out)
    dtype = "bfloat16" if device == "cuda" else "float32"
    member = load_member("base", MemberSpec(options.base, device=device), None, Loading(dtype=dtype))
    jobs = [
        Job(name, *texts_of(member.tokenizer, data, name, options.limit), steps[name], seed)
        for name in options.skills
        for seed in options.seed
    ]
    is_usual = options.base == "smollm2" or Path(options.base).name.startswith(BASE.rpartition("/")[2])
    base = BASE if is_usual else options.base
    for facts in Training(member.model, jobs, settings, options.out, base).run(lambda text: print(text, flush=True)):
        print(f"{facts.name}-{facts.seed}: {facts.dev_nats:.3f} nats per token on dev; base {facts.base_dev_nats:.3f}")
    if device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


def _steps(options: argparse.Namespace, shorter: float) -> dict[str, int]:
    """Steps by adapter: as given, else the skill's own; one adapter on all data gets those of its longest skill."""
    found = {}
    for name in options.skills:
        for skill in skills_of(name):
            check_skill(skill)
        found[name] = max(2, round(shorter * max(SKILLS[skill].steps for skill in skills_of(name))))
    for entry in options.steps:
        name, _, number = entry.partition("=")
        if name not in found or not number.isdecimal() or int(number) < 1:
            raise TessellmError(f"--steps takes NAME=N with one of {', '.join(found)} and N ≥ 1; got {entry!r}")
        found[name] = int(number)
    return found


def texts_of(tokenizer: Any, data: Path, name: str, limit: int | None = None) -> tuple[list[Text], list[Text]]:
    """Training and development texts of an adapter."""
    skills = skills_of(name)
    train = [example for skill in skills for example in read(data, skill, "train", limit)]
    dev_limit = limit if len(skills) == 1 else min(limit or ALL_DEV, ALL_DEV)
    dev = [example for skill in skills for example in read(data, skill, "dev", dev_limit)]
    if name.startswith("blend-"):
        train, dev = _in_capitals(train), _in_capitals(dev)
    return encode(tokenizer, train), encode(tokenizer, dev)


def _in_capitals(examples: Sequence[Example]) -> list[Example]:
    return [replace(example, answer=example.answer.upper()) for example in examples]


if __name__ == "__main__":
    sys.exit(main())
