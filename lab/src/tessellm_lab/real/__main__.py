"""Measure with folders, sets and numbers of prompts of one's own: python -m tessellm_lab.real --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tessellm.errors import TessellmError

from ..common.folders import results_folder
from .experiment import Run, measure
from .members import Places
from .plan import ALL_SETS, PLANS


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, write real.json; 2 where something that was given is wrong."""
    parser = argparse.ArgumentParser("python -m tessellm_lab.real", description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder with SKILL.{dev,test}.jsonl.gz")
    parser.add_argument("--adapters", type=Path, help="the folder with an adapter per skill")
    parser.add_argument("--trained", type=Path, help="further adapters, NAME-SEED: another seed's, all, blend-SKILL")
    parser.add_argument("--base", help="a folder, a GGUF file or a hub id; default: smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(PLANS), default="full")
    parser.add_argument("--sets", nargs="+", metavar="SET", help=f"some of: {', '.join(ALL_SETS)}")
    parser.add_argument("--rules", nargs="+", metavar="RULE", help="these alone, beside base and experts; no peers")
    parser.add_argument("--limit", type=int, help="prompts per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: as the size asks; cpu where all is written and only to be judged")
    parser.add_argument("--workers", type=int, default=0, help="processes that share the work; a GPU needs CUDA's MPS")
    parser.add_argument("--frozen", action="store_true", help="tables of what OUT's journal has; measure nothing")
    given = parser.parse_args(arguments)
    try:
        places = Places.found(given.data, given.adapters, given.trained, given.base)
        plan = PLANS[given.size].limited(given.limit, tuple(given.sets) if given.sets else None)
        plan = plan.of_rules(given.rules) if given.rules else plan
        with results_folder(given.out):
            log = partial(print, flush=True)
            run = Run(places, plan, given.seed, given.out, given.size, given.device, given.frozen)
            result = measure(run, log, given.workers)
            result.write(given.out, result.tables["measured on"][-1] if given.frozen else None)
    except TessellmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
