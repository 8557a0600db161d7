"""What active_members.py set out to show, from its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server_latency import LIMIT
from tessellm_lab.common.claims import Claim, at_least, at_most

EXPERT, LEFT, LATER, MEMORY, SERVED = 2.4, 1.3, 1.15, 1.15, 0.65


def claims_of(tables: Mapping[str, Any]) -> list[Claim]:
    """Return the claims of the parts that were measured."""
    found = []
    for part, rows in tables.items():
        kind = part.split()[0]
        found += {"tokens": _tokens, "memory": _memory, "server": _server, "base": _base}[kind](rows)
    return found


def _tokens(rows: Mapping[str, Any]) -> list[Claim]:
    claims, count = [], rows["experts"]
    for length, row in rows["prompts"].items():
        for key, limit, what in (
            ("expert first", EXPERT, "first token, routed to an expert"),
            ("left first", LEFT, "first token, left to the base"),
            ("expert step", LATER, "later tokens, routed to an expert"),
            ("left step", LATER, "later tokens, left to the base"),
        ):
            statement = f"{count} experts, prompt of {length}: {what}, over the base alone"
            claims.append(at_most(f"{key}-{count}-{length}", statement, round(row[f"{key} over base"], 3), limit))
    return claims


def _memory(rows: Mapping[str, Any]) -> list[Claim]:
    count, needed = rows["experts"], rows["base_mib"] + rows["adapters_mib"]
    statement = f"{count} experts: memory over that of the base alone and the adapters' weights"
    return [at_most(f"memory-{count}", statement, round(rows["mib"] / needed, 3), MEMORY)]


def _server(rows: Mapping[str, Any]) -> list[Claim]:
    whole, base = rows["composition"], rows["base alone"]
    rate = round(whole["requests_per_second"] / base["requests_per_second"], 3)
    what = f"server, 5 experts, {rows['clients']} clients"
    claims = [at_least("server", f"{what}: requests per second over those of the base alone", rate, SERVED)]
    for name, row in (("composition", whole), ("base alone", base)):
        over, statement = (
            round(row["load_0.8"]["p99_over_median"], 2),
            f"{name} at 80 % load: 99 % of gaps over the median",
        )
        claims.append(at_most(f"gaps-{name}", statement, over, LIMIT))
    return claims


def _base(rows: Mapping[str, Any]) -> list[Claim]:
    """Milliseconds of the base alone, here over there."""
    return [
        at_most(f"base-{name}", f"base alone, {name}: over the other commit's", round(row["here"] / row["old"], 3), 1.0)
        for name, row in rows.items()
        if isinstance(row, dict) and "old" in row
    ]
