"""Conditional flow matching with a plain MLP that predicts the clean picture; several models in one computation.

x_t = (1−t)·noise + t·picture; the network reads x_t, t and the constituents and predicts the picture; sampling goes
from noise to picture in Euler steps of v = (predicted − x_t)/(1−t).

Shapes: E model, B picture, P pixel value, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..common.stacked import Params
from . import scenes
from .scenes import PIXELS, SIZES

TIMES = 8  # features of the time
LOUDNESS = 5.0  # of what is told, so that sixteen numbers are heard beside 432 noisy ones
EULER_STEPS = 20
REPORTS = 5  # while training


@dataclass(frozen=True)
class Flow:
    """A network's shape and schedule."""

    width: int = 256
    depth: int = 3
    updates: int = 1500
    rows: int = 128
    rate: float = 2e-3

    def initialise(self, models: int, generator: torch.Generator) -> Params:
        sizes = [PIXELS + TIMES + sum(SIZES), *[self.width] * self.depth, PIXELS]
        params: Params = {}
        for layer, (rows, columns) in enumerate(pairwise(sizes)):
            weight = torch.randn(models, rows, columns, generator=generator, device=generator.device)
            params[f"{layer}.weight"] = weight / rows**0.5
            params[f"{layer}.bias"] = torch.zeros(models, 1, columns, device=generator.device)
        return params

    def __call__(
        self, params: Params, x_EBP: Tensor, t_EB: Tensor, told_EBC: Tensor, hidden: list[Tensor] | None = None
    ) -> Tensor:
        """The predicted picture; `hidden` collects every layer's output before its nonlinearity."""
        wave = 2 ** torch.arange(TIMES // 2, device=t_EB.device) * torch.pi
        angle = t_EB[..., None] * wave
        h = torch.cat([x_EBP, angle.sin(), angle.cos(), LOUDNESS * told_EBC], -1)
        for layer in range(self.depth + 1):
            h = torch.baddbmm(params[f"{layer}.bias"], h if layer == 0 else h.relu(), params[f"{layer}.weight"])
            if hidden is not None:
                hidden.append(h)
        return h

    def train(self, trained_E: list[Tensor], seed: int, device: str, log: Callable[[str], None]) -> Params:
        """One model for each list of combinations to train on."""
        generator = torch.Generator(device=device).manual_seed(seed)
        params = {name: p.requires_grad_() for name, p in self.initialise(len(trained_E), generator).items()}
        optimiser = torch.optim.AdamW(params.values(), lr=self.rate, weight_decay=1e-4, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, self.rate, self.updates, pct_start=0.05)
        longest = max(map(len, trained_E))
        table_EC = torch.stack([torch.cat([c, c[:1].expand(longest - len(c))]) for c in trained_E]).to(device)
        count_E1 = torch.tensor([[len(c)] for c in trained_E], device=device)
        for update in range(1, self.updates + 1):
            at = torch.rand(len(trained_E), self.rows, generator=generator, device=device)
            combination_EB = table_EC.gather(1, (at * count_E1).long().clamp(max=count_E1 - 1))
            picture = scenes.pictures(combination_EB, generator)
            noise = torch.randn(picture.shape, generator=generator, device=device)
            t_EB = torch.rand(picture.shape[:2], generator=generator, device=device)
            mixed = (1 - t_EB[..., None]) * noise + t_EB[..., None] * picture
            predicted = self(params, mixed, t_EB, scenes.one_hot(combination_EB))
            loss = (predicted - picture).square().flatten(1).mean(1).sum()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            if update % (self.updates // REPORTS or 1) == 0:
                log(f"width {self.width}, update {update:,} of {self.updates:,}: mean loss {loss / len(trained_E):.2g}")
        return {name: p.detach() for name, p in params.items()}

    @torch.no_grad()
    def sample(self, params: Params, combination_EB: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pictures [E, B, P], and the last hidden layer [E, B, D] half-way."""
        shape = (*combination_EB.shape, PIXELS)
        x = torch.randn(shape, generator=generator, device=combination_EB.device)
        told = scenes.one_hot(combination_EB)
        for step in range(EULER_STEPS):
            t = step / EULER_STEPS
            hidden: list[Tensor] = []
            predicted = self(params, x, torch.full(shape[:2], t, device=x.device), told, hidden)
            if step == EULER_STEPS // 2:
                layer = hidden[-2]
            x = x + (predicted - x) / (1 - t) / EULER_STEPS
        return x, layer
