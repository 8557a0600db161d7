"""Take what `tessellm reproduce` wrote elsewhere into this repository: `python lab/docs/keep_results.py FOLDER`.

Results go to lab/results/ with the commit that ran (`--commit`; else HEAD where the other machine had no git), pictures
are drawn where it had no matplotlib, the table's samples go along, trained members go into the package, and the
README's blocks are brought up to date.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from tessellm_lab.trig import experiment as trig
from tessellm_lab.trig.members import KEPT, MEMBERS_FILE

ROOT = Path(__file__).resolve().parents[2]


def keep(source: Path, results: Path, kept_members: Path, commit: str, known: bool = False) -> list[str]:
    """The names of what was kept. `known`: that commit ran, whatever the other machine's repository says."""
    kept = []
    for path in sorted(source.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "claims" not in content:
            continue
        content["commit"] = commit if known else content["commit"] or commit
        if content["name"] == "trig" and not content["figures"]:
            content["figures"] = trig.draw_examples(content["tables"], source)
        (results / path.name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for figure in content["figures"]:
            shutil.copyfile(source / figure, results / figure)
        kept += [path.name, *content["figures"]]
    for path in sorted((source / "table").glob("*.json*")):
        (results / "table").mkdir(exist_ok=True)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            facts = json.loads(text)
            text = json.dumps({**facts, "commit": facts["commit"] or commit}, indent=1, ensure_ascii=False) + "\n"
        (results / "table" / path.name).write_text(text, encoding="utf-8")
        kept.append(f"table/{path.name}")
    if (source / MEMBERS_FILE).is_file():
        shutil.copyfile(source / MEMBERS_FILE, kept_members)
        kept.append(kept_members.name)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", help="the commit that ran; HEAD if not given")
    given = parser.parse_args()
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    for name in keep(
        given.folder, ROOT / "lab" / "results", KEPT, given.commit or head.stdout.strip(), bool(given.commit)
    ):
        print("kept", name)
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py")], check=True)


if __name__ == "__main__":
    main()
