"""The lab is made of the library: it imports no private name of it, and its commands register and import light."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import tessellm_lab

SOURCE = Path(tessellm_lab.__file__).parent


def test_the_lab_uses_no_private_name_of_the_library() -> None:
    private = [
        f"{path.relative_to(SOURCE)}: {node.module}.{alias.name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tessellm.")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not private


def test_its_commands_are_registered_and_import_nothing_heavy() -> None:
    names = {each.name: each.value for each in entry_points(group="tessellm.commands")}
    assert set(names) >= {"probe", "reproduce"}
    modules = ", ".join(sorted(value.partition(":")[0] for value in names.values()))
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers', 'numpy'}} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "[]\n"


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports test files by their bare names: two of one name cannot be collected together."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
