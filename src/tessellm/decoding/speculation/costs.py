"""What it costs that members rest: a model of what passes take, by numbers that were measured once. Knows counts, no
models.

A pass reads weights, which takes as long for a row as for a few, and computes rows, which does not:

    pass       Σ over weights of their own   1 + per row · (rows − 1)
    step       a pass of all members over one token, and the rule
    block      drafts, token by token, by one member per text; a pass of all over them and one token more, and the rule

in passes of one full member over one token. LoRA experts are rows through their base's weights, and some reading more.
`inspect --plan` computes with it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LIKELY = 0.99  # tokens of drafts that are right, where the rule is sure
TOKENS_PER_TEXT = 4  # which a rule reads one by one in about the time that it takes to read a text's whole draft
PAYS = 1.5  # times the tokens a second of all awake that must be promised: members rest by default where they are


@dataclass(frozen=True)
class Prices:
    """What a device takes, in passes of one full member over one token."""

    lengths: tuple[int, ...]  # of drafts to choose from
    row: float  # a row more
    alone: float = 0.0  # a member by itself beyond its part in a pass of all, with choosing
    rule: float = 0.0  # the rule over one token of a text, and choosing
    rule_row: float = 0.0  # of a text more
    rule_draft: float = 0.0  # per member, the rule over a whole draft of one text, where it is read at once (`at_once`)
    deltas: float = 0.0  # having deltas at all: other kernels
    expert: float = 0.0  # reading the deltas of an expert
    every_row: bool = False  # drafts are written by passes over all rows, which are captured
    most_rows: int | None = None  # of a verifying pass, beyond which no fast kernel takes it


CPU = Prices((4, 8, 16), row=0.07)  # 135M numbers in float32, one core
# google/gemma-2-2b in bfloat16 on an H200, results/resting-cuda.json: a member's part in a pass of three takes 1.45 ms,
# a draft's token 1.94; verifying 3, 7, 15, 31 tokens 5.25, 5.42, 5.47, 5.46, of nine members 13.7 to 14.8; of 32 texts,
# 3 and 7 tokens each, 9.0 and 15.1. Earlier, results/gpu-decoding*.json: 1.98 and 2.52 ms for the base with one and
# eight LoRA experts; a rule .1 ms for one row of three members, .6 for 32
GPU = Prices(
    (3, 7, 15, 31), row=0.0045, alone=0.34, rule=0.075, rule_row=0.01, rule_draft=0.15, deltas=0.14, expert=0.04,
    every_row=True, most_rows=256,
)  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """What passes of a composition take."""

    prices: Prices
    full: float  # members with weights of their own, the base among them; of different sizes, in units of the largest
    lora: int = 0  # members that share the base's

    def step(self, rows: int) -> float:
        """Price a token of every text, all members awake."""
        return self._all(rows) + self._rule(rows)

    def block(self, rows: int, length: int, writers: int = 1) -> float:
        """Price a draft of so many tokens of every text, by so many members, and its verification."""
        drafting = rows if self.prices.every_row else rows / writers
        draft = writers * (self._pass(drafting) + self.prices.alone + (self._deltas(1) if self.lora else 0.0))
        rule = (length + 1) * self._rule(rows)
        if at_once(rows, length + 1):
            rule = rows * self.prices.rule_draft * (self.full + self.lora)
        return length * draft + self._all(rows * (length + 1)) + rule

    def takes(self, rows: int, length: int) -> bool:
        """Whether fast kernels verify drafts of so many tokens of so many texts."""
        most = self.prices.most_rows
        return most is None or rows * (length + 1) * (1 + self.lora) <= most

    @property
    def pays(self) -> bool:
        """Whether members rest by default."""
        return self.gain(self.prices.lengths) >= PAYS

    def gain(self, lengths: Sequence[int], rate: float = LIKELY) -> float:
        """Compare the tokens a second of one text with those of all awake, at the best of these lengths."""
        speeds = [expected(rate, length) / self.block(1, length) for length in lengths if self.takes(1, length)]
        return self.step(1) * max(speeds, default=0.0)

    def _all(self, rows: float) -> float:
        shared = self._pass(rows * (1 + self.lora)) + self._deltas(self.lora)
        return shared + (self.full - 1) * self._pass(rows)

    def _pass(self, rows: float) -> float:
        return 1 + self.prices.row * (rows - 1)

    def _deltas(self, experts: int) -> float:
        return self.prices.deltas + experts * self.prices.expert if experts else 0.0

    def _rule(self, rows: int) -> float:
        return self.prices.rule + self.prices.rule_row * (rows - 1)


def at_once(rows: int, width: int) -> bool:
    """Whether a compiled rule reads the drafts of so many texts, and a token more, text by text: few texts, long ones.
    Else it reads them token by token, all texts at once."""
    return width >= TOKENS_PER_TEXT * rows


def expected(rate: float, length: int) -> float:
    """Count the tokens that a draft brings on average: 1 + a + … + a^length."""
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
