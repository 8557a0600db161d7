"""Do two folders of results say the same? Compares every claim: its value, and whether it holds.

    python benchmarks/compare_results.py BEFORE AFTER

Exit code 1 where a claim differs or is gone. Claims that came new are named and are no difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def claims(path: Path) -> dict[str, dict[str, Any]]:
    """The claims of a result, by their ids; none where there is no such file."""
    return {claim["id"]: claim for claim in json.loads(path.read_text()).get("claims", [])} if path.exists() else {}


def differences(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[str]:
    """What differs of a result's claims, or is gone."""
    return [
        f"{name}: {_said(claim)} → {_said(new[name]) if name in new else 'gone'}"
        for name, claim in old.items()
        if name not in new or _said(claim) != _said(new[name])
    ]


def _said(claim: dict[str, Any]) -> str:
    return f"{claim['value']} ({'holds' if claim['holds'] else 'does not hold' if claim['holds'] is False else 'told'})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    for folder in (given.before, given.after):
        if not list(folder.glob("*.json")):
            parser.error(f"{folder} has no results; expected JSON files that `tessellm reproduce … -o FOLDER` writes")
    same = True
    for path in sorted(given.before.glob("*.json")):
        old, new = claims(path), claims(given.after / path.name)
        lines = differences(old, new)
        same = same and not lines
        print(f"{path.stem}: {len(old)} claims, {len(lines)} differ, {len(new.keys() - old.keys())} came new")
        for line in lines:
            print(f"  {line}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
