"""What the tests of scale share."""

from __future__ import annotations

import torch

from tessellm.experiments.scale.networks import Mlp
from tessellm.experiments.scale.training import Run, Stack

TOY = Stack("toy", (Run(), Run(seed=1)), Mlp(8, 2), 40, modules=4, size=4, tasks=8, rate=1e-2)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
