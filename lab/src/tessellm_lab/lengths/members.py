"""Small transformers with five ways of knowing positions, for a task that needs them: write the letter LAG places back.

Position-wise: the output at t is the letter at t−LAG, transformed (base: as it is; experts: A→K, M→B). Members train at
length 16 and are read at up to 128. Many members run side by side, as in `stacked`; the schemes are

    learned      a vector for each position; those past 16 are never trained
    sinusoidal   fixed vectors added to the embeddings
    rotary       queries and keys turned by their positions: distances alone count
    alibi        a penalty on attention, linear in the distance
    window       rotary, and attention reaches WINDOW places back at most: distances seen in training are all there are

    E members   B strings   T positions   D width   H heads   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ..common.stacked import Params, Shape, initialise, mix, rms_norm, rotate, select, train
from ..letters.positions import ALPHABET, REPLACEMENTS, transform

SCHEMES = ("learned", "sinusoidal", "rotary", "alibi", "window")
TRAINED_LENGTH, LONGEST, LAG, WINDOW = 16, 128, 1, 4
SHAPE = Shape(vocabulary=len(ALPHABET), width=64, layers=2, heads=4, context=LONGEST)


def logits(scheme: str, params: Params, shape: Shape, tokens_EBT: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[E, B, T, V]."""
    steps = tokens_EBT.shape[-1]
    x = mix(functional.one_hot(tokens_EBT, shape.vocabulary).to(dtype), params["embed"])
    if scheme == "learned":
        x = x + params["positions"][:, None, :steps]
    if scheme == "sinusoidal":
        x = x + _waves(steps, shape.width)
    for layer in range(shape.layers):
        x = x + _attend(scheme, rms_norm(x, params[f"{layer}.attend_norm"]), params, layer, shape.heads)
        gate, up = mix(rms_norm(x, params[f"{layer}.feed_norm"]), params[f"{layer}.gate_up"]).chunk(2, -1)
        x = x + mix(functional.silu(gate) * up, params[f"{layer}.down"])
    return mix(rms_norm(x, params["norm"]), params["head"]).float()


def _attend(scheme: str, x_EBTD: Tensor, params: Params, layer: int, heads: int) -> Tensor:
    e, b, t, d = x_EBTD.shape
    qkv = mix(x_EBTD, params[f"{layer}.qkv"]).view(e * b, t, 3, heads, d // heads)
    q, k, v = (part.squeeze(2).transpose(1, 2) for part in qkv.split(1, 2))
    if scheme in ("rotary", "window"):
        angle = _angles(t, d // heads).repeat(1, 2)
        q, k = (rotate(part, angle.cos(), angle.sin()) for part in (q, k))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=_bias(scheme, t, heads))
    return mix(out.transpose(1, 2).reshape(e, b, t, d), params[f"{layer}.out"])


def _angles(steps: int, size: int) -> Tensor:
    frequency = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    return torch.outer(torch.arange(steps).float(), frequency)


def _waves(steps: int, width: int) -> Tensor:
    """Fixed vectors as large as the embeddings at the start."""
    angle = _angles(steps, width)
    return 0.02 * torch.cat([angle.sin(), angle.cos()], dim=-1)


def _bias(scheme: str, steps: int, heads: int) -> Tensor:
    """What is added to the attention scores, [H, T, T]: −inf for the future and past a window; ALiBi's penalty."""
    distance_TT = torch.arange(steps).unsqueeze(-1) - torch.arange(steps)
    hidden_TT = (distance_TT < 0) | ((distance_TT > WINDOW) & (scheme == "window"))
    slope_H = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads) * (scheme == "alibi")
    return torch.where(hidden_TT, -torch.inf, -slope_H[:, None, None] * distance_TT)


def target(strings_BT: Tensor, replacements: tuple[dict[str, str], ...]) -> Tensor:
    """The letter LAG places back, transformed; the first LAG outputs do not count."""
    return transform(strings_BT.roll(LAG, dims=-1), replacements)


def train_members(scheme: str, seeds: int, steps: tuple[int, int], batch: int, generator: torch.Generator) -> Params:
    """Bases, then both experts of each from its base: E = 3·seeds, seed by seed."""

    def batches(members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        size = (len(members), batch, TRAINED_LENGTH)
        strings = torch.randint(len(ALPHABET), size, generator=generator)
        targets = torch.stack([target(s, (REPLACEMENTS[m],)) for s, m in zip(strings, members, strict=True)])
        mask = (torch.arange(TRAINED_LENGTH) >= LAG).float().expand(size)
        return strings, targets, mask

    forward: Callable[..., Tensor] = partial(logits, scheme)
    initial = initialise(SHAPE, seeds, generator)
    if scheme == "learned":
        initial["positions"] = 0.02 * torch.randn(seeds, LONGEST, SHAPE.width, generator=generator)
    bases = train(initial, SHAPE, lambda: batches([0] * seeds), steps[0], lr=3e-3, forward=forward)
    start = select(bases, [seed for seed in range(seeds) for _ in (1, 2)])
    experts = train(start, SHAPE, lambda: batches([1, 2] * seeds), steps[1], lr=1e-3, forward=forward)
    both = {name: torch.cat([bases[name], experts[name]]) for name in bases}
    return select(both, [i for s in range(seeds) for i in (s, seeds + 2 * s, seeds + 2 * s + 1)])
