"""Trained provers: small transformers that learn what the symbolic provers of `problems` say.

Every member reads the same texts: proofs that need no identity or a single one, of training skeletons. At each word it
learns what *its* prover would write next there, also after a line that another's identity made. So all members agree
with the base where they are not asked, and none has seen a problem that needs two identities.

    E members   B texts   T words   V vocabulary
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compose import compose
from ..stacked import Params, Shape, initialise, select, to_llama, train
from .problems import NAMES, VOCABULARY, Prover, random_problem
from .proofs import DOT, EQUALS, Proof, check

PROVERS = (Prover(frozenset()), *(Prover(frozenset([name])) for name in NAMES), Prover(frozenset(NAMES)))
SINGLE_KINDS = (frozenset(), *(frozenset([name]) for name in NAMES))
PADDING = len(VOCABULARY)
LENGTH = 112
SHAPE = Shape(vocabulary=len(VOCABULARY) + 1, width=96, layers=3, heads=4, context=320)
NUMBER = {word: number for number, word in enumerate(VOCABULARY)}


def encode(words: Sequence[str]) -> list[int]:
    return [NUMBER[word] for word in words]


def said(prover: Prover, proof: Proof) -> list[str]:
    """What the prover would write at every word of the proof; `Prover.next_word` at all places, line by line."""
    words: list[str] = [EQUALS]
    before = proof.left
    for number, line in enumerate(proof.continuation_lines):
        candidates = prover.candidates(before)
        for at in range(len(line)):
            fitting = (c for c in candidates if len(c) > at and c[:at] == line[:at])
            words.append(next(fitting)[at])
        before = proof.lines[number]
        words.append(DOT if before == proof.right else EQUALS)
    return words


def pool(count: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Texts [N, T] and what each prover says at each word of the proof, −100 elsewhere: [E, N, T]."""
    texts = torch.full((count, LENGTH), PADDING)
    labels = torch.full((len(PROVERS), count, LENGTH), -100)
    made = 0
    while made < count:
        proof = random_problem(rng.choice(SINGLE_KINDS), rng, test=False)
        words, start = [*proof.prompt, *proof.continuation], len(proof.prompt) - 1
        if len(words) > LENGTH:
            continue
        texts[made, : len(words)] = torch.tensor(encode(words))
        for member, prover in enumerate(PROVERS):
            labels[member, made, start : len(words) - 1] = torch.tensor(encode(said(prover, proof)))
        made += 1
    return texts, labels


def train_members(
    texts_NT: Tensor, labels_ENT: Tensor, steps: tuple[int, int], batch: int, generator: torch.Generator, **options: Any
) -> Params:
    """The base from scratch, then the experts and the one model of all identities from it: E = 5.

    Runs where the generator is; `options` go to `stacked.train`.
    """
    texts_NT, labels_ENT = texts_NT.to(generator.device), labels_ENT.to(generator.device)

    def draw(members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        size = (len(members), batch)
        rows_EB = torch.randint(len(texts_NT), size, generator=generator, device=generator.device)
        targets = torch.stack([labels_ENT[m, rows] for m, rows in zip(members, rows_EB, strict=True)])
        return texts_NT[rows_EB], targets.clamp_min(0), (targets >= 0).float()

    others = list(range(1, len(PROVERS)))
    base = train(initialise(SHAPE, 1, generator), SHAPE, lambda: draw([0]), steps[0], lr=2e-3, **options)
    experts = train(select(base, [0] * len(others)), SHAPE, lambda: draw(others), steps[1], lr=1e-3, **options)
    return {name: torch.cat([base[name], experts[name]]) for name in base}


def models(members: Params) -> dict[str, Any]:
    """Every member as a language model, and the composition of the base and the experts."""
    base, *experts, union = (to_llama(members, SHAPE, member) for member in range(len(PROVERS)))
    named = {f"expert {number}": model for number, model in enumerate(experts, 1)}
    composed = compose(base, {name.replace(" ", "_"): model for name, model in named.items()})
    return {"base": base, **named, "one model of all": union, "composed": composed}


@torch.no_grad()
def proved(model: Any, problems: Sequence[Proof], longest: int = 180) -> float:
    """The share of problems that the model proves, greedily, by the checker."""
    prompts = [encode(problem.prompt) for problem in problems]
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = (ids != PADDING).long()
    options = {"do_sample": False, "eos_token_id": NUMBER[DOT], "pad_token_id": PADDING}
    longest = min(longest, SHAPE.context - width)
    device = model.device
    made = model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=longest, **options)
    written = [words(row) for row in made[:, width:].tolist()]
    return sum(check(p.left, p.right, w).proved for p, w in zip(problems, written, strict=True)) / len(problems)


def words(numbers: Sequence[int]) -> list[str]:
    """Up to the end of the proof; padding is no word of any proof."""
    made = [VOCABULARY[number] if number < PADDING else "" for number in numbers]
    return made[: made.index(DOT) + 1] if DOT in made else made
