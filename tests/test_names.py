"""One word, one thing: no two public classes of the library have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import tessellm

SOURCE = Path(tessellm.__file__).parent


def public_classes() -> dict[str, list[str]]:
    """Where every public class is."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(SOURCE).as_posix())
    return dict(found)


def test_no_two_classes_have_the_same_name() -> None:
    twice = {name: places for name, places in public_classes().items() if len(places) > 1}
    assert not twice


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports test files by their bare names: two of one name cannot be collected together."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
