"""The hyperteacher: a family of regression tasks in which a task's latent generates the weights of a small network.

    y = Ωᵀ ReLU(x W(z) + b(z)),   W(z) = Σ_m (z_m/√K) Θ_m,   b(z) = Σ_m (z_m/√K) β_m

Shapes: E run, B task, S sample, M module, N input, H hidden, O output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hyperteacher:
    """One teacher a run, all of the same size."""

    theta_EMNH: Tensor
    beta_EMH: Tensor
    omega_EHO: Tensor
    most: int  # K, the most modules in a task
    samples: int = 16

    @classmethod
    def random(cls, seeds: list[int], modules: int, most: int, size: int, device: torch.device | str) -> Hyperteacher:
        """Inputs, hidden units and outputs: `size` of each."""
        theta, beta, omega = [], [], []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            theta.append(_truncated((modules, size, size), (3**0.5 / size) ** 0.5, generator))
            beta.append(torch.rand(modules, size, generator=generator) / 2)
            omega.append(_truncated((size, size), (3**0.5 / size) ** 0.5, generator))
        return cls(torch.stack(theta).to(device), torch.stack(beta).to(device), torch.stack(omega).to(device), most)

    def only(self, run: int) -> Hyperteacher:
        """The teacher of one run."""
        one = slice(run, run + 1)
        return Hyperteacher(self.theta_EMNH[one], self.beta_EMH[one], self.omega_EHO[one], self.most, self.samples)

    @property
    def inputs(self) -> int:
        return self.theta_EMNH.shape[2]

    @property
    def outputs(self) -> int:
        return self.omega_EHO.shape[2]

    def draw(self, z_EBM: Tensor, generator: torch.Generator, samples: int | None = None) -> tuple[Tensor, Tensor]:
        """Fresh inputs [E, B, S, N] and their targets [E, B, S, O]."""
        shape = (*z_EBM.shape[:2], samples or self.samples, self.inputs)
        x_EBSN = 2 * torch.rand(shape, generator=generator, device=z_EBM.device) - 1
        return x_EBSN, self.answer(z_EBM, x_EBSN)

    def answer(self, z_EBM: Tensor, x_EBSN: Tensor) -> Tensor:
        """[E, B, S, O]"""
        share_EBM = z_EBM / self.most**0.5
        w_EBNH = torch.bmm(share_EBM, self.theta_EMNH.flatten(2)).unflatten(-1, self.theta_EMNH.shape[2:])
        b_EBH = torch.bmm(share_EBM, self.beta_EMH)
        hidden = (x_EBSN @ w_EBNH + b_EBH[:, :, None]).relu()
        return torch.bmm(hidden.flatten(1, 2), self.omega_EHO).unflatten(1, hidden.shape[1:3])

    def loss(self, output_EBSO: Tensor, target_EBSO: Tensor) -> Tensor:
        """Mean squared error of each run: [E]."""
        return (output_EBSO.float() - target_EBSO).square().flatten(1).mean(1)

    def score(self, output_EBSO: Tensor, target_EBSO: Tensor) -> dict[str, Tensor]:
        """R² of each run [E]: 1 − error²/variance, the variance a task's and output's over its samples, averaged."""
        variance = target_EBSO.var(2, unbiased=False, keepdim=True).clamp(min=1e-8)
        ratio = (output_EBSO.float() - target_EBSO).square() / variance
        return {"score": 1 - ratio.flatten(1).mean(1)}


def _truncated(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    """Normal, drawn again beyond two standard deviations."""
    values = torch.randn(shape, generator=generator)
    while (far := values.abs() > 2).any():
        values = torch.where(far, torch.randn(shape, generator=generator), values)
    return std * values
