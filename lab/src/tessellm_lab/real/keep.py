"""Keep trained adapters where experiments and the demo find them, with the scores that were measured in their cards.

    python -m tessellm_lab.real.keep [--trained FOLDER] [--seed N] [--result lab/results/real.json]

Without --trained, the adapters stay and their cards are written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tessellm.demo.adapters import adapters_folder
from tessellm.errors import TessellmError
from tessellm.files import stored, write_text

from .peft_files import CARD, WEIGHTS, card, read_facts, write_adapter
from .skills import SKILLS


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, copy, write cards; 2 where something that was given is wrong."""
    parser = argparse.ArgumentParser("python -m tessellm_lab.real.keep", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trained", type=Path, help="what the training script wrote: NAME-SEED")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="real.json, whose scores go into the cards")
    parser.add_argument("--adapters", type=Path, help="where adapters are kept; default: the repository's")
    given = parser.parse_args(arguments)
    try:
        keep(adapters_folder(given.adapters), given.trained, given.seed, given.result)
    except TessellmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def keep(adapters: Path, trained: Path | None, seed: int, result: Path | None) -> None:
    """Replace the kept adapters by trained ones, if there are any, and write all cards."""
    cells = scores_of(result) if result is not None else {}
    for name in SKILLS:
        folder = adapters / name
        source = trained / f"{name}-{seed}" if trained is not None else folder
        if not (source / WEIGHTS).is_file():
            raise TessellmError(f"there is no adapter in {source}. Expected what the training script wrote")
        facts = read_facts(source)
        if source != folder:
            write_adapter(folder, load_file(source / WEIGHTS), facts)
        write_text(folder / CARD, card(facts, cells.get(name)))


def scores_of(result: Path) -> dict[str, dict[str, str]]:
    """Rows for each skill's card: its expert's score and likelihood on test prompts, beside the base's."""
    with stored(result, "Give the real.json of a run"):
        content = json.loads(result.read_text(encoding="utf-8"))
        tasks = next(iter(content["tables"]["sets"].values()))["tasks"]
        return {name: _rows(name, tasks[name]) for name in SKILLS if name in tasks}


def _rows(name: str, cells: Mapping[str, Any]) -> dict[str, str]:
    own, base, rows = cells[name], cells["base"], {}
    if "nats" in own:
        rows[f"nats per answer token, {own['texts']} test texts"] = f"{own['nats']:.3f} (base {base['nats']:.3f})"
    if "right" in own:
        what = f"{SKILLS[name].judged_by}: score when writing greedily, {own['prompts']} test prompts"
        rows[what] = f"{own['right']['mean']:.3f} (base {base['right']['mean']:.3f})"
    return rows


if __name__ == "__main__":
    sys.exit(main())
