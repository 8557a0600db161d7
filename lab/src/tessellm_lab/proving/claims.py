"""The claims of the routing table, with their targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.claims import Claim, at_least
from .columns import DESCRIPTION, NOTHING, OURS

SEEN, UNSEEN, NEAR, PLAIN = "seen", "unseen", "near", "plain"
TOLD, TITLES = "with instruction", {SEEN: "wordings of training", UNSEEN: "other wordings", NEAR: "near prompts kept"}
TARGETS = {  # column: the least of seen, unseen, near
    f"{OURS}: {NOTHING}": (0.90, 0.68, 0.95),
    f"{OURS}: {DESCRIPTION}, token vectors": (0.93, 0.76, 0.95),
    f"{OURS}: {DESCRIPTION}, MiniLM": (0.94, 0.84, 0.95),
    f"{OURS}: {DESCRIPTION}, 1 example, MiniLM": (0.94, 0.86, 0.93),
    f"{OURS}: {DESCRIPTION}, 8 examples, MiniLM": (0.97, 0.90, 0.93),
}
FIVE = (0.97, 0.95, 0.93)
INSTRUCTED = (0.975, 0.87)
BEST = f"{OURS}: {DESCRIPTION}, MiniLM"


def claims_of(tables: Mapping[str, Any]) -> list[Claim]:
    """Return what the tables show, with targets where there are any."""
    table, found = tables["twenty"], []
    for column, least in TARGETS.items():
        if column in table:
            cells = table[column]["cells"]
            for cell, bound in zip((SEEN, UNSEEN, NEAR), least, strict=True):
                statement = f"all experts, {column}, 95 % of ordinary prompts kept: {TITLES[cell]}"
                found.append(at_least(_id(column, cell), statement, cells[cell]["share"], bound))
            found.append(Claim(_id(column, "shipped"), f"{column}: kept as shipped", cells[PLAIN]["shipped"]))
    found += _best(table)
    found += _ahead(table)
    for cell, bound in zip((SEEN, UNSEEN, NEAR), FIVE, strict=True):
        shares = tables["sets"].get("5", {}).get(BEST)
        if shares:
            statement = f"random sets of five, {BEST}: {TITLES[cell]}"
            found.append(at_least(f"five-{cell}", statement, shares[cell]["share"], bound))
    without = tables["without a template"].get(f"{OURS}: {DESCRIPTION}, token vectors")
    if without:
        for cell in (SEEN, UNSEEN):
            value = without["cells"][cell]["share"]
            statement = f"prompts without a template, a description, token vectors: {TITLES[cell]}"
            found.append(
                at_least(f"completion-{cell}", statement, value, 0.90)
                if cell == SEEN
                else Claim(f"completion-{cell}", statement, value)
            )
    return found


def _best(table: Mapping[str, Any]) -> list[Claim]:
    """Return the claims on the column that has a description and MiniLM."""
    if BEST not in table:
        return []
    cells, found = table[BEST]["cells"], []
    for cell, bound in zip((SEEN, UNSEEN), INSTRUCTED, strict=True):
        if cells[cell][TOLD] is not None:
            statement = f"{BEST}, skills with an instruction in the prompt: {TITLES[cell]}"
            found.append(at_least(f"instructed-{cell}", statement, cells[cell][TOLD], bound))
    for cell, bound, words in (
        ("conversations", 0.95, "skills in conversations"),
        ("follow-ups", 0.90, "plain follow-ups kept"),
    ):
        if cell in cells:
            found.append(at_least(cell, f"{BEST}: {words}", cells[cell]["share"], bound))
    return found


def _ahead(table: Mapping[str, Any]) -> list[Claim]:
    """Return by how much ours is ahead of the best peer that was given as much, in each cell."""
    found = []
    peers = {name: entry for name, entry in table.items() if entry["family"] != OURS}
    for given in dict.fromkeys(entry["given"] for entry in peers.values()):
        ours = [entry for entry in table.values() if entry["family"] == OURS and entry["given"] == given]
        if ours:
            others = [entry for entry in peers.values() if entry["given"] == given]
            found.append(
                _margin(f"ahead-{given.replace(' ', '-')}", f"given {given}: ours less the best peer", ours, others)
            )
    most = max((entry["examples"] for entry in peers.values()), default=0)
    if BEST in table and most:
        others = [entry for entry in peers.values() if entry["examples"] == most]
        statement = f"ours with a description and no example, less the best peer with {most} examples"
        found.append(_margin("description-ahead", statement, [table[BEST]], others))
    return found


def _margin(name: str, statement: str, ours: list[Any], others: list[Any]) -> Claim:
    """Return the smallest of the margins over the cells, each of the best of both sides."""
    cells = (SEEN, UNSEEN)
    best = [[max(entry["cells"][cell]["share"] for entry in side) for cell in cells] for side in (ours, others)]
    margins = {cell: a - b for cell, a, b in zip(cells, *best, strict=True)}
    value = {cell: round(margin, 4) for cell, margin in margins.items()}
    return Claim(name, statement, value, "> 0", min(margins.values()) > 0)


def _id(column: str, cell: str) -> str:
    return f"{column.partition(': ')[2].replace(', ', '-').replace(' ', '-')}-{cell}"
