"""The field's words: what a reader of PyTorch's, vLLM's or PEFT's documentation would look for, and short sentences.

Pages are read as prose: code, tables and generated blocks are left out. Of Python, docstrings and the names that a
module defines are read. ROOMS_NOT_CLEAN shrinks as rooms are mended; nothing may be added to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tessellm"
BANNED = {  # a word, and what to say instead
    r"laws?": "distribution, component",
    r"habits?": "calibration",
    r"astray": "misrouted",
    r"who(m|se)?ever": "name the request, member or user",
    r"a(sleep|wake)|sleepers?": "idle, active",
    r"(is|are|was|were) told": "takes, is given",
    r"believes?|belief|believed": "posterior, selected",
    r"heard": "observed",
    r"spoilt|tainted": "nonfinite",
    r"of which": "two sentences",
}
BANNED_IN_NAMES = r"laws?|habits?|beliefs?|astray|whoever|asleep|awake|said|heard|spoilt|tainted|voices?"
ROOMS_NOT_CLEAN = (
    "serve",
    "text",
)
PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "lab" / "docs").glob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
MODULES = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in ROOMS_NOT_CLEAN]
LONGEST = 25  # words of a sentence
WIDEST = 120  # characters of a line
NO_PROSE = r"```.*?```|<!-- ([\w-]+) -->.*?<!-- end \1 -->"  # code and generated blocks


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def paragraphs(page: Path) -> Iterator[str]:
    """The prose of a page: no code, tables, headings, formulas or generated blocks; links by their words."""
    text = re.sub(NO_PROSE, "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text):
        if not re.match(r"\s*[|#<]|    \S", block):
            yield re.sub(r"\]\([^)]*\)|`[^`]*`", "]", " ".join(block.split()))


def sentences(prose: str) -> list[str]:
    return re.split(r"(?<=[.!?:;])[\"*)\]]*\s+|\*\*\s", prose)


def found_in(prose: str) -> list[str]:
    """Words of the list in a text, each with what to say."""
    return [
        f"{match[0]!r}: say {better}"
        for word, better in BANNED.items()
        for match in re.finditer(rf"\b({word})\b", prose, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert [word for prose in paragraphs(page) for word in found_in(prose)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_sentences_and_lines_are_short(page: Path) -> None:
    long = [each for prose in paragraphs(page) for each in sentences(prose) if len(each.split()) > LONGEST]
    assert long == []
    lines = re.sub(NO_PROSE, "", page.read_text(encoding="utf-8"), flags=re.DOTALL).splitlines()
    assert [line for line in lines if len(line) > WIDEST and not line.startswith(("|", "    "))] == []


def names_of(tree: ast.Module) -> set[str]:
    """The names that a module defines: functions, classes, arguments, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_code_uses_the_words_of_the_field(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    assert [word for text in texts for word in found_in(re.sub(r"`[^`]*`", "", text))] == []
    words = {name for name in names_of(tree) if set(re.split(r"_|(?<=[a-z])(?=[A-Z])", name.lower())) & NAMES}
    assert words == set()


NAMES = {word for part in BANNED_IN_NAMES.split("|") for word in (part.replace("?", ""), part.replace("s?", ""))}


def test_rooms_not_clean_exist() -> None:
    assert [room for room in ROOMS_NOT_CLEAN if not (SOURCE / room).is_dir()] == []
