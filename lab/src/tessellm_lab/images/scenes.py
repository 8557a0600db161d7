"""Small pictures of one shape, in one colour, in one quarter of the picture; and the judge who says what they show.

Shapes: B picture, P pixel value (side × side × 3), C combination.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SIDE, CELL, JITTER = 12, 4, 1
SHAPES = {
    "square": ("####", "####", "####", "####"),
    "ring": ("####", "#..#", "#..#", "####"),
    "cross": (".##.", "####", "####", ".##."),
    "corner": ("#...", "#...", "#...", "####"),
    "bars": ("#.#.", "#.#.", "#.#.", "#.#."),
    "diagonal": ("##..", "###.", ".###", "..##"),
}
COLOURS = {
    "red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1),
    "yellow": (1, 1, 0), "magenta": (1, 0, 1), "cyan": (0, 1, 1),
}  # fmt: skip
POSITIONS = {"top left": (1, 1), "top right": (1, 7), "bottom left": (7, 1), "bottom right": (7, 7)}
CONSTITUENTS = {"shape": list(SHAPES), "colour": list(COLOURS), "position": list(POSITIONS)}
SIZES = tuple(len(values) for values in CONSTITUENTS.values())
PIXELS = SIDE * SIDE * 3


def combinations() -> Tensor:
    """Every combination as the numbers of its constituents: [C, 3]."""
    return torch.cartesian_prod(*(torch.arange(size) for size in SIZES))


def prompt(combination: Tensor) -> str:
    """`a red square, top left`."""
    shape, colour, position = (values[int(n)] for values, n in zip(CONSTITUENTS.values(), combination, strict=True))
    return f"a {colour} {shape}, {position}"


@cache
def templates() -> Tensor:
    """Every combination at every jitter, black −1 to full 1: [C, 9, P]."""
    moves = [(dr, dc) for dr in range(-JITTER, JITTER + 1) for dc in range(-JITTER, JITTER + 1)]
    made = -torch.ones(len(combinations()), len(moves), SIDE, SIDE, 3)
    names = list(CONSTITUENTS["shape"]), list(COLOURS.values()), list(POSITIONS.values())
    for row, (shape, colour, position) in enumerate(combinations().tolist()):
        pattern = torch.tensor([[cell == "#" for cell in line] for line in SHAPES[names[0][shape]]])
        ink = torch.tensor(names[1][colour]) * 2.0 - 1
        for number, (dr, dc) in enumerate(moves):
            r, c = names[2][position][0] + dr, names[2][position][1] + dc
            made[row, number, r : r + CELL, c : c + CELL][pattern] = ink
    return made.flatten(2)


def pictures(combination_B: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures of combinations given by row number, jittered: [B, P]."""
    jitter_B = torch.randint(templates().shape[1], combination_B.shape, generator=generator, device=generator.device)
    return templates().to(combination_B.device)[combination_B, jitter_B]


def one_hot(combination_B: Tensor) -> Tensor:
    """Constituents one-hot, side by side: [B, 16]."""
    parts = combinations().to(combination_B.device)[combination_B]
    hot = [torch.nn.functional.one_hot(parts[..., n], size) for n, size in enumerate(SIZES)]
    return torch.cat(hot, -1).float()


def judge(picture_BP: Tensor) -> Tensor:
    """The combination whose template, at its best jitter, is nearest: [B]."""
    known = templates().to(picture_BP.device)
    distance = torch.cdist(picture_BP.float(), known.flatten(0, 1)).unflatten(1, known.shape[:2])
    return distance.amin(2).argmin(1)
