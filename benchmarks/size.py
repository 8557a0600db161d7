"""How large the project is: lines of the library by room, options of all commands, words of docs, minutes of tests.

    python benchmarks/size.py [REPORT]      # of pytest: --junitxml FILE, or what --durations=0 printed

Blank lines and comments count, tests do not. Minutes are those of each test and its fixtures, added up.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent


def lines(package: Path) -> dict[str, int]:
    """Lines of Python by room: the folders of a package, and its top."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        inner = path.relative_to(package).parts
        found[inner[0] if len(inner) > 1 else "(top)"] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(found.most_common())


def options() -> dict[str, int]:
    """Options of each of the library's commands, --help not counted."""
    import click
    import typer

    from tessellm.commands.app import app
    from tessellm.commands.plugins import plugin_names

    group = typer.main.get_command(app)
    context = click.Context(group)
    own = [name for name in group.list_commands(context) if name not in plugin_names()]
    commands = {name: group.get_command(context, name) for name in own}
    return {
        name: sum(each.param_type_name == "option" for each in command.params)  # --help is made later
        for name, command in commands.items()
    }


def words(*places: Path) -> int:
    """Words of Markdown pages."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in places)


def test_minutes(report: Path) -> float:
    """Minutes of all tests of a report, added up."""
    text = report.read_text(encoding="utf-8")
    if text.lstrip().startswith("<"):
        return sum(float(case.get("time", 0)) for case in ElementTree.fromstring(text).iter("testcase")) / 60
    return sum(map(float, re.findall(r"^\s*(\d+\.\d+)s (?:call|setup|teardown)\b", text, re.MULTILINE))) / 60


def main() -> None:
    for name, package in (("src/tessellm", "src/tessellm"), ("lab", "lab/src/tessellm_lab")):
        rooms = lines(ROOT / package)
        print(f"{name}: {sum(rooms.values()):,} lines")
        print("   ", ", ".join(f"{room} {count:,}" for room, count in rooms.items()))
    counted = options()
    print(f"options over all commands: {sum(counted.values())}")
    print("   ", ", ".join(f"{name} {count}" for name, count in counted.items()))
    library, lab = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"], (ROOT / "lab" / "docs").glob("*.md")
    print(f"words of docs: library {words(*library):,}, lab {words(*lab):,}")
    for report in sys.argv[1:]:
        print(f"{report}: {test_minutes(Path(report)):.1f} minutes of tests")


if __name__ == "__main__":
    main()
