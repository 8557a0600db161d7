"""What else one does with several fine-tunes of one base: other weights for Eq. 2, and merging their parameters.

Decoding baselines are functions of log-probabilities [M, B, T, V]; merging baselines take parameters with a leading
member axis (0 is the base) and give one member. One function a method, after its paper; no model is known here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tessellm.rules import product

from ..common.stacked import Params


def dexperts(logp_MBTV: Tensor, strength: float = 2.0) -> Tensor:
    """Experts against the base as anti-expert, `strength` shared among them (after arXiv 2105.03023)."""
    experts = logp_MBTV.shape[0] - 1
    return product(logp_MBTV, [strength / experts] * experts)


def contrastive(logp_MBTV: Tensor, share: float = 0.1) -> Tensor:
    """The experts' mean minus the base, on tokens at least `share` as probable as the mean's favourite
    (after arXiv 2210.15097)."""
    mean_BTV = (logp_MBTV[1:].logsumexp(0)).log_softmax(-1)
    plausible_BTV = mean_BTV >= mean_BTV.amax(-1, keepdim=True) + torch.tensor(share).log().item()
    return (mean_BTV - logp_MBTV[0]).masked_fill(~plausible_BTV, -torch.inf).log_softmax(-1)


def geometric_mean(logp_MBTV: Tensor) -> Tensor:
    """Eq. 2 with weights 1/k."""
    return dexperts(logp_MBTV, strength=1.0)


def task_arithmetic(weights_M: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """θ_b + scale · Σ (θ_i − θ_b) (arXiv 2212.04089)."""
    return weights_M[0] + scale * (weights_M[1:] - weights_M[:1]).sum(0)


def ties(weights_M: Tensor, scale: float, generator: torch.Generator, density: float = 0.2) -> Tensor:
    """Trim task vectors to their largest entries, elect signs by mass, average what agrees (arXiv 2306.01708)."""
    task_KP = (weights_M[1:] - weights_M[:1]).flatten(1)
    kept = max(1, int(density * task_KP.shape[1]))
    cut_K1 = task_KP.abs().topk(kept, 1).values[:, -1:]
    task_KP = torch.where(task_KP.abs() >= cut_K1, task_KP, 0.0)
    sign_P = task_KP.sum(0).sign()
    agree_KP = (task_KP.sign() == sign_P) & (task_KP != 0)
    merged_P = (task_KP * agree_KP).sum(0) / agree_KP.sum(0).clamp_min(1)
    return weights_M[0] + scale * merged_P.view_as(weights_M[0])


def dare(weights_M: Tensor, scale: float, generator: torch.Generator, density: float = 0.5) -> Tensor:
    """Drop entries of each task vector at random, rescale the rest, add (arXiv 2311.03099)."""
    task_M = weights_M[1:] - weights_M[:1]
    kept_M = torch.rand(task_M.shape, generator=generator, device=task_M.device) < density
    return weights_M[0] + scale * (task_M * kept_M / density).sum(0)


def linear(weights_M: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """The experts' mean; it has no scale (arXiv 2203.05482)."""
    return weights_M[1:].mean(0)


def slerp(weights_M: Tensor, scale: float, generator: torch.Generator, straight: float = 0.9995) -> Tensor:
    """From one of two experts to the other along the arc between them, `scale` of the way; where they are nearly
    parallel, along the line (Shoemake 1985)."""
    a, b = weights_M[1:].double()
    cosine = (a * b).sum() / (a.norm() * b.norm())
    if cosine.abs() > straight:
        return ((1 - scale) * a + scale * b).to(weights_M.dtype)
    angle = cosine.arccos()
    return ((((1 - scale) * angle).sin() * a + (scale * angle).sin() * b) / angle.sin()).to(weights_M.dtype)


DECODING: dict[str, Callable[[Tensor], Tensor]] = {
    "eq2": product,
    "geometric-mean": geometric_mean,
    "dexperts": dexperts,
    "contrastive": contrastive,
}
MERGING: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = {
    "task-arithmetic": task_arithmetic,
    "ties": ties,
    "dare": dare,
}
EVERY_MERGE = {"linear": linear, **MERGING, "slerp": slerp}  # slerp takes two experts


def merge(method: str, params: Params, scale: float, seed: int = 0) -> Params:
    """All tensors of members (0 the base) merged into one member; the leading axis stays, with length one."""
    device = next(iter(params.values())).device
    generator = torch.Generator(device=device).manual_seed(seed)
    return {name: EVERY_MERGE[method](p, scale, generator)[None] for name, p in params.items()}
