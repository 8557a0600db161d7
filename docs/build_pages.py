"""A hook of mkdocs: pages that lie elsewhere, links between them, and blocks that are made when the site is built.

In the repository the library's pages link to `../lab/docs/PAGE.md` and `../CONTRIBUTING.md`, the lab's to
`../../docs/PAGE.md`. In the site the lab's pages are `lab/PAGE.md`, and CONTRIBUTING.md is `contributing.md`.
A line `<!-- build: NAME -->` becomes the block of that name: see `blocks`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINKS = {
    "](../lab/docs/": "](lab/",
    "](../lab/results/": "](results/",
    "](../../docs/": "](../",
    "](../CONTRIBUTING.md": "](contributing.md",
    "](docs/": "](",  # CONTRIBUTING.md's
}
MARKER = re.compile(r"^<!-- build: ([\w-]+) -->$", re.MULTILINE)
FENCE = "```"


def module(path: Path) -> Any:
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    spec.loader.exec_module(found)
    return found


def commands() -> Iterable[str]:
    """The help of every command of the library."""
    import click
    import typer

    from tessellm.commands.app import app

    group = typer.main.get_command(app)
    with click.Context(group, info_name="tessellm", max_content_width=100, terminal_width=100) as parent:
        for name in group.list_commands(parent):  # type: ignore[attr-defined]
            command = group.get_command(parent, name)  # type: ignore[attr-defined]
            with click.Context(command, info_name=name, parent=parent, terminal_width=100) as context:
                yield from (f"### tessellm {name}", "", FENCE + "text", command.get_help(context), FENCE, "")


def blocks() -> dict[str, Callable[[], Iterable[str]]]:
    """What makes each block."""
    generate, tables = module(DOCS / "generate.py"), module(ROOT / "lab" / "docs" / "generate_rules.py")
    return {
        "commands": commands,
        "results": lambda: generate.all_results(ROOT / "results"),
        "lab-results": lambda: generate.all_results(ROOT / "lab" / "results"),
        **tables.TABLES,
    }


def filled(markdown: str) -> str:
    """A page with its blocks."""
    if not MARKER.search(markdown):
        return markdown
    made = blocks()
    return MARKER.sub(lambda found: "\n".join(made[found[1]]()), markdown)


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "contributing.md", abs_src_path=str(ROOT / "CONTRIBUTING.md")))
    for page in sorted((ROOT / "lab" / "docs").glob("*.md")):
        files.append(File.generated(config, f"lab/{page.name}", abs_src_path=str(page)))
    for figure in sorted((ROOT / "lab" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    for repository, site in LINKS.items():
        markdown = markdown.replace(repository, site)
    return filled(markdown)
