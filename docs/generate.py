"""Generated blocks of the README, and the notebook: `python docs/generate.py` writes them, `--check` compares.

The tree's comments are the first lines of the modules' docstrings. `--show NAME` prints the tables of one result; the
site's pages on results are made of the same tables when it is built (build_pages.py).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SCRIPT = ROOT / "examples" / "first_ten_minutes.py"  # the notebook's cells
LAB = ROOT / "lab"
ROUTING = LAB / "docs" / "experiments-routing.md"
KEPT = {ROOT / "docs" / "results.md": ROOT / "results", LAB / "docs" / "results.md": LAB / "results"}
FOLDERS = {
    "lab/": "tessellm-lab, its own distribution: experiments, theory, probe, particles; their tests, docs, results",
    "adapters/": "LoRA experts of SmolLM2-135M-Instruct that the project trained",
    "data/": "samples of the test splits that they are judged on",
    "tests/": "mirror src",
    "recipes/": "ready YAML",
    "examples/": "short scripts, and a notebook for the first ten minutes",
    "benchmarks/": "speed, as ratios in one run",
    "docs/": "one page per capability; architecture.md for who changes the code; log.md: what was tried and dropped",
    "results/": "JSON and figures with commit, seed, versions and hardware",
}

RULE = "belief (default)"  # the column of the default rule in the result `real`
MERGES = ("task-arithmetic", "ties", "dare", "slerp", "linear")


@dataclass(frozen=True)
class Headline:
    """A row of the README's table: what was measured, in which result, ours and a peer's out of its tables."""

    words: str
    result: str
    ours: Callable[[Any], object]
    peer: Callable[[Any], object]


def best(shares: dict[str, float], names: Sequence[str], choose: Callable[..., str] = max) -> str:
    """The best of some columns, with its name."""
    name = choose(names, key=lambda name: shares[name])
    return f"{name} {shown(shares[name])}"


def real_shares(tables: Any) -> dict[str, float]:
    found: dict[str, float] = tables["sets"]["five"]["mean share of the expert's score"]
    return found


def plain(tables: Any, column: str) -> float:
    cells = tables["sets"]["five"]["tasks"]["plain"]
    return float(cells[column]["nats"] / cells["base"]["nats"])


def mixed(tables: Any) -> dict[str, float]:
    return {column: cell["mean"] for column, cell in tables["cells"]["mixed"].items()}


def letters(tables: Any, rule: str) -> float:
    (cell,) = (each for each in tables["letters"] if each["experts"] == 13 and each["length"] == 31)
    return float(cell["rules"][rule]["share"])


PEERS = ("Arrow, top-k 1", "Arrow, top-k 3", "ties λ=1", "task-arithmetic λ=0.3", "dare-ties λ=0.5", "router")
HEADLINES = [
    Headline(
        "five real LoRA experts at once: mean share of each expert's own score",
        "real",
        lambda tables: real_shares(tables)[RULE],
        lambda tables: best(real_shares(tables), PEERS),
    ),
    Headline(
        "the same; the peer is one LoRA trained on all data",
        "real",
        lambda tables: real_shares(tables)[RULE],
        lambda tables: real_shares(tables)["one LoRA on all data"],
    ),
    Headline(
        "text that concerns no expert: nats per token over the base's",
        "real",
        lambda tables: plain(tables, RULE),
        lambda tables: best({column: plain(tables, column) for column in PEERS}, PEERS, min),
    ),
    Headline(
        "problems that need two experts, by Eq. 2: share right",
        "table",
        lambda tables: mixed(tables)["composed by Eq. 2"],
        lambda tables: best(mixed(tables), MERGES),
    ),
    Headline(
        "13 disjoint experts at once, rule `evidence`: share of strings right",
        "many-experts",
        lambda tables: letters(tables, "evidence"),
        lambda tables: f"Eq. 2 {shown(letters(tables, 'eq2'))}",
    ),
    Headline(
        "`diagnose`: rank correlation of predicted and measured share right",
        "prediction",
        lambda _: claim("prediction", "spearman"),
        lambda _: f"mean KL {shown(claim('prediction', 'naive'))}",
    ),
    Headline(
        "three models in Gemma 2 2B's shapes, batch 1: times the notebook loop's speed; on another host",
        "gpu-decoding",
        lambda _: claim("gpu-decoding", "full-notebook"),
        lambda _: f"{shown(claim('gpu-decoding-fast-host', 'full-notebook'))}",
    ),
    Headline(
        "32 requests at once, Eq. 2, one CPU thread: tokens/s",
        "vllm-throughput",
        lambda tables: tables["product"]["engine"],
        lambda tables: f"vLLM {shown(tables['product']['vllm'])}",
    ),
    Headline(
        "gaps between tokens on two CPU cores at 80 % load: 99 % over the median",
        "latency",
        lambda _: claim("latency", "gaps-composition-0.8"),
        lambda _: f"vLLM {shown(claim('latency', 'gaps-vLLM-0.8'))}",
    ),
    Headline(
        "the engine: share of greedy tokens that are not the reference's",
        "gpu-decoding",
        lambda _: claim("gpu-decoding", "equal-tokens"),
        lambda _: "",
    ),
]
MARKS = {True: "yes", False: "**no**", None: ""}


@cache
def contents() -> dict[str, Any]:
    """What is in results/ and lab/results/, by name."""
    return {name: content for folder in KEPT.values() for name, content in contents_of(folder).items()}


@cache
def contents_of(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def claim(name: str, claim_id: str) -> object:
    """The value of one claim."""
    (found,) = [each for each in contents()[name]["claims"] if each["id"] == claim_id]
    return found["value"]


def results() -> Iterator[str]:
    """The headlines, and one line on what did not hold."""
    yield "| what | ours | peer | result, on |"
    yield "|---|---|---|---|"
    every = contents()
    for each in HEADLINES:
        content = every[each.result]
        ours, peer = (shown(get(content["tables"])) for get in (each.ours, each.peer))
        yield row(each.words, ours, peer, f"{each.result}, {content['hardware']}")
    yield ""
    yield not_held(every)


def not_held(every: dict[str, Any]) -> str:
    """How many claims were judged, and how many of which results did not hold."""
    judged = sum(claim["holds"] is not None for content in every.values() for claim in content["claims"])
    failed = {name: sum(map(failing, content["claims"])) for name, content in every.items()}
    pages = {name: page.relative_to(ROOT) for page, folder in KEPT.items() for name in contents_of(folder)}
    where = ", ".join(f"[{name}]({pages[name]}) ({count})" for name, count in failed.items() if count)
    return f"Of {judged} claims with a target, {sum(failed.values())} did not hold: {where}."


def all_results(folder: Path) -> Iterator[str]:
    """Every claim of every result there."""
    for name in contents_of(folder):
        yield from result(name)


def result(name: str) -> Iterator[str]:
    """The claims of one result, and what else a user wants to see of it."""
    content = contents()[name]
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
    if name in DETAILS:
        yield from DETAILS[name]()
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


def precisions() -> Iterator[str]:
    """What each precision costs and brings on a CPU."""
    yield "| | nats a token over float32's: experts · base | routed: seen · unseen · plain · near | first · step, ms |"
    yield "|---|---|---|---|"
    for each in contents()["precisions"]["tables"]["rows"]:
        gaps = [
            f"{each[f'nats_{who}_difference']:+.4f} ± {each[f'nats_{who}_error']:.4f}" for who in ("experts", "base")
        ]
        routed = [f"{each[f'routed_{cell}']:.3f}" for cell in ("seen", "unseen", "plain", "near")]
        times = [f"{each['first_ms']:.0f}", f"{each['step_ms']:.1f}"]
        yield row(each["precision"], *map(" · ".join, (gaps, routed, times)))


DETAILS = {"latency": latency, "precisions": precisions}


def with_block(text: str, name: str, lines: Iterator[str]) -> str:
    block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- end {name} -->"])
    found = re.compile(f"<!-- {name} -->.*?<!-- end {name} -->", re.DOTALL)
    assert found.search(text), f"there is no block {name!r}"
    return found.sub(lambda _: block, text)


def notebook(script: str) -> str:
    """A script in the percent format as a notebook without outputs."""
    cells = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if prose := "markdown" in head:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        source = body.strip("\n").splitlines(keepends=True)
        kind = {"cell_type": "markdown"} if prose else {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append({"id": f"cell-{len(cells)}", "metadata": {}, **kind, "source": source})
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def routing_page() -> str:
    """The lab's page on routing with its tables."""
    sys.path.insert(0, str(LAB / "docs"))
    from generate_routing import tables

    text = ROUTING.read_text(encoding="utf-8")
    for name, lines in tables(contents(), row).items():
        text = with_block(text, name, lines)
    return text


def figures() -> dict[Path, bytes]:
    """The results' figures, where the pages can show them; the lab's pages show those of lab/results/."""
    return {ROOT / "docs" / "images" / path.name: path.read_bytes() for path in (ROOT / "results").glob("*.png")}


def pages() -> dict[Path, str]:
    """Pages with generated blocks, as they should be."""
    readme = README.read_text(encoding="utf-8")
    return {
        README: with_block(with_block(readme, "tree", tree()), "results", results()),
        ROUTING: routing_page(),
        SCRIPT.with_suffix(".ipynb"): notebook(SCRIPT.read_text(encoding="utf-8")),
    }


def main() -> int:
    wanted: dict[Path, bytes] = {path: text.encode() for path, text in pages().items()} | figures()
    stale = [path for path, data in wanted.items() if not path.is_file() or path.read_bytes() != data]
    if "--show" in sys.argv:
        print("\n".join(result(sys.argv[-1])))
        return 0
    if "--check" in sys.argv:
        if stale:
            print(f"out of date: {', '.join(str(path) for path in stale)}: run python docs/generate.py")
        return int(bool(stale))
    for path in stale:
        path.write_bytes(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
