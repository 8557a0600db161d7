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

from ..stacked import Params, Shape, logits
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
    head, after = problem.gold.split("    n =", 1)
    number, body = after.split("\n", 1)
    return [(f"{head}    n =", MATH), (f"{number}\n", ANYONE), (body, CODE)]


@torch.no_grad()
def member_rows(params: Params, shape: Shape, tokens_BT: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Log-probabilities of all members: [M, B, T, V]."""
    members = next(iter(params.values())).shape[0]
    return logits(params, shape, tokens_BT.expand(members, -1, -1), dtype).log_softmax(-1)


def wrong(logp_BTV: Tensor, gold: Gold) -> Tensor:
    """True at tokens that greedy decoding would not have written: [B, T]."""
    miss_BT = logp_BTV[:, :-1].argmax(-1) != gold.tokens_BT[:, 1:]
    return torch.nn.functional.pad(miss_BT, (1, 0)) & gold.written_BT


def exact(params: Params, shape: Shape, gold: Gold, rule: Callable[[Tensor, Gold], Tensor]) -> Tensor:
    """Which tokens a rule over the members would not have written: [B, T]."""
    found = []
    for first in range(0, len(gold.tokens_BT), ROWS):
        some = Gold(*(each[first : first + ROWS] for each in gold))
        found.append(wrong(rule(member_rows(params, shape, some.tokens_BT), some), some))
    return torch.cat(found)
