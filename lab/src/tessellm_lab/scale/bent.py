"""The invertible encoding with weights that make it a test: python -m tessellm_lab.scale.bent --help.

In `reproduce scale` the couplings' weights have the standard deviation .1, and z is linear in its code. Here they have
1 and 2, for as many updates as the long runs of the other encodings, and z itself is trained beside them. Writes
scale-bent.json; a call that was stopped goes on in the next, from `OUT/scale-bent-state`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tessellm.errors import TessellmError
from tessellm.files import going_on

from ..common.claims import Claim, Result
from ..common.folders import results_folder
from .encodings import BENT
from .experiment import LEARNED, MINUTES, Log, Row, finished, score
from .stacks import stacks
from .stages import train_stacks
from .training import Run, Stack

GOAL = LEARNED["invertible"]


def stack_of(size: str, seed: int) -> Stack:
    """The reference network and schedule of the long runs, for z itself and for the bent codes of it."""
    last = next(stack for stack in reversed(stacks(size, seed)) if stack.name in ("reference", "long"))
    return replace(last, name="bent", runs=tuple(Run(name, seed=seed) for name in ("identity", *BENT)))


def run(seed: int, out: Path, size: str, log: Log = print, minutes: float = MINUTES) -> Result:
    """Train what is not trained yet, as far as time allows."""
    folder, stack = out / "scale-bent-state", stack_of(size, seed)
    torch.set_float32_matmul_precision("highest")
    deadline = time.monotonic() + 60 * minutes
    with going_on(folder):
        state = train_stacks([stack], folder, "cuda" if size == "full" else "cpu", deadline, log)
        state.write()
    rows = state.rows(stack)
    claims = [finished(int(rows is not None), 1), *claims_of(rows or [], size == "full")]
    return Result("scale-bent", claims, seed, size, state.stopwatch.seconds, tables={"runs": rows or []})


def claims_of(rows: Sequence[Row], full: bool) -> list[Claim]:
    """How much of z can be read off each code, and whether a network learns from it what it learns from z."""
    claims = []
    for row in rows:
        name, target = row["encoding"], f"≥ {GOAL}" if full else None
        linear = round(row["decode_input"]["held_out"], 4)
        claims.append(Claim(f"{name}: linear", f"{name}: z decodable from the encoding, R²", linear))
        text = f"{name}: held-out R² after {row['steps']} steps"
        claims.append(Claim(name, text, score(row), target, score(row) >= GOAL if full else None))
    return claims


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, train, write; 2 where something that was given is wrong."""
    parser = argparse.ArgumentParser("python -m tessellm_lab.scale.bent", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=("cpu", "full"), default="full", help="full needs a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="then the next call goes on")
    given = parser.parse_args(arguments)
    try:
        with results_folder(given.out):
            result = run(given.seed, given.out, given.size, partial(print, flush=True), given.minutes)
            result.write(given.out)
    except TessellmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for claim in result.claims:
        print(f"{claim.statement}: {claim.value} {claim.target or ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
