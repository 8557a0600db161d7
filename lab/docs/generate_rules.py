"""Measured tables of the lab's pages. `python lab/docs/generate_rules.py` writes the one that is kept in a page,
`--check` compares it; the others are made when the site is built."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "results"
OTHERS = "real-trainings"  # a run with adapters that are not kept
RULES = ("oracle", "evidence", "novelty", "owner", "tail-floor", "contrastive", "dexperts", "eq2")
MERGES = ("task-arithmetic", "ties", "dare")
REGIMES = ("aligned", "aware", "clean", "narrow")


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def measured_on(content: dict[str, Any]) -> str:
    commit = str(content["commit"])[:7]
    return f"Seed {content['seed']}, {content['hardware']}, torch {content['versions']['torch']}, commit {commit}."


def skills(index: int, chains: Sequence[int], regimes: Sequence[str] = REGIMES) -> Iterator[str]:
    content = load("skills")
    label, table = list(content["tables"].items())[index]
    yield f"{label}. {measured_on(content)}\n"
    yield row("regime", "experts", "chain", *RULES, "best merge")
    yield row(*["---"] * (4 + len(RULES)))
    for cell in table:
        if cell["chain"] in chains and cell["regime"] in regimes:
            share = {rule: result["share"] for rule, result in cell["rules"].items()}
            shown = [*(share[rule] for rule in RULES), max(share[merge] for merge in MERGES)]
            yield row(cell["regime"], cell["experts"], cell["chain"], *(f"{value:.2f}" for value in shown))


def letters() -> Iterator[str]:
    content = load("many-experts")
    names = ("evidence", "owner", "tail-floor", "contrastive", "dexperts", "eq2")
    yield f"Length 31. {measured_on(content)}\n"
    yield row("experts", *names, "mean, max abs log Z")
    yield row(*["---"] * (2 + len(names)))
    for cell in content["tables"]["letters"]:
        if cell["length"] == 31 and cell["experts"] in (1, 2, 3, 4, 5, 6, 8, 13):
            z = cell["log_z"]
            shares = [f"{cell['rules'][name]['share']:.3f}" for name in names]
            yield row(cell["experts"], *shares, f"{z['mean']:.2f}, {z['max']:.1f}")


def endings(policies: Sequence[tuple[str, str]] | None = None) -> Iterator[str]:
    content = load("endings")
    yield f"{measured_on(content)}\n"
    yield row("composition", "rule", "policy", "ends right", "early", "over-generates", "exact match")
    yield row(*["---"] * 7)
    for cell in content["tables"]["endings"]:
        if policies is None or (cell["rule"], cell["policy"]) in policies:
            kinds = ("ends right", "ends early", "over-generates", "exact match")
            yield row(cell["case"], cell["rule"], cell["policy"], *(f"{cell[kind]['share']:.4f}" for kind in kinds))


def table() -> Iterator[str]:
    """The table in miniature: shares right in percent, with intervals."""
    content = load("table")
    cells, kinds = content["tables"]["cells"], list(content["tables"]["cells"])
    problems = cells[kinds[0]]["base"]["problems"]
    yield f"{measured_on(content)} {problems} problems a kind; shares right in percent, with 95 % intervals.\n"
    yield row("", *kinds)
    yield row(*["---"] * (1 + len(kinds)))
    for column in cells[kinds[0]]:
        shares = (cells[kind][column] for kind in kinds)
        yield row(column, *(f"{100 * s['mean']:.1f} ({100 * s['low']:.0f}–{100 * s['high']:.0f})" for s in shares))


def real_written(result: str) -> Iterator[str]:
    """Scores when writing: a row per column that wrote."""
    content = load(result)
    table = content["tables"]["sets"]["five"]
    tasks = [task for task, cells in table["tasks"].items() if "right" in cells["base"]]
    shares, gains = table["mean share of the expert's score"], table["the default rule less each peer"]
    yield f"{measured_on(content)}\n"
    yield row("", *tasks, "mean share of the expert's", "the default less it, 95 %")
    yield row(*["---"] * (3 + len(tasks)))
    yield row("the expert itself", *(f"{table['tasks'][task][task]['right']['mean']:.3f}" for task in tasks), "1", "")
    for name in (each for each, kind in table["columns"].items() if kind != "expert"):
        cells = [table["tasks"][task].get(name, {}) for task in tasks]
        if not any("right" in cell for cell in cells):
            continue
        scores = [f"{cell['right']['mean']:.3f}" if "right" in cell else "not measured" for cell in cells]
        gain = f"{gains[name]['low']:.2f} to {gains[name]['high']:.2f}" if name in gains else ""
        yield row(name, *scores, f"{shares[name]:.3f}" if name in shares else "", gain)
    ours = [table["tasks"][task]["belief (default)"]["share"] for task in tasks]
    kept = ", ".join(
        f"{task} {share['low']:.2f} to {share['high']:.2f}" for task, share in zip(tasks, ours, strict=True)
    )
    counts = ", ".join(f"{table['tasks'][task]['base']['prompts']} {task}" for task in tasks)
    yield f"\nThe default's share of the expert's score, 95 % intervals: {kept}. Test prompts: {counts}."


def real_read(result: str) -> Iterator[str]:
    """Nats per token of reference answers: a row per column that read."""
    table = load(result)["tables"]["sets"]["five"]
    yield row("", *table["tasks"])
    yield row(*["---"] * (1 + len(table["tasks"])))
    own = [cells[task]["nats"] if task in cells else float("nan") for task, cells in table["tasks"].items()]
    yield row("the expert itself", *("" if nats != nats else f"{nats:.3f}" for nats in own))
    for name in (each for each, kind in table["columns"].items() if kind != "expert"):
        cells = [task.get(name, {}) for task in table["tasks"].values()]
        if any("nats" in cell for cell in cells):
            yield row(name, *(f"{cell['nats']:.3f}" if "nats" in cell else "not measured" for cell in cells))


def real_blends() -> Iterator[str]:
    """What was asked for with capitals: a row per column, a column per blend."""
    measured = load(OTHERS)["tables"]["sets"]
    sets = {name: table for name, table in measured.items() if name.endswith("+capitals")}
    yield row("right without case · share of capitals", *sets)
    yield row(*["---"] * (1 + len(sets)))
    kinds = {name: kind for table in sets.values() for name, kind in table["columns"].items() if kind != "expert"}
    for name in ("the domain's expert", "capitals", *kinds):
        cells = []
        for blend, table in sets.items():
            cell = table["tasks"][blend].get(blend.partition("+")[0] if name == "the domain's expert" else name, {})
            both = [cell[metric]["mean"] for metric in ("without case", "capitals") if metric in cell]
            cells.append(" · ".join(f"{value:.3f}" for value in both) or "not measured")
        yield row(name, *cells)


def real_others() -> Iterator[str]:
    """The default beside each skill's own expert in other sets: a row per set and skill."""
    yield row("set", "skill", "the expert", "the default", "share, 95 %", "nats over the expert's")
    yield row(*["---"] * 6)
    for name, result in (("six", "real"), ("math+code", "real"), ("six-other", OTHERS), ("twins", OTHERS)):
        for task, cells in load(result)["tables"]["sets"][name]["tasks"].items():
            own, ours = cells.get(task, cells.get("base", {})), cells.get("belief (default)", {})
            scores = [f"{cell['right']['mean']:.3f}" if "right" in cell else "" for cell in (own, ours)]
            share = "{mean:.2f} ({low:.2f} to {high:.2f})".format(**ours["share"]) if "share" in ours else ""
            read = f"{ours['nats'] / own['nats']:.4f}" if "nats" in ours and "nats" in own else ""
            if any([*scores, read]):
                yield row(name, task, *scores, share, read)


def real_costs() -> Iterator[str]:
    """What columns cost, over the base alone."""
    over = " over the base's"
    yield row("", "ms per token", "over the base's", "GB", "over the base's")
    yield row(*["---"] * 5)
    for name, cost in load("real")["tables"]["costs"].items():
        ms, size = (f"{cost[what + over]:.1f}" for what in ("ms per token", "bytes"))
        yield row(name, f"{cost['ms per token']:.2f}", ms, f"{cost['bytes'] / 1e9:.1f}", size)


BLOCKS = {"lab/docs/experiments-real.md": {"written": lambda: real_written("real")}}
TABLES: dict[str, Callable[[], Iterator[str]]] = {  # what the site's build puts in the place of `<!-- build: NAME -->`
    "real-read": lambda: real_read("real"),
    "real-others": real_others,
    "real-blends": real_blends,
    "real-costs": real_costs,
    "letters": letters,
    "skills": lambda: skills(0, chains=[2]),
    "endings": lambda: endings([("eq2", "rule"), ("evidence", "rule"), ("evidence", "owner")]),
    "table": table,
}


def current(page: str) -> str:
    """The page with its blocks as results/ has them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, lines in BLOCKS[page].items():
        block = "\n".join([f"<!-- {name} -->", *lines(), f"<!-- end {name} -->"])
        found = re.compile(f"<!-- {name} -->.*?<!-- end {name} -->", re.DOTALL)
        assert found.search(text), f"{page} has no block {name!r}"
        text = found.sub(lambda _, block=block: block, text)  # type: ignore[misc]
    return text


def main() -> int:
    stale = [page for page in BLOCKS if current(page) != (ROOT / page).read_text(encoding="utf-8")]
    if "--check" in sys.argv:
        for page in stale:
            print(f"{page} is out of date: run python lab/docs/generate_rules.py")
        return int(bool(stale))
    for page in stale:
        (ROOT / page).write_text(current(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
