"""Generated blocks of README and pages: `python docs/generate.py` writes them, `--check` asks whether they are current.

The tree's comments are the first lines of the modules' docstrings.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DIAGNOSE = ROOT / "docs" / "diagnose.md"
SERVE = ROOT / "docs" / "serve.md"
TABLE = ROOT / "lab" / "docs" / "experiments-table.md"
LAB = ROOT / "lab"
KEPT = {ROOT / "docs" / "results.md": ROOT / "results", LAB / "docs" / "results.md": LAB / "results"}
FOLDERS = {
    "lab/": "tessellm-lab, its own distribution: experiments, theory, probe, particles; their tests, docs, results",
    "adapters/": "LoRA experts of SmolLM2-135M-Instruct that the project trained",
    "data/": "samples of the test splits that they are judged on",
    "tests/": "mirror src",
    "recipes/": "ready YAML",
    "examples/": "short scripts",
    "benchmarks/": "speed, as ratios in one run",
    "docs/": "one page per capability; architecture.md for who changes the code; log.md: what did not work",
    "results/": "JSON and figures with commit, seed, versions and hardware",
}

HEADLINES = {  # (result, claim): the README's ten rows, in a user's words
    ("real", "five-shares"): "five real LoRA experts at once: mean share of their scores; of merges, Arrow, a router",
    ("real", "five-write-math"): "the same, math: share of the expert's score",
    ("real", "five-read-plain"): "the same, text that concerns no expert: nats per token over the base's",
    ("many-experts", "thirteen"): "13 experts at once: worst share right, rule `evidence`",
    ("many-experts", "collapse"): "13 experts at once: best share right, Eq. 2 (`product`)",
    ("table", "mixed"): "problems that need the math and the coding expert: share right, composed",
    ("table", "mixed-merges"): "the same: how far above every merge of the weights, lowest end of the intervals",
    ("prediction", "spearman"): "`diagnose`: rank correlation of predicted and measured share right, 224 compositions",
    ("gpu-decoding", "equal-tokens"): "the engine: share of greedy tokens that are not the reference's",
    ("gpu-decoding", "full-ms"): "three models in Gemma 2 2B's shapes, batch 1: milliseconds per token",
}
TIMES = ("first_token", "between_tokens")
MARKS = {True: "yes", False: "**no**", None: ""}


@cache
def contents() -> dict[str, Any]:
    """What is in results/ and lab/results/, by name."""
    return {name: content for folder in KEPT.values() for name, content in contents_of(folder).items()}


@cache
def contents_of(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def results() -> Iterator[str]:
    """The headlines, and one line on what did not hold."""
    yield "| what | measured | target | holds | result, on |"
    yield "|---|---|---|---|---|"
    every = contents()
    for (name, claim_id), words in HEADLINES.items():
        content = every[name]
        (claim,) = [claim for claim in content["claims"] if claim["id"] == claim_id]
        yield row(words, *cells_of(claim, content)[1:], f"{name}, {content['hardware']}")
    yield ""
    yield not_held(every)


def not_held(every: dict[str, Any]) -> str:
    """How many claims were judged, and how many of which results did not hold."""
    judged = sum(claim["holds"] is not None for content in every.values() for claim in content["claims"])
    failed = {name: sum(map(failing, content["claims"])) for name, content in every.items()}
    pages = {name: page.relative_to(ROOT) for page, folder in KEPT.items() for name in contents_of(folder)}
    where = ", ".join(f"[{name}]({pages[name]}#{name}) ({count})" for name, count in failed.items() if count)
    return f"Of {judged} claims with a target, {sum(failed.values())} did not hold: {where}."


def all_results(folder: Path) -> Iterator[str]:
    """Every claim of every result there."""
    for name, content in contents_of(folder).items():
        size = f", size {content['size']}" if content["size"] else ""
        yield f"## {name}"
        yield ""
        yield f"Seed {content['seed']}{size}, {content['hardware']}, commit {content['commit'][:7]}."
        yield ""
        yield "| claim | measured | target | holds |"
        yield "|---|---|---|---|"
        for claim in content["claims"]:
            yield row(*cells_of(claim, content))
        yield ""


def failing(claim: dict[str, Any]) -> bool:
    return claim["holds"] is False


def cells_of(claim: dict[str, Any], content: dict[str, Any]) -> list[str]:
    statement = claim["statement"]
    if len({other["statement"] for other in content["claims"]}) < len(content["claims"]):
        statement = f"{claim['id']}: {statement}"  # the statements alone do not tell the claims apart
    return [statement, shown(claim["value"]), claim["target"] or "", MARKS[claim["holds"]]]


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def shown(value: object) -> str:
    if isinstance(value, list):
        return ("; " if any(isinstance(item, dict) for item in value) else ", ").join(map(shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def purpose_of(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0].rstrip(".")


def folder(path: Path, indent: str = "  ") -> Iterator[str]:
    """A folder's line, and those of its folders."""
    yield f"{indent + path.name + '/':<22} {purpose_of(path / '__init__.py')}"
    for each in sorted(path.iterdir()):
        if (each / "__init__.py").is_file():
            yield from folder(each, indent + "  ")


def tree() -> Iterator[str]:
    yield "```text"
    yield "src/tessellm/"
    package = ROOT / "src" / "tessellm"
    for path in sorted(package.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.suffix == ".py" and path.name != "__init__.py":
            yield f"  {path.name:<20} {purpose_of(path)}"
        elif (path / "__init__.py").is_file():
            yield from folder(path)
    for name, purpose in FOLDERS.items():
        yield f"{name:<22} {purpose}"
    yield "```"


def prediction() -> Iterator[str]:
    content = contents()["prediction"]
    yield f"Seed {content['seed']}, {content['hardware']}, commit {content['commit'][:7]}."
    yield ""
    yield "| what | value |"
    yield "| --- | --- |"
    for claim in content["claims"]:
        yield row(claim["statement"], shown(claim["value"]))


def table() -> Iterator[str]:
    """The table in miniature: shares right with intervals."""
    content = contents()["table"]
    cells, kinds = content["tables"]["cells"], list(content["tables"]["cells"])
    seeds, parameters = len(content["tables"]["seeds"]), content["tables"]["seeds"][0]["parameters"]
    yield (
        f"Size {content['size']}: {parameters / 1e6:.1f} million parameters, seeds {content['seed']} to "
        f"{content['seed'] + seeds - 1}, {cells[kinds[0]]['base']['problems']} problems a kind; {content['hardware']}, "
        f"commit {content['commit'][:7]}. Shares right in percent, with 95 % intervals."
    )
    yield ""
    yield "| | " + " | ".join(kinds) + " |"
    yield "| --- |" + " --- |" * len(kinds)
    for column in cells[kinds[0]]:
        shares = (cells[kind][column] for kind in kinds)
        told = (f"{100 * s['mean']:.1f} ({100 * s['low']:.0f}–{100 * s['high']:.0f})" for s in shares)
        yield f"| {column} | " + " | ".join(told) + " |"
    yield ""
    yield "| claim | value | target | holds |"
    yield "| --- | --- | --- | --- |"
    for claim in content["claims"]:
        yield row(*cells_of(claim, content))
    yield ""
    yield "![Shares right by kind of problem and column](../results/table.png)"


def serving() -> Iterator[str]:
    """The server's latencies, and what a minute of many clients did to it."""
    content = contents()["serve-latency"]
    tables, claims = content["tables"], {claim["id"]: claim for claim in content["claims"]}
    load, machine = tables["load"], tables["machine"]
    yield (
        f"{machine['cores']} cores of an {content['hardware']} with a load average of "
        f"{machine['load_average_before']:.1f} from other work before it began; commit {content['commit'][:7]}."
    )
    yield ""
    yield "| clients | first token, ms (median, 95 %) | between tokens, ms | tokens a second |"
    yield "|---|---|---|---|"
    for count, found in ((name.partition(" ")[0], each) for name, each in tables.items() if name.endswith(" clients")):
        times = (f"{found[key]['median_ms']:.0f}, {found[key]['p95_ms']:.0f}" for key in TIMES)
        yield row(count, *times, f"{found['tokens_per_second']:.0f}")
    yield ""
    yield (
        f"16 clients get {claims['batching']['value']:.1f} times the tokens of one. 200 clients for a minute, a third "
        f"of which hang up: {load['answers']} whole answers, {100 * load['other_text']:.3g} % of them with "
        f"another text than the engine writes alone; {load['slots_left']:.0f} slots did not return, and the process of "
        f"{load['memory_mib']:.0f} MiB was {load['memory_growth_mib']:.1f} MiB larger afterwards."
    )


def latency() -> Iterator[str]:
    """What users of a server feel: a composition and its base alone."""
    content = contents()["latency"]
    tables = content["tables"]
    before, machine = tables["load_average_before"], tables["machine"]
    yield (
        f"SmolLM2 and five LoRA experts, float32, {tables['plan']['slots']} slots, {machine['cores']} cores of an "
        f"{content['hardware']} that others used, too (load average {before:.1f} before it began and "
        f"{machine['load_average_after']:.1f} at the end); commit {content['commit'][:7]}. Milliseconds:"
    )
    yield ""
    yield "| server | load | first token (median, 99 %) | gap (median, 99 %, largest) | 99 % over the median |"
    yield "|---|---|---|---|---|"
    for name, server in tables["servers"].items():
        loads = {"the first request": "first_request", "as many clients as slots": "all_slots"}
        for load, key in (loads | {f"{each:.0%}": f"load_{each:g}" for each in tables["plan"]["loads"]}).items():
            found = server[key]
            first, gaps = (
                ", ".join(f"{found[part][each]:,.0f}" for each in each_of if each in found[part])
                for part, each_of in (("first_token_ms", ("median", "p99")), ("gap_ms", ("median", "p99", "largest")))
            )
            yield row(name, load, first, gaps, f"{found['p99_over_median']:.1f}")
    yield ""
    ready = ", ".join(f"{name} {server['ready_seconds']:.0f} s" for name, server in tables["servers"].items())
    rates = ", ".join(f"{name} {server['requests_per_second']:.2f}" for name, server in tables["servers"].items())
    yield f"From process start to ready: {ready}. Requests per second with as many clients as slots: {rates}."


def loaded() -> Iterator[str]:
    """What minutes of clients that stream, hang up, idle or send nonsense did to a server on a real model."""
    content = contents()["serve-load"]
    claims = {claim["id"]: claim["value"] for claim in content["claims"]}
    load, machine = content["tables"]["load"], content["tables"]["machine"]
    memory = load["memory_every_half_minute_mib"]
    odd = ", ".join(f"{times} with {status}" for status, times in load["odd"].items())
    yield (
        f"{machine['cores']} cores of an {content['hardware']}, which other work kept busy (load average "
        f"{machine['load_average_before']:.1f} before it began, {machine['load_average_after']:.1f} after it); commit "
        f"{content['commit'][:7]}."
    )
    yield ""
    yield "| 50 streaming clients for ten minutes, a third of the answers cut off by their clients | |"
    yield "|---|---|"
    drained, after = load["drain"], load["memory_mib"] + load["memory_growth_mib"]
    rows = {
        "whole answers; cut off": f"{load['answers']}; {load['hung_up']}",
        "whole answers with another text than alone (float32, greedy)": load["other_texts"],
        "answers that failed": claims["failed"],
        "memory of the process before, after half of the time, afterwards, MiB": (
            f"{load['memory_mib']:.0f}, {memory[len(memory) // 2]}, {after:.0f}"
        ),
        "connections beside it that ask once and then idle; opened, since dropped ones are replaced": (
            f"1,000; {load['idle']['opened']:,}"
        ),
        "odd requests beside it, by answer": odd,
        "slots in use under load afterwards": f"{drained['slots_used']:.0f} of {load['slots']:.0f}",
        "SIGTERM with 50 answers under way": (
            f"{drained['answers']} finished in {drained['seconds']:.0f} s, exit code {drained['exit_code']}"
        ),
        "tracebacks in the log": load["tracebacks"],
    }
    for what, value in rows.items():
        yield row(what, str(value))


def with_block(text: str, name: str, lines: Iterator[str]) -> str:
    block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- end {name} -->"])
    found = re.compile(f"<!-- {name} -->.*?<!-- end {name} -->", re.DOTALL)
    assert found.search(text), f"there is no block {name!r}"
    return found.sub(lambda _: block, text)


def figures() -> dict[Path, bytes]:
    """The results' figures, where the pages can show them; the lab's pages show those of lab/results/."""
    return {ROOT / "docs" / "images" / path.name: path.read_bytes() for path in (ROOT / "results").glob("*.png")}


def pages() -> dict[Path, str]:
    """Pages with generated blocks, as they should be."""
    readme, page, served = (path.read_text(encoding="utf-8") for path in (README, DIAGNOSE, SERVE))
    return {
        README: with_block(with_block(readme, "tree", tree()), "results", results()),
        DIAGNOSE: with_block(page, "prediction", prediction()),
        TABLE: with_block(TABLE.read_text(encoding="utf-8"), "table", table()),
        **{
            each: with_block(each.read_text(encoding="utf-8"), "all results", all_results(folder))
            for each, folder in KEPT.items()
        },
        SERVE: with_block(with_block(with_block(served, "serving", serving()), "latency", latency()), "load", loaded()),
    }


def main() -> int:
    wanted: dict[Path, bytes] = {path: text.encode() for path, text in pages().items()} | figures()
    stale = [path for path, data in wanted.items() if not path.is_file() or path.read_bytes() != data]
    if "--check" in sys.argv:
        if stale:
            print(f"out of date: {', '.join(str(path) for path in stale)}: run python docs/generate.py")
        return int(bool(stale))
    for path in stale:
        path.write_bytes(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
