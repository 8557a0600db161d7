"""`reproduce written`: what a composition of twenty experts writes, as a share of each expert's own score.

Every expert has its description, the embedder is MiniLM, all else is the library's default. Judges are those of
judges.py; a prompt for the base counts where the answer is the base's very text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tessellm
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import in_place_of_all
from tessellm.routing.text import MINILM
from tessellm.statistics import bootstrap
from tessellm.vocabulary.chats import encode_chat

from ..common.claims import Claim, Result, at_least
from ..real.peers import merged
from .decisions import CONFIDENCE, share
from .judges import judge
from .skills import BASE, FIVE, TWENTY, Asked, Places, ordinary_prompts, skill_prompts
from .writing import NEW_TOKENS, Answer, Answers, Job, composition_identity

Log = Callable[[str], None]
COMPOSITION, PICK, OWN, BASE_COLUMN = "composition", "the selected member alone", "the right expert", "base"
MERGE = ("ties", 1.0)
SHARES = {"seen": 0.95, "unseen": 0.86}
KEPT = {"plain": 0.93, "near": 0.88}


@dataclass(frozen=True)
class Plan:
    """How much is written. `sets`: experts that are composed, by name of the set."""

    prompts: int  # per skill and wording
    ordinary: int  # plain and near prompts each
    merge: bool = True
    sets: Mapping[str, tuple[str, ...]] | None = None

    def named_sets(self) -> Mapping[str, tuple[str, ...]]:
        return self.sets or {"twenty": TWENTY, "five": FIVE}


PLANS = {"cpu": Plan(3, 30), "full": Plan(40, 60)}


def run(seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Return claims and tables."""
    return measure(Places.found(), PLANS[size], seed, out, size, log)


def measure(places: Places, plan: Plan, seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Return the same with places and a plan of the caller's."""
    since, tables = time.monotonic(), {}
    for title, names in plan.named_sets().items():
        asked = [*skill_prompts(places, names, plan.prompts), *_ordinary(places, plan.ordinary)]
        tables[title] = _table(places, names, asked, plan.merge, seed, out / "written" / title, log)
    return Result("written", _claims(tables), seed, size, time.monotonic() - since, (), tables)


def compose_experts(places: Places, names: Sequence[str]) -> ComposedForCausalLM:
    """Return the library's default composition of these experts with their descriptions."""
    described = places.descriptions()
    experts = {name: {"source": str(places.adapter(name)), "description": described[name]} for name in names}
    return tessellm.compose(places.base, experts, embedder=MINILM, dtype="float32")


def row_of(model: ComposedForCausalLM, text: str) -> tuple[int, ...]:
    """Return one user message as token ids."""
    return tuple(encode_chat(model.tokenizer, [{"role": "user", "content": text}]))


def _ordinary(places: Places, count: int) -> list[Asked]:
    every = ordinary_prompts(places)
    return [asked for cell in KEPT for asked in [each for each in every if each.cell == cell][:count]]


def _table(
    places: Places, names: Sequence[str], asked: Sequence[Asked], merge: bool, seed: int, out: Path, log: Log
) -> dict[str, Any]:
    """Return every column's scores by cell, and what was written."""
    model = compose_experts(places, names)
    folders = {name: places.adapter(name) for name in names}
    rows = [row_of(model, each.text) for each in asked]
    tokens = [NEW_TOKENS[each.expected] for each in asked]
    answers = Answers(model, composition_identity(folders, router=router_version()), out, log)
    columns = {COMPOSITION: answers.of([Job(row, count) for row, count in zip(rows, tokens, strict=True)])}
    who: dict[str, list[tuple[str, ...]]] = {
        OWN: [_lone(each.expected) for each in asked],
        PICK: [_lone(answer.selected) for answer in columns[COMPOSITION]],
        BASE_COLUMN: [() for _ in asked],
    }
    for title, experts in who.items():
        triples = zip(rows, tokens, experts, strict=True)
        columns[title] = answers.of([Job(row, count, chosen) for row, count, chosen in triples])
    if merge:
        method, strength = MERGE
        one = in_place_of_all(
            model, method, merged(model.base, [model.member(name) for name in names], method, strength)
        )
        identity = composition_identity(folders, method=method, strength=strength)
        skilled = [n for n, each in enumerate(asked) if each.expected != BASE]
        found = Answers(one, identity, out, log).of([Job(rows[n], tokens[n]) for n in skilled])
        columns[f"{method} λ={strength:g}"] = [*found, *columns[BASE_COLUMN][len(found) :]]
    return {
        "columns": {title: _cells(asked, found, columns, seed) for title, found in columns.items()},
        "routes": _routes(asked, columns[COMPOSITION]),
        "texts": _texts(asked, columns),
    }


def _lone(name: str) -> tuple[str, ...]:
    return () if name == BASE else (name,)


def router_version() -> str:
    """Name the code and weights that decide, so that answers of an earlier router are not taken for this one's."""
    from hashlib import sha256
    from importlib.resources import files

    parts = [
        each.read_bytes()
        for each in sorted(files("tessellm.routing").iterdir(), key=lambda e: e.name)
        if each.is_file()
    ]
    return sha256(b"".join(parts)).hexdigest()[:16]


def _cells(
    asked: Sequence[Asked], found: Sequence[Answer], columns: Mapping[str, Sequence[Answer]], seed: int
) -> dict[str, Any]:
    """Return a column's score per cell: its share of the right expert's, or how often the text is the base's."""
    cells: dict[str, Any] = {}
    for cell in dict.fromkeys(each.cell for each in asked):
        here = [n for n, each in enumerate(asked) if each.cell == cell]
        if asked[here[0]].expected == BASE:
            same = [found[n].text == columns[BASE_COLUMN][n].text for n in here]
            cells[cell] = share(same, seed)
            continue
        scores, own = (_scores(asked, each, here) for each in (found, columns[OWN]))
        low, high = _ratio_interval(scores, own, seed)
        cells[cell] = {
            "share": float(scores.sum() / own.sum().clamp_min(1e-9)), "low": low, "high": high, "of": len(here),
            "score": float(scores.mean()), "skills": _by_skill(asked, here, scores, own),
        }  # fmt: skip
    return cells


def _ratio_interval(scores: torch.Tensor, own: torch.Tensor, seed: int) -> tuple[float, float]:
    scale = float(own.mean().clamp_min(1e-9)) / 2  # so that the sum is over 1 in every resample
    return bootstrap(scores / scale, own / scale, CONFIDENCE, seed)


def _by_skill(asked: Sequence[Asked], here: Sequence[int], scores: torch.Tensor, own: torch.Tensor) -> dict[str, Any]:
    found: dict[str, list[list[float]]] = {}
    for place, n in enumerate(here):
        found.setdefault(asked[n].expected, []).append([float(scores[place]), float(own[place])])
    return {name: {"score": _mean(pairs, 0), "own": _mean(pairs, 1)} for name, pairs in found.items()}


def _mean(pairs: Sequence[Sequence[float]], column: int) -> float:
    return sum(pair[column] for pair in pairs) / len(pairs)


def _scores(asked: Sequence[Asked], found: Sequence[Answer], here: Sequence[int]) -> torch.Tensor:
    judged = [judge(asked[n].expected, asked[n].text, found[n].text, asked[n].answer) for n in here]
    return torch.tensor(judged, dtype=torch.float64)


def _routes(asked: Sequence[Asked], found: Sequence[Answer]) -> dict[str, Any]:
    """Return how often one member answers, and whether it is the right one, by cell."""
    cells: dict[str, Any] = {}
    for cell in dict.fromkeys(each.cell for each in asked):
        pairs = [(each, answer) for each, answer in zip(asked, found, strict=True) if each.cell == cell]
        cells[cell] = {
            "right member selected": sum(a.selected == e.expected for e, a in pairs) / len(pairs),
            "one member answers": sum(len(a.active) == 1 for _, a in pairs) / len(pairs),
        }
    return cells


def _texts(asked: Sequence[Asked], columns: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """Return the first prompt of every skill and cell with all answers."""
    shown, found = set(), []
    for n, each in enumerate(asked):
        if (each.expected, each.cell) not in shown:
            shown.add((each.expected, each.cell))
            texts = {title: answers[n].text[:300] for title, answers in columns.items()}
            found.append({"prompt": each.text[:300], "expected": each.expected, "answer": each.answer[:300], **texts})
    return found


def _claims(tables: Mapping[str, Any]) -> list[Claim]:
    found = []
    for title, table in tables.items():
        own = table["columns"][COMPOSITION]
        for cell, bound in SHARES.items():
            statement = f"{title} experts, descriptions, {cell} wordings: share of the experts' own scores"
            found.append(at_least(f"{title}-{cell}", statement, own[cell]["share"], bound))
        for cell, bound in KEPT.items():
            statement = f"{title} experts, {cell} prompts that get the base's very text"
            found.append(at_least(f"{title}-{cell}", statement, own[cell]["share"], bound))
        others = {
            name: cells["seen"]["share"] for name, cells in table["columns"].items() if name not in (COMPOSITION, OWN)
        }
        found.append(Claim(f"{title}-others", f"{title} experts: the same share of others, seen", others))
    return found
