"""Who is active, who overlaps with whom, where experts interfere. Numbers from traces; no judgement.

Shapes: R rows (scored tokens of all texts), K experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .rates import Rate, average, rate
from .row_statistics import ACTIVE
from .trace import Trace

DIFFERENT = 0.01  # and different at all where it diverges by more than this
FAR = 0.1  # Eq. 2 is nobody's law where its total variation to every member is larger
LARGE = 0.5  # |log Z| beyond which that is interference (nats); zero where the theory holds, also for blended features
PLACES = 5


@dataclass(frozen=True)
class Rows:
    """The scored tokens of all texts, one after another."""

    text_R: Tensor
    texts: int
    columns: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def rate(self, value_R: Tensor) -> Rate:
        return rate(value_R, self.text_R, self.texts)

    def average(self, value_R: Tensor) -> Rate:
        return average(value_R, self.text_R, self.texts)

    def sums(self, value_R: Tensor) -> Tensor:
        """Of each text: [B]."""
        return torch.zeros(self.texts, dtype=torch.float64).index_add(0, self.text_R, value_R.double())


def rows_of(traces: Sequence[Trace]) -> Rows:
    """`traces` hold one text each."""
    numbers = [torch.full((int(trace.scored.sum()),), n) for n, trace in enumerate(traces)]
    columns = {name: torch.cat([trace[name][trace.scored] for trace in traces]) for name in traces[0].tensors}
    columns["position"] = torch.cat([trace.scored[0].nonzero()[:, 0] for trace in traces])
    return Rows(torch.cat(numbers), len(traces), columns)


@dataclass(frozen=True)
class Place:
    """A token in a text."""

    text: int
    position: int
    token: str
    before: str
    log_z: float


@dataclass(frozen=True)
class Pair:
    """Two experts, where both are active. They contradict each other where Eq. 2 over the two leaves what they do not
    both want, and repeat each other where they want the same and log Z is large: it is counted twice."""

    experts: tuple[str, str]
    overlap: Rate  # both active
    contradict: Rate
    repeat: Rate
    places: tuple[Place, ...]  # the worst
    texts: tuple[int, ...]  # where they interfere, the most affected first


@dataclass(frozen=True)
class Interference:
    """Over all scored tokens of all texts."""

    active: dict[str, Rate]  # share of tokens where an expert diverges by more than ACTIVE
    different: dict[str, Rate]
    divergence: dict[str, Rate]  # mean KL
    owned: dict[str, Rate]  # share of tokens that a member owns, the base's included
    several: Rate  # two experts active at once, or more
    pairs: tuple[Pair, ...]
    interfering: Rate
    log_z: Rate  # mean |log Z|
    novel: Rate
    gap: Rate  # mean total variation to the nearest member


def interference(rows: Rows, members: Sequence[str], traces: Sequence[Trace]) -> Interference:
    divergence_RK, owner_R, log_z_R = rows["divergence"], rows["owner"], rows["log_z"]
    active_RK = divergence_RK > ACTIVE
    experts = members[1:]
    return Interference(
        active={name: rows.rate(active_RK[:, i]) for i, name in enumerate(experts)},
        different={name: rows.rate(divergence_RK[:, i] > DIFFERENT) for i, name in enumerate(experts)},
        divergence={name: rows.average(divergence_RK[:, i]) for i, name in enumerate(experts)},
        owned={name: rows.rate(owner_R == m) for m, name in enumerate(members)},
        several=rows.rate(active_RK.sum(1) > 1),
        pairs=tuple(pair(rows, experts, i, j, traces) for i in range(len(experts)) for j in range(i + 1, len(experts))),
        interfering=rows.rate(interfering(rows)),
        log_z=rows.average(log_z_R.abs()),
        novel=rows.rate(rows["novel"]),
        gap=rows.average(rows["gap"]),
    )


def interfering(rows: Rows) -> Tensor:
    """Where adding up all experts gives what is no member's, and not because they blend: [R]."""
    active_RK = rows["divergence"] > ACTIVE
    discord_RKK = (rows["pair_accord"] < 0.5) & active_RK[:, :, None] & active_RK[:, None]
    return (rows["clash"] > FAR) & ((rows["log_z"].abs() > LARGE) | discord_RKK.flatten(1).any(1))


def pair(rows: Rows, experts: Sequence[str], i: int, j: int, traces: Sequence[Trace]) -> Pair:
    divergence_R2 = rows["divergence"][:, [i, j]]
    both_R = (divergence_R2 > ACTIVE).all(1)
    accord_R, log_z_R = rows["pair_accord"][:, i, j], rows["pair_log_z"][:, i, j]
    apart_R = both_R & (accord_R < 0.5)
    twice_R = both_R & (accord_R >= 0.5) & (log_z_R > LARGE)
    cost_R = divergence_R2.amin(1) * (apart_R | twice_R)  # how much the quieter one has to say there
    cost_B = rows.sums(cost_R)
    worst = cost_R.argsort(descending=True, stable=True)[:PLACES].tolist()
    affected = cost_B.argsort(descending=True, stable=True).tolist()
    return Pair(
        experts=(experts[i], experts[j]),
        overlap=rows.rate(both_R),
        contradict=rows.rate(apart_R),
        repeat=rows.rate(twice_R),
        places=tuple(place(rows, row, float(log_z_R[row]), traces) for row in worst if cost_R[row] > 0),
        texts=tuple(text for text in affected if cost_B[text] > 0),
    )


def place(rows: Rows, row: int, log_z: float, traces: Sequence[Trace], context: int = 12) -> Place:
    text, position = int(rows.text_R[row]), int(rows["position"][row])
    trace = traces[text]
    tokens = trace.tokens[0].tolist()
    before = "".join(trace.token_text(token) for token in tokens[max(0, position - context) : position])
    return Place(text, position, trace.token_text(tokens[position]), before, log_z)
