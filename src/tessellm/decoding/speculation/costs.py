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
PAYS = 1.5  # times the tokens a second of all awake that must be promised: members rest by default where they are


@dataclass(frozen=True)
class Prices:
    """What a device takes, in passes of one full member over one token."""

    lengths: tuple[int, ...]  # of drafts to choose from
    row: float  # a row more
    alone: float = 0.0  # a member by itself beyond its part in a pass of all, with choosing
    rule: float = 0.0  # the rule over one token of a text, and choosing
    rule_row: float = 0.0  # of a text more
    rule_drafts: float = 0.0  # the rule over all drafts, which it reads at once, and
    rule_token: float = 0.0  # per member and token of them
    deltas: float = 0.0  # having deltas at all: other kernels
    expert: float = 0.0  # reading the deltas of an expert
    every_row: bool = False  # drafts are written by passes over all rows, which are captured
    most_rows: int | None = None  # of a verifying pass, beyond which no fast kernel takes it


CPU = Prices((4, 8, 16), row=0.07)  # 135M numbers in float32, one core
# google/gemma-2-2b in bfloat16 on an H200, results/resting-cuda.json: a member's part in a pass of three takes 1.45 ms,
# a draft's token 1.85; the rule .04 ms for one row of three members, .2 for 32, .23 for a draft of 31 tokens, .9 for 32
# drafts of 7. Earlier, results/gpu-decoding*.json: 1.98 and 2.52 ms for the base with one and eight LoRA experts
GPU = Prices(
    (3, 7, 15, 31), row=0.0045, alone=0.28, rule=0.03, rule_row=0.0035, rule_drafts=0.1, rule_token=0.0007, deltas=0.16,
    expert=0.04, every_row=True, most_rows=256,
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
        read = rows * (length + 1)
        rule = self.prices.rule_drafts + self.prices.rule_token * read * (self.full + self.lora)
        return length * self.draft(rows, writers) + self._all(read) + rule

    def draft(self, rows: int, writers: int = 1) -> float:
        """Price a token of the drafts of every text, by so many members."""
        drafting = rows if self.prices.every_row else rows / writers
        return writers * (self._pass(drafting) + self.prices.alone + (self._deltas(1) if self.lora else 0.0))

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


def expected(rate: float, length: int) -> float:
    """Count the tokens that a draft brings on average: 1 + a + … + a^length."""
    return length + 1.0 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
