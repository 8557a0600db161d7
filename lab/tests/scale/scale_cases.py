"""What the tests of scale share."""

from __future__ import annotations

import dataclasses

import torch

from tessellm_lab.scale import stacks
from tessellm_lab.scale.networks import Mlp
from tessellm_lab.scale.training import Run, Stack

TOY = Stack("toy", (Run(), Run(seed=1)), Mlp(8, 2), 40, modules=4, size=4, tasks=8, rate=1e-2)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def toys(size: str, seed: int) -> list[Stack]:
    return [
        dataclasses.replace(
            each, steps=4, modules=6, size=4 if each.family == "hyperteacher" else 16, tasks=4,
            network=dataclasses.replace(each.network, width=each.network.width // 8 * 2),
        )
        for each in stacks.stacks(size, seed)
    ]  # fmt: skip
