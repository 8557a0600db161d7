"""A hook of mkdocs: pages and figures of lab/ are part of the site, and links between both work there, too.

In the repository the library's pages link to `../lab/docs/PAGE.md` and `../lab/results/FIGURE.png`, the lab's to
`../../docs/PAGE.md` and `../results/FIGURE.png`. In the site the lab's pages are `lab/PAGE.md`, figures `results/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LAB = Path(__file__).resolve().parent.parent / "lab"
LINKS = {"](../lab/docs/": "](lab/", "](../lab/results/": "](results/", "](../../docs/": "](../"}


def on_files(files: Files, config: Any) -> Files:
    for page in sorted((LAB / "docs").glob("*.md")):
        files.append(File.generated(config, f"lab/{page.name}", abs_src_path=str(page)))
    for figure in sorted((LAB / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    for repository, site in LINKS.items():
        markdown = markdown.replace(repository, site)
    return markdown
