"""Tables of the page on routing, as lines of Markdown, from the results in lab/results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Row = Callable[..., str]


def tables(contents: Mapping[str, Any], row: Row) -> dict[str, Iterator[str]]:
    """Return the page's blocks by name; of results that are not there none."""
    made = {"routing": routing, "written": written, "two-skills": two_skills, "full-tunes": full_tunes}
    return {name: block(contents, row) for name, block in made.items() if name in contents}


def routing(contents: Mapping[str, Any], row: Row) -> Iterator[str]:
    """Yield routers by what they were given: shares right in percent at one retention."""
    content = contents["routing"]
    table, sets = content["tables"]["twenty"], content["tables"]["sets"]
    told = ", ".join(f"{cell} {found['of']}" for cell, found in next(iter(table.values()))["cells"].items())
    yield f"{measured_on(content)} Prompts: {told}."
    yield ""
    yield "| router: what it was given | seen | unseen | near kept | plain, shipped | closed: seen · unseen |"
    yield "|---|---|---|---|---|---|"
    for name, entry in table.items():
        cells = entry["cells"]
        shipped = f"{100 * cells['plain']['shipped']:.1f}" if "shipped" in cells["plain"] else ""
        closed = " · ".join(f"{100 * cells[cell]['closed']:.1f}" for cell in ("seen", "unseen"))
        yield row(name, *(percent(cells[cell]) for cell in ("seen", "unseen", "near")), shipped, closed)
    if "routing-belief" in contents:
        older = contents["routing-belief"]
        shares = [f"{100 * older['cells'][cell]['share']:.1f}" for cell in ("seen", "unseen", "near", "plain")]
        yield row(f"`belief`, the default before (commit {older['commit'][:7]}), its own threshold", *shares, "")
    yield ""
    yield "| random sets | router | seen | unseen | near kept |"
    yield "|---|---|---|---|---|"
    for count, columns in sets.items():
        for name, cells in columns.items():
            yield row(f"{count} experts", name, *(percent(cells[cell]) for cell in ("seen", "unseen", "near")))
    yield ""
    yield "![Share that reaches the right expert](../results/routing.png)"


def written(contents: Mapping[str, Any], row: Row) -> Iterator[str]:
    """Yield what compositions write, as shares of the experts' own scores, in percent."""
    content = contents["written"]
    yield measured_on(content)
    yield ""
    yield "| experts: who writes | seen | unseen | plain: the base's text | near: the base's text |"
    yield "|---|---|---|---|---|"
    for title, table in content["tables"].items():
        for name, cells in table["columns"].items():
            yield row(f"{title}: {name}", *(percent(cells[cell]) for cell in ("seen", "unseen", "plain", "near")))


def two_skills(contents: Mapping[str, Any], row: Row) -> Iterator[str]:
    """Yield the mean of both judges, in percent."""
    content = contents["two-skills"]
    yield measured_on(content)
    yield ""
    yield "| prompts | column | score | the mixture less it |"
    yield "|---|---|---|---|"
    for kind, table in content["tables"].items():
        for name, cell in table["scores"].items():
            less = table["mixture less"].get(name)
            told = f"{100 * less['mean']:.1f} ({100 * less['low']:.1f} to {100 * less['high']:.1f})" if less else ""
            yield row(f"{kind}, {table['prompts']}", name, percent(cell), told)


def full_tunes(contents: Mapping[str, Any], row: Row) -> Iterator[str]:
    """Yield the shares of full fine-tunes, in percent."""
    content = contents["full-tunes"]
    found = content["tables"]["nothing given"]["cells"]
    yield f"{measured_on(content)} {content['tables']['steps']} steps of {content['tables']['texts']} texts."
    yield ""
    yield "| " + " | ".join(found) + " |"
    yield "|---" * len(found) + "|"
    yield row(*(percent(cell) for cell in found.values()))


def measured_on(content: Mapping[str, Any]) -> str:
    return (
        f"Seed {content['seed']}, {content['hardware']}, commit {content['commit'][:7]}. Percent, with 95 % intervals."
    )


def percent(cell: Mapping[str, Any]) -> str:
    """Return a share with its interval."""
    return f"{100 * cell['share']:.1f} ({100 * cell['low']:.0f}–{100 * cell['high']:.0f})"
