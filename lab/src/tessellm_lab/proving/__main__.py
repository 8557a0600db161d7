"""Routing with as many prompts as wanted: python -m tessellm_lab.proving --prompts 20 --out results"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tessellm.errors import TessellmError

from .experiment import PLANS, measure
from .skills import Places


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, write routing.json; 2 where something that was given is wrong."""
    parser = argparse.ArgumentParser("python -m tessellm_lab.proving", description=__doc__)
    parser.add_argument("--prompts", type=int, default=PLANS["cpu"].prompts, help="per skill and wording")
    parser.add_argument("--completion", type=int, default=PLANS["cpu"].completion, help="those without a template")
    parser.add_argument("--likelihood", type=int, default=PLANS["cpu"].likelihood, help="those that every expert reads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("reproduced"))
    given = parser.parse_args(arguments)
    if given.prompts < 1 or given.completion < 0 or given.likelihood < 0:
        parser.error("expected --prompts of 1 or more, --completion and --likelihood of 0 or more")
    plan = replace(PLANS["cpu"], prompts=given.prompts, completion=given.completion, likelihood=given.likelihood)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        found = measure(Places.found(), plan, given.seed, given.out, "cpu").write(given.out)
    except TessellmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found["claims"], indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
