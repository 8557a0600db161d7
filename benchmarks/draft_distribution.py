"""Whether an engine with drafts samples from the distribution that it samples from without: many short texts of each,
with seeds of their own, so that nothing couples the two, and a chi-square test over whole texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation.draft_length import Pace

TOKENS = 4  # of a text: one after the prompt, then a draft of two and what follows it
FEWEST = 5.0  # texts that a cell must be expected to hold
FIRST_SEED = 1 << 32  # of texts with drafts
TEMPERATURES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
TRIED = 128  # texts at each of these
LARGEST_SHARE = 0.4  # of the most frequent text, where it is warm enough for drafts to fall

Texts = Mapping[tuple[int, ...], int]  # how often each was drawn


@dataclass(frozen=True)
class Draws:
    """Texts that an engine without drafts wrote after a prompt."""

    prompt: Sequence[int]
    temperature: float
    texts: Texts


class FixedPace(Pace):
    """Drafts of one length wherever there is room, whether they pay or not."""

    def choose(self, rows: int, rates: Sequence[tuple[float, int]]) -> int:
        return max(0, min(self.lengths[0], max(room for _, room in rates)))


def draft_always(engine: Engine, length: int) -> Engine:
    """Let an engine always draft so many tokens, or as many as it can."""
    speculator = engine.speculator
    assert speculator is not None
    speculator.pace = FixedPace((min(length, speculator.lengths[-1]),))
    return engine


def draw(engine: Engine, prompt: Sequence[int], count: int, temperature: float, first_seed: int = 0) -> Texts:
    """So many short texts, past ends as well."""
    asked = [Sampling(TOKENS, temperature, seed=first_seed + n, ignore_end=True) for n in range(count)]
    return Counter(tuple(request.tokens) for request in engine.generate([prompt] * count, asked))


def warm_draws(engine: Engine, prompt: Sequence[int], count: int) -> Draws:
    """Texts without drafts, at the lowest temperature at which they differ enough to tell."""
    for temperature in TEMPERATURES:
        tried = draw(engine, prompt, TRIED, temperature)
        if max(tried.values()) <= LARGEST_SHARE * TRIED:
            break
    return Draws(prompt, temperature, draw(engine, prompt, count, temperature))


def compared(drafting: Engine, without: Draws, count: int) -> dict[str, float]:
    """Texts with drafts against those without."""
    texts = draw(drafting, without.prompt, count, without.temperature, FIRST_SEED)
    speculator = drafting.speculator
    assert speculator is not None
    return {
        "p_value": p_value(texts, without.texts),
        "draws": count,
        "draws_without": sum(without.texts.values()),
        "different_texts": len({*texts, *without.texts}),
        "temperature": without.temperature,
        "accepted": speculator.accepted / max(1, speculator.drafted),
    }


def p_value(one: Texts, other: Texts) -> float:
    """Pearson's chi-square test that two samples are of one distribution. Texts that are expected fewer than FEWEST
    times in either sample share a cell."""
    cells: list[tuple[int, int]] = []
    rare = (0, 0)
    total, fewer = sum(one.values()) + sum(other.values()), min(sum(one.values()), sum(other.values()))
    for text in sorted({*one, *other}, key=lambda each: -one.get(each, 0) - other.get(each, 0)):
        pair = one.get(text, 0), other.get(text, 0)
        if sum(pair) * fewer >= FEWEST * total:
            cells.append(pair)
        else:
            rare = rare[0] + pair[0], rare[1] + pair[1]
    if sum(rare) * fewer >= FEWEST * total:
        cells.append(rare)
    elif cells:
        cells[-1] = cells[-1][0] + rare[0], cells[-1][1] + rare[1]
    if len(cells) < 2:
        raise ValueError(f"expected two kinds of texts or more that are frequent enough to compare; got {len(cells)}")
    seen_CS = torch.tensor(cells, dtype=torch.double)
    expected_CS = seen_CS.sum(1, keepdim=True) * seen_CS.sum(0) / seen_CS.sum()
    statistic = ((seen_CS - expected_CS) ** 2 / expected_CS).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), statistic / 2))
