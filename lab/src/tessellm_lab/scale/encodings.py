"""Six ways to tell a network which task it faces, from the latent itself to examples of the task's behaviour.

Shapes: E run, B task, M module, I width of the encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tessellm.errors import TessellmError, nearest

SHOTS, COUPLINGS, BINS = 50, 3, 10
Device = torch.device | str
Encode = Callable[[Tensor], Tensor]  # [B, M] to [B, I]


def identity(modules: int, generator: torch.Generator, device: Device) -> Encode:
    """z"""
    return lambda z: z


def orthogonal(modules: int, generator: torch.Generator, device: Device) -> Encode:
    """Qz"""
    q, r = torch.linalg.qr(torch.randn(modules, modules, generator=generator))
    q = (q * r.diagonal().sign()).to(device)
    return lambda z: z @ q


def language(modules: int, generator: torch.Generator, device: Device) -> Encode:
    """The numbers [1, w₁, 2, w₂, …] with w = ⌊10 z⌋ + M + 1, as words of a sentence; divided by ten."""
    names = torch.arange(1, modules + 1, device=device).float()

    def encode(z: Tensor) -> Tensor:
        words = _tenths(z) + modules + 1
        return torch.stack([names.expand_as(z), words], -1).flatten(-2) / 10

    return encode


def invertible(modules: int, generator: torch.Generator, device: Device, deviation: float = 0.1) -> Encode:
    """Three affine couplings: half of the vector scales and shifts the other by a random network of it, whose weights
    have this standard deviation: at .1 the code is all but linear in z."""
    half, width = modules // 2, 2 * modules
    sizes = [(half, width), (width, width), (width, 2 * (modules - half))]
    layers = [
        [deviation * torch.randn(size, generator=generator).to(device) for size in sizes] for _ in range(COUPLINGS)
    ]

    def encode(z: Tensor) -> Tensor:
        for number, weights in enumerate(layers):
            z = z.flip(-1) if number % 2 else z
            kept, moved = z[..., :half], z[..., half:]
            hidden = (kept @ weights[0]).sigmoid()
            hidden = (hidden @ weights[1]).sigmoid()
            scale, shift = (hidden @ weights[2]).chunk(2, -1)
            z = torch.cat([kept, moved * (1 + 0.5 * scale.tanh()) + shift], -1)
            z = z.flip(-1) if number % 2 else z
        return z

    return encode


def interval_shuffle(modules: int, generator: torch.Generator, device: Device) -> Encode:
    """The ten tenths of [0, 1] permuted, the place inside a tenth kept."""
    order = torch.randperm(BINS, generator=generator).float().to(device)

    def encode(z: Tensor) -> Tensor:
        tenth = _tenths(z).clamp(max=BINS - 1)
        return (order[tenth.long()] + BINS * z - tenth) / BINS

    return encode


def _tenths(z: Tensor) -> Tensor:
    return (BINS * z + 1e-3).floor()  # .6 is the sixth tenth, whatever it is as a float


ENCODINGS = {
    "identity": identity,
    "orthogonal": orthogonal,
    "language": language,
    "invertible": invertible,
    "interval_shuffle": interval_shuffle,
}
BENT = {  # not among those of `reproduce scale`: see bent.py
    "invertible, weights of N(0, 1)": partial(invertible, deviation=1.0),
    "invertible, weights of N(0, 2²)": partial(invertible, deviation=2.0),
}
FEWSHOT = "fewshot"  # fifty fresh inputs with their outputs; needs the teacher, so a family's own batch makes it
NAMES = (*ENCODINGS, FEWSHOT)


def encoding(name: str, modules: int, seed: int, device: Device) -> Encode:
    """One of the encodings that are functions of z; its random parts are the seed's."""
    known: dict[str, Callable[[int, torch.Generator, Device], Encode]] = {**ENCODINGS, **BENT}
    if name not in known:
        raise TessellmError(f"unknown encoding {name!r}; {nearest(name, ENCODINGS)}")
    return known[name](modules, torch.Generator().manual_seed(seed), device)


def width_of(name: str, modules: int, inputs: int, outputs: int) -> int:
    """How many numbers an encoding has."""
    return {"language": 2 * modules, FEWSHOT: SHOTS * (inputs + outputs)}.get(name, modules)
