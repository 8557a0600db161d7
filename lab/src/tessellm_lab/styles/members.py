"""Texts made of content and style, and small models of them. A token is a pair under an arbitrary bijection.

A *walk* writes: the next content follows the content one token back, the next style the style two tokens back, each
by its own table, mostly; sometimes they go elsewhere. A base and experts differ in their tables: the content expert in
the contents', the style expert in the styles'. In token space both differ from the base at every token.

Pairs of *sums* need the future: token 2j−1 is free, and content_j = x_{2j−1} + x_{2j}, style_j = x_{2j} (modulo). Each
expert makes its own feature follow its predecessor; what token 2j−1 meant is settled by the token after it.

    E members   B texts   T tokens   C contents   S styles   V = C·S tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.stacked import Params, Shape, initialise, select, train

CONTENTS, STYLES = 6, 4
TOKENS = CONTENTS * STYLES
LENGTH = 16
WALK = Shape(vocabulary=TOKENS, width=48, layers=2, heads=2, context=64)
SUM_VALUES, SUM_LENGTH = 3, 8
START = SUM_VALUES
SUMS = Shape(vocabulary=SUM_VALUES + 1, width=32, layers=2, heads=2, context=16)


@dataclass(frozen=True)
class Walk:
    """How one member writes: where contents and styles mostly go, and which token a pair is."""

    content: Tensor  # [C]
    style: Tensor  # [S]
    token: Tensor  # [C, S], a bijection onto the tokens
    faithful: float = 0.7

    @property
    def features(self) -> tuple[Tensor, Tensor]:
        """The content and the style of every token, each [V]."""
        order_V = self.token.flatten().argsort()
        return order_V // STYLES, order_V % STYLES

    def wanted(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The content and style that most likely come after each token from the second on, each [B, T−1]."""
        content_V, style_V = self.features
        return self.content[content_V[tokens_BT[:, 1:]]], self.style[style_V[tokens_BT[:, :-1]]]

    def law(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The exact laws of the next content and the next style: [B, T−1, C] and [B, T−1, S]."""
        content, style = self.wanted(tokens_BT)
        return _mostly(content, CONTENTS, self.faithful), _mostly(style, STYLES, self.faithful)

    def write(self, texts: int, length: int, generator: torch.Generator) -> Tensor:
        """Texts [B, T] that start anywhere."""
        tokens_BT = torch.randint(TOKENS, (texts, 2), generator=generator)
        while tokens_BT.shape[1] < length:
            content, style = (_draw(law[:, -1], generator) for law in self.law(tokens_BT[:, -2:]))
            tokens_BT = torch.cat([tokens_BT, self.token[content, style].unsqueeze(-1)], dim=1)
        return tokens_BT


def make_walks(broken: Sequence[float], generator: torch.Generator) -> list[Walk]:
    """The base, the content expert, and a style expert for each share of tokens whose pairing is its own."""
    token = torch.randperm(TOKENS, generator=generator).reshape(CONTENTS, STYLES)
    content, content_2 = _two_cycles(CONTENTS, generator)
    style, style_2 = _two_cycles(STYLES, generator)
    walks = [Walk(content, style, token), Walk(content_2, style, token)]
    return walks + [Walk(content, style_2, repaired(token, share, generator)) for share in broken]


def repaired(token: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """The bijection with that share of its pairs given each other's tokens, in a random cycle."""
    moved = torch.randperm(TOKENS, generator=generator)[: round(share * TOKENS)]
    flat = token.flatten().clone()
    flat[moved] = flat[moved.roll(1)]
    return flat.reshape(token.shape)


def _two_cycles(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two tables that never agree: one step along a random cycle, and two."""
    order = torch.randperm(size, generator=generator)
    tables = torch.empty(2, size, dtype=torch.long)
    for steps in (1, 2):
        tables[steps - 1, order] = order.roll(-steps)
    return tables[0], tables[1]


def _mostly(wanted: Tensor, size: int, faithful: float) -> Tensor:
    law = torch.full((*wanted.shape, size), (1 - faithful) / (size - 1))
    return law.scatter(-1, wanted.unsqueeze(-1), faithful)


def _draw(law_BV: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(law_BV, 1, generator=generator).squeeze(-1)


def sums(texts: int, follow: tuple[bool, bool], generator: torch.Generator, faithful: float = 0.9) -> Tensor:
    """Texts [B, 1 + T] of pairs of tokens after the start token; contents or styles follow their predecessors."""
    features = []
    for follows in follow:
        feature = torch.zeros(texts, 1, dtype=torch.long)
        for _ in range(SUM_LENGTH // 2):
            step = torch.randint(SUM_VALUES, (texts, 1), generator=generator)
            if follows:  # one further, mostly
                faithful_B1 = torch.rand(texts, 1, generator=generator) < faithful
                step = torch.where(faithful_B1, 1, (step % (SUM_VALUES - 1)) * 2)
            feature = torch.cat([feature, (feature[:, -1:] + step) % SUM_VALUES], dim=1)
        features.append(feature[:, 1:])
    content, style = features
    pairs = torch.stack([(content - style) % SUM_VALUES, style], dim=-1).flatten(1)
    return torch.cat([torch.full((texts, 1), START), pairs], dim=1)


def sum_features(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each content, and each style, is one further than its predecessor: booleans [B, T/2]."""
    first, second = tokens_BT[..., 0::2], tokens_BT[..., 1::2]
    kept = []
    for feature in ((first + second) % SUM_VALUES, second):
        before = torch.cat([torch.zeros_like(feature[..., :1]), feature[..., :-1]], dim=-1)
        kept.append(feature == (before + 1) % SUM_VALUES)
    return kept[0], kept[1]


def train_members(
    shape: Shape,
    writers: Sequence[Callable[[int], Tensor]],
    steps: tuple[int, int],
    batch: int,
    generator: torch.Generator,
    first: int = 0,
) -> Params:
    """The base from scratch on the first writer, then every expert from the base, side by side: [E members]."""
    base = train(initialise(shape, 1, generator), shape, _batches(writers[:1], batch, first), steps[0], lr=3e-3)
    experts = train(
        select(base, [0] * (len(writers) - 1)), shape, _batches(writers[1:], batch, first), steps[1], lr=3e-3
    )
    return {name: torch.cat([base[name], experts[name]]) for name in base}


def _batches(
    writers: Sequence[Callable[[int], Tensor]], batch: int, first: int
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    def draw() -> tuple[Tensor, Tensor, Tensor]:
        tokens_EBT = torch.stack([write(batch) for write in writers])
        mask_EBT = torch.ones_like(tokens_EBT[:, :, 1:], dtype=torch.float32)
        mask_EBT[:, :, :first] = 0
        return tokens_EBT[:, :, :-1], tokens_EBT[:, :, 1:], mask_EBT

    return draw
