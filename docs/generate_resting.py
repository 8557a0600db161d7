"""What members that rest bring on a GPU, measured: `python docs/generate_resting.py`, `--check` to compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "resting.md"
RESULT = ROOT / "results" / "resting-cuda.json"
BEGIN, END = "<!-- on a GPU -->", "<!-- end on a GPU -->"
COMMAND = "python benchmarks/resting.py --device cuda --tokens 96"


def lines(content: dict[str, Any]) -> Iterator[str]:
    """A table of the parts of a result, and one of its claims."""
    yield f"{content['hardware']}, commit {content['commit'][:7]}, `{COMMAND}`; milliseconds per token and text:"
    yield ""
    yield "| | all awake | resting | × | drafts accepted | texts the same |"
    yield "|---|---|---|---|---|---|"
    for name, found in content["tables"].items():
        if "resting" in found:
            awake, resting = found["awake"]["ms"], found["resting"]["ms"]
            drafts = f"{found['resting']['accepted']:.1%} of {found['resting']['drafted']:,}"
            yield f"| {name} | {awake:.2f} | {resting:.2f} | {awake / resting:.2f} | {drafts} | {found['same']:.0%} |"
        else:
            yield f"| {name} | {found['ms']:.2f} | | | | |"
    yield ""
    yield "| claim | measured | target | holds |"
    yield "|---|---|---|---|"
    for claim in content["claims"]:
        if claim["target"]:
            yield f"| {claim['statement']} | {claim['value']:.3g} | {claim['target']} | {_holds(claim['holds'])} |"


def _holds(holds: bool) -> str:
    return "yes" if holds else "**no**"


def page(text: str, content: dict[str, Any] | None) -> str:
    """The page with the block as it should be; without a result, how to measure."""
    before, _, rest = text.partition(BEGIN)
    block = [f"Not measured yet: `{COMMAND}` does, and `python docs/generate_resting.py` writes it here."]
    if content is not None:
        block = list(lines(content))
    return before + "\n".join([BEGIN, *block, END]) + rest.partition(END)[2]


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    wanted = page(text, json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else None)
    if "--check" in sys.argv:
        if wanted != text:
            print(f"out of date: {PAGE}: run python docs/generate_resting.py")
        return int(wanted != text)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
