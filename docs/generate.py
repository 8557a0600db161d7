"""The README's generated blocks: `python docs/generate.py` writes them, `--check` says whether they are current.

The tree's comments are the first lines of the modules' docstrings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FOLDERS = {
    "tests/": "mirror src",
    "recipes/": "ready YAML",
    "examples/": "short scripts",
    "benchmarks/": "speed, as ratios in one run",
    "docs/": "one page a capability; log.md keeps what did not work",
    "results/": "JSON and figures with commit, seed, versions and hardware",
}


def purpose_of(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0].rstrip(".")


def tree() -> Iterator[str]:
    yield "src/tessellm/"
    package = ROOT / "src" / "tessellm"
    for path in sorted(package.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.suffix == ".py" and path.name != "__init__.py":
            yield f"  {path.name:<20} {purpose_of(path)}"
        elif (path / "__init__.py").is_file():
            yield f"  {path.name + '/':<20} {purpose_of(path / '__init__.py')}"
    for name, purpose in FOLDERS.items():
        yield f"{name:<22} {purpose}"


def with_block(text: str, name: str, lines: Iterator[str]) -> str:
    block = "\n".join([f"<!-- {name} -->", "```text", *lines, "```", f"<!-- end {name} -->"])
    found = re.compile(f"<!-- {name} -->.*?<!-- end {name} -->", re.DOTALL)
    assert found.search(text), f"README.md has no block {name!r}"
    return found.sub(lambda _: block, text)


def main() -> int:
    text = README.read_text(encoding="utf-8")
    current = with_block(text, "tree", tree())
    if "--check" in sys.argv:
        if current != text:
            print("README.md is out of date: run python docs/generate.py")
        return int(current != text)
    README.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
