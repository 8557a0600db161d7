"""Compositions to be judged twice: by the diagnosis, on prompts without answers, and by the answers to other prompts.

A benchmark is a function that trains members and yields a `Judged` for every composition of them; trained members of
any other benchmark join by one more such function (see `experiment.BENCHMARKS`).

Shapes: M members, B texts, T rows, V vocabulary, R rows of all texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessellm.diagnose.interference import Rows
from tessellm.diagnose.recorder import log_probabilities
from tessellm.diagnose.row_statistics import statistics
from tessellm.rules import ComposedRule


@dataclass(frozen=True)
class Judged:
    """One composition: what it is, the diagnosis's rows on unlabelled prompts, the share of other prompts right."""

    benchmark: str
    description: Mapping[str, Any]
    rows: Rows
    accuracy: float


def speak(rule: ComposedRule, logp_MBTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """The composed log-probabilities of whole texts."""
    composed_BTV: Tensor = rule(logp_MBTV, tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), None)[0]
    return composed_BTV


def diagnosed(rule: ComposedRule, logp_MBTV: Tensor, tokens_BT: Tensor, scored_BT: Tensor, written_BT: Tensor) -> Rows:
    """What a trace would hold of the rows that count: `written` is the token that each row led to."""
    everything = torch.ones_like(tokens_BT, dtype=torch.bool)
    composed_BTV, _, why = rule.explain(logp_MBTV, tokens_BT, everything, None)
    found = statistics(logp_MBTV, composed_BTV, rule, ((),) * len(logp_MBTV), why)
    columns = found.columns()
    columns["logprob"] = log_probabilities(logp_MBTV, composed_BTV, written_BT)
    text_BT = torch.arange(len(tokens_BT), device=tokens_BT.device)[:, None].expand_as(tokens_BT)
    kept = {name: each[scored_BT].cpu() for name, each in columns.items()}
    return Rows(text_BT[scored_BT].cpu(), len(tokens_BT), kept)
