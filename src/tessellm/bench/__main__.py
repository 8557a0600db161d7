"""`python -m tessellm.bench`: the same as `tessellm bench --shapes`, with torch and transformers alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from ..errors import TessellmError
from ..files import write_text
from .figure import draw
from .models import KINDS, SHAPES
from .plan import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tessellm.bench", description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="llama-512")
    parser.add_argument("--kind", choices=KINDS, default="full")
    parser.add_argument("--experts", type=int, nargs="+", default=[2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, nargs="+", default=[128])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rule", default="evidence")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU, else float32")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-loops", action="store_true")
    parser.add_argument("--speculate", help="also with drafts: lookup or member:NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    dtype = given.dtype or ("bfloat16" if given.device.startswith("cuda") else "float32")
    try:
        result = run(
            None, given.shapes, given.kind, given.experts, given.batch, given.prompt, given.new, given.rounds,
            given.rule, given.device, getattr(torch, dtype), not given.no_compile, not given.no_loops, given.speculate,
            progress=lambda text: print(text, flush=True),
        )  # fmt: skip
        from ..provenance import environment

        result = {**result, **environment()}
        if given.json:
            write_text(given.json, json.dumps(result, indent=1) + "\n")
        if given.figure:
            draw(result, given.figure)
    except TessellmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
