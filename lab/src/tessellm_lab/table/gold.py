"""What greedy decoding would write, from one forward pass over right texts.

Greedy decoding writes a text exactly if and only if every row's argmax along it is its next token. So right texts
alone say which strength of a merge is best on the development split, and where a composition first errs.

    M members   B texts   T tokens   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .functions import INDENT
from .problems import Problem
from .texts import ANYONE, CODE, MATH
from .tokens import encode

ROWS = 128  # texts of one pass


class Gold(NamedTuple):
    """Right texts, padded on the right."""

    tokens_BT: Tensor
    owner_BT: Tensor  # whose token it is
    written_BT: Tensor  # True where a model writes


def gold_texts(tokenizer: Any, asked: Sequence[Problem], device: str) -> Gold:
    rows, owners, starts = [], [], []
    for problem in asked:
        tokens, owner = encode(tokenizer, [(problem.prompt, ANYONE), *pieces(problem)])
        rows.append(tokens)
        owners.append(owner)
        starts.append(len(encode(tokenizer, [(problem.prompt, ANYONE)])[0]) - 1)
    width = max(map(len, rows))
    tokens_BT = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows], device=device)
    owner_BT = torch.tensor([row + [ANYONE] * (width - len(row)) for row in owners], device=device)
    at_T = torch.arange(width, device=device)
    start_B1, end_B1 = (torch.tensor(each, device=device)[:, None] for each in (starts, list(map(len, rows))))
    return Gold(tokens_BT, owner_BT, (at_T >= start_B1) & (at_T < end_B1))


def pieces(problem: Problem) -> list[tuple[str, int]]:
    """A right text by the skill that each piece takes."""
    if problem.kind != "mixed":
        return [(problem.gold, MATH if problem.kind == "math" else CODE)]
    above, after = problem.gold.split(f"{INDENT}n = ", 1)
    number, body = after.split("\n", 1)
    return [(f"{above}{INDENT}n = {number}\n", MATH), (body, CODE)]


@torch.no_grad()
def misses(models: Sequence[Any], gold: Gold, rule: Callable[[Tensor, Gold], Tensor]) -> tuple[Tensor, Tensor]:
    """Where a rule over the models would not have written the right token, and the right token's log-probability;
    both 0 where no model writes: [B, T] each."""
    wrong, likelihood = [], []
    for first in range(0, len(gold.tokens_BT), ROWS):
        some = Gold(*(each[first : first + ROWS] for each in gold))
        logp_MBTV = torch.stack([model(some.tokens_BT).logits.float().log_softmax(-1) for model in models])
        logp_BTV, next_BT = rule(logp_MBTV, some)[:, :-1], some.tokens_BT[:, 1:]
        wrong.append(functional.pad(logp_BTV.argmax(-1) != next_BT, (1, 0)) & some.written_BT)
        right_BT = functional.pad(logp_BTV.gather(-1, next_BT[..., None])[..., 0], (1, 0))
        likelihood.append(right_BT.masked_fill(~some.written_BT, 0.0))
    return torch.cat(wrong), torch.cat(likelihood)
