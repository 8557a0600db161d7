"""Tables of cells with intervals, and claims about them. Knows numbers; no models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from tessellm.evaluate.intervals import bootstrap, compare
from tessellm.rules import Mixture
from tessellm.statistics import bootstrap as resampled

from ..common.claims import Claim, at_least, at_most
from .columns import Column, rule_title
from .plan import SETS
from .reading import Read
from .skills import SKILLS

OURS = rule_title(Mixture.name)
PEERS = ("merge", "arrow", "router")
DRAWS = 2000
LOWER_BY = 0.25  # nats that an expert should be below the base


@dataclass
class SetResult:
    """What was measured of one set of experts: cells by task and column, and how columns compare."""

    name: str
    columns: Sequence[Column]
    read: dict[str, dict[str, Read]] = field(default_factory=dict)
    written: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        return {column.name: column.kind for column in self.columns}

    def table(self) -> dict[str, Any]:
        """Plain data for the result's file."""
        tasks = list(dict.fromkeys([*self.read, *self.written]))
        return {
            "columns": self.kinds,
            "tasks": {task: {name: self._cell(task, name) for name in self._names(task)} for task in tasks},
            "mean share of the expert's score": self.shares(),
            "the default rule less each peer": self.gains(),
            "against the best peer": {task: self._against(task) for task in self.written if self._peers(task)},
        }

    def _names(self, task: str) -> list[str]:
        return [name for name in self.kinds if name in {**self.read.get(task, {}), **self.written.get(task, {})}]

    def _cell(self, task: str, name: str) -> dict[str, Any]:
        cell: dict[str, Any] = {}
        if read := self.read.get(task, {}).get(name):
            nats_B, tokens_B = (torch.tensor(each, dtype=torch.float64) for each in read)
            low, high = resampled(nats_B, tokens_B, 0.95, 0)
            cell |= {"nats": read.mean, "nats low": low, "nats high": high, "texts": len(read.nats)}
        if entry := self.written.get(task, {}).get(name):
            for metric, scores in entry["scores"].items():
                interval = bootstrap(scores)
                cell[metric] = {"mean": interval.mean, "low": interval.low, "high": interval.high}
            cell |= {"prompts": len(entry["tokens"]), "tokens": fmean(entry["tokens"])}
            if self.ceiling(task) > 0:
                cell["share"] = self._share(task, name)
        return cell

    def _share(self, task: str, name: str) -> dict[str, float]:
        """A score over the expert's own, on the same prompts."""
        own_B, all_B = (torch.tensor(self.right(task, each), dtype=torch.float64) for each in (name, task))
        low, high = resampled(own_B, all_B, 0.95, 0)
        return {"mean": (own_B.sum() / all_B.sum()).item(), "low": low, "high": high}

    def right(self, task: str, name: str) -> list[float]:
        return self.written[task][name]["scores"]["right"]

    def ceiling(self, task: str) -> float:
        """The score of the task's own expert."""
        return fmean(self.right(task, task)) if task in self.written.get(task, {}) else 0.0

    def shares(self) -> dict[str, float]:
        """Each column's score as a share of the expert's, on the mean over tasks that the expert can do at all."""
        tasks = [task for task in self.written if self.ceiling(task) > 0]
        names = [name for name, kind in self.kinds.items() if kind != "expert"]
        return {
            name: fmean(fmean(self.right(task, name)) / self.ceiling(task) for task in tasks)
            for name in names
            if tasks and all(name in self.written[task] for task in tasks)
        }

    def gains(self) -> dict[str, dict[str, Any]]:
        """The default rule less each peer: the mean over tasks of differences as shares of the expert's score, prompts
        of every task drawn anew; and the task where it gains least."""
        tasks, shares = [task for task in self.written if self.ceiling(task) > 0], self.shares()
        if OURS not in shares:
            return {}
        found = {}
        for peer in (name for name in shares if self.kinds[name] in PEERS):
            differences = {task: compare(self.right(task, OURS), self.right(task, peer)) for task in tasks}
            least = min(tasks, key=lambda task: differences[task].interval.mean / self.ceiling(task))
            drawn_R = torch.stack([self._drawn(task, peer) for task in tasks]).mean(0)
            low, high = drawn_R.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
            gain = {"mean": shares[OURS] - shares[peer], "low": low, "high": high}
            found[peer] = {**gain, "least": {"task": least, **asdict(differences[least].interval)}}
        return found

    def _drawn(self, task: str, peer: str) -> Tensor:
        """Gains over a peer on a task, by prompts that are drawn anew, as shares of the expert's score."""
        gain_B = torch.tensor(self.right(task, OURS), dtype=torch.float64) - torch.tensor(self.right(task, peer))
        draws_RB = torch.randint(len(gain_B), (DRAWS, len(gain_B)), generator=torch.Generator().manual_seed(0))
        return gain_B[draws_RB].mean(1) / self.ceiling(task)

    def _peers(self, task: str) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind in PEERS and name in self.written.get(task, {})]

    def _against(self, task: str) -> dict[str, Any]:
        """Every rule less the best peer, prompt by prompt."""
        best = max(self._peers(task), key=lambda name: fmean(self.right(task, name)))
        found: dict[str, Any] = {"best peer": best}
        for name, kind in self.kinds.items():
            if kind == "rule" and name in self.written[task]:
                gain = compare(self.right(task, name), self.right(task, best))
                found[name] = {"gain": gain.interval.mean, "low": gain.interval.low, "high": gain.interval.high} | {
                    "p": gain.p
                }
        return found


def claims_of(tables: Mapping[str, Any], firm: bool) -> list[Claim]:
    """What the tables show. `firm`: with targets for what needs more prompts than a small size has."""
    sets, found = tables["sets"], []
    first = next(iter(sets.values()))
    for skill in SKILLS:
        cells = first["tasks"].get(skill, {})
        if skill in cells and "nats" in cells[skill]:
            gain = cells["base"]["nats"] - cells[skill]["nats"]
            statement = f"{skill}: nats per answer token by which the expert is below the base"
            found.append(at_least(f"expert-{skill}", statement, gain, LOWER_BY))
        if "right" in cells.get(skill, {}):
            values = {name: cells[name]["right"]["mean"] for name in ("base", skill)}
            found.append(Claim(f"written-{skill}", f"{skill}: score when writing, base and expert", values))
    for name, table in sets.items():
        found += _set_claims(name, table, firm) if name in SETS else _asked_claims(name, table)
    return found


def _set_claims(name: str, table: Mapping[str, Any], firm: bool) -> list[Claim]:
    shares, kinds, found = table["mean share of the expert's score"], table["columns"], []
    peers = [each for each in shares if kinds[each] in PEERS]
    rules = [each for each in shares if kinds[each] == "rule"]
    if peers and OURS in shares:
        best, rule = (max(names, key=lambda each: shares[each]) for names in (peers, rules))
        gain = shares[OURS] - shares[best]
        statement = f"{name}: mean share of the expert's score, the default rule less the best peer ({best})"
        claim = at_least(f"{name}-default", statement, gain, 0.0)
        found.append(claim if firm else Claim(claim.id, claim.statement, claim.value))
        statement = f"{name}: mean share of the expert's score, the best rule ({rule}) and the best peer ({best})"
        found.append(Claim(f"{name}-shares", statement, {"rule": shares[rule], "peer": shares[best]}))
    return [*found, *(_kept_claims(name, table) if firm else ())]


def _kept_claims(name: str, table: Mapping[str, Any]) -> list[Claim]:
    """Whether the default rule reads and writes as each task's own expert does, and more than each peer."""
    found, tasks = [], table["tasks"]
    for task, cells in tasks.items():
        ours, own = cells.get(OURS, {}), cells.get(task, cells.get("base", {}))
        what = "the expert's" if task in cells else "the base's"
        most = 1.02 if task in cells else 1.0
        if "nats" in ours and "nats" in own:
            statement = f"{name}, {task}: nats per token, the default rule's over {what}"
            found.append(at_most(f"{name}-read-{task}", statement, ours["nats"] / own["nats"], most))
        if "share" in ours:
            statement = f"{name}, {task}: the default rule's score when writing over the expert's own"
            found.append(at_least(f"{name}-write-{task}", statement, ours["share"]["mean"], 0.95))
    for peer, gain in table["the default rule less each peer"].items():
        statement = f"{name}: mean share of the expert's score, the default rule less {peer}, low end of the interval"
        found.append(at_least(f"{name}-above-{peer}".replace(" ", "-"), statement, gain["low"], 0.0))
    return found


def _asked_claims(name: str, table: Mapping[str, Any]) -> list[Claim]:
    """Of blends and of two requests: the means of the columns that matter, over the set's tasks."""
    cells, kinds = table["tasks"].values(), table["columns"]
    means = {
        column: fmean(cell[column]["right"]["mean"] for cell in cells)
        for column in kinds
        if all("right" in cell.get(column, {}) for cell in cells)
    }
    kind_of = {"rule": ("rule",), "expert": ("expert",), "peer": PEERS, "trained": ("trained",)}
    best = {
        kind: max((each for each in means if kinds[each] in of), key=lambda each: means[each], default=None)
        for kind, of in kind_of.items()
    }
    shown = {column: means[column] for column in dict.fromkeys([OURS, *best.values()]) if column in means}
    statement = f"{name}: all that was asked for, when writing; the default rule, and the best of each kind"
    return [Claim(name.replace(" ", "-"), statement, shown)] if shown else []
