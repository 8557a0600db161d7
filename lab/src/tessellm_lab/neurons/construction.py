"""A ReLU network that is the hyperteacher within ε, its weights written down from the teacher's.

W(z) is linear in z, so only the products W_ij(z)·x_i are not: uv = ((u+v)² − (u−v)²)/4, with the square drawn by N
straight pieces on [−R, R]:

    s(t) = R² + (δ − 2R) ReLU(t + R) + Σ_{k≥1} 2δ ReLU(t − t_k),   t_k = −R + kδ,  δ = 2R/N,   0 ≤ s(t) − t² ≤ δ²/4

Hidden 1: ReLU(W_ij(z) ± x_i − t_k) for every i, j, sign and k, and one unit for each b_j(z) ≥ 0. Hidden 2: the
teacher's own pre-activations. Neurons: 2hnN + 2h, whatever M; error: at most n R²/(4N²) max_o Σ_j |Ω_jo|.

For binary z there is an exact form with no ε: z·u = ReLU(u + Bz − B) − ReLU(−u + Bz − B) for |u| ≤ B.

Float64 throughout. Shapes: M module, N input, H hidden, O output, K piece, B point, P unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Teacher:
    """y = Ωᵀ ReLU(x W(z) + b(z)), as in `scale.teacher`, a single one."""

    theta_MNH: Tensor
    beta_MH: Tensor  # ≥ 0
    omega_HO: Tensor
    most: int

    def __call__(self, z_BM: Tensor, x_BN: Tensor) -> Tensor:
        w_BNH = torch.einsum("bm,mnh->bnh", z_BM, self.theta_MNH) / self.most**0.5
        b_BH = z_BM @ self.beta_MH / self.most**0.5
        return (torch.einsum("bn,bnh->bh", x_BN, w_BNH) + b_BH).relu() @ self.omega_HO


@dataclass(frozen=True)
class Network:
    """A plain MLP with two hidden layers on [z; x]."""

    weight_1: Tensor  # [M+N, P]
    bias_1: Tensor
    weight_2: Tensor
    bias_2: Tensor
    weight_3: Tensor
    bound: float  # on |network − teacher|, anywhere with z in the family and x in [−1, 1]ⁿ

    def __call__(self, z_BM: Tensor, x_BN: Tensor) -> Tensor:
        hidden = (torch.cat([z_BM, x_BN], 1) @ self.weight_1 + self.bias_1).relu()
        return (hidden @ self.weight_2 + self.bias_2).relu() @ self.weight_3

    @property
    def neurons(self) -> int:
        return self.weight_1.shape[1] + self.weight_2.shape[1]

    @property
    def parameters(self) -> int:
        tensors = (self.weight_1, self.bias_1, self.weight_2, self.bias_2, self.weight_3)
        return sum(tensor.numel() for tensor in tensors)


def reach(teacher: Teacher) -> float:
    """R: how large |W_ij(z) ± x_i| can be for z in [0, 1]^M with at most K modules on."""
    largest = teacher.theta_MNH.abs().topk(min(teacher.most, len(teacher.theta_MNH)), dim=0).values.sum(0)
    return (largest.max() / teacher.most**0.5).item() + 1


def approximate(teacher: Teacher, pieces: int) -> Network:
    """The network of the theorem, its square drawn in `pieces` pieces."""
    _, inputs, units = teacher.theta_MNH.shape
    radius = reach(teacher)
    delta = 2 * radius / pieces
    scale = teacher.most**0.5
    knots_K = -radius + delta * torch.arange(pieces, dtype=torch.float64)  # t_0 = −R
    slope_K = torch.full((pieces,), 2 * delta, dtype=torch.float64)
    slope_K[0] = delta - 2 * radius
    theta = (teacher.theta_MNH / scale)[..., None, None].expand(-1, -1, -1, 2, pieces)
    sign_2 = torch.tensor([1.0, -1.0], dtype=torch.float64)
    x_part = torch.eye(inputs, dtype=torch.float64)[:, :, None, None, None] * sign_2[:, None]
    x_part = x_part.expand(inputs, inputs, units, 2, pieces)
    squares = torch.cat([theta, x_part]).flatten(1)  # columns (i, j, sign, k)
    biases = torch.cat([teacher.beta_MH / scale, torch.zeros(inputs, units, dtype=torch.float64)])
    bias_1 = torch.cat([(-knots_K).expand(inputs, units, 2, pieces).flatten(), torch.zeros(units, dtype=torch.float64)])
    to = (
        torch.eye(units, dtype=torch.float64)[None, :, None, None]
        * (sign_2[:, None] * slope_K / 4)[None, None, ..., None]
    )
    weight_2 = torch.cat([to.expand(inputs, units, 2, pieces, units).reshape(-1, units), torch.eye(units).double()])
    bound = inputs * radius**2 / (4 * pieces**2) * teacher.omega_HO.abs().sum(0).max().item()
    zeros = torch.zeros(units, dtype=torch.float64)  # the two constants R²/4 cancel between the signs
    return Network(torch.cat([squares, biases], 1), bias_1, weight_2, zeros, teacher.omega_HO, bound)


def exact_binary(teacher: Teacher) -> Network:
    """The network that *is* the teacher for z in {0, 1}^M: a pair of units for every module and teacher's unit."""
    modules, _, units = teacher.theta_MNH.shape
    scale = teacher.most**0.5
    # u_mj = x·Θ_m[:, j] + β_mj, |u| ≤ B
    size = ((teacher.theta_MNH.abs().sum(1) + teacher.beta_MH).max() / scale).item()
    gate = torch.eye(modules, dtype=torch.float64)[:, :, None].expand(-1, -1, units) * size
    plus = torch.cat([gate, (teacher.theta_MNH / scale).transpose(0, 1)]).flatten(1)
    minus = torch.cat([gate, -(teacher.theta_MNH / scale).transpose(0, 1)]).flatten(1)
    bias = (teacher.beta_MH / scale).flatten()
    weight_1 = torch.cat([plus, minus], 1)
    bias_1 = torch.cat([bias - size, -bias - size])
    to = torch.eye(units, dtype=torch.float64).repeat(modules, 1)
    return Network(weight_1, bias_1, torch.cat([to, -to]), torch.zeros(units).double(), teacher.omega_HO, 1e-10)
