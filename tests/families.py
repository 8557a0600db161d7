"""Members of one family or of several architectures, composed, and ids to read them on."""

import torch

import tessellm

from conftest import build_model, perturbed

NAMES = ["one", "two", "three", "four", "five", "six"]


def family(archs: list[str], seed: int = 0) -> list:
    """A base and experts; those of the base's architecture are fine-tunes of it, the others are their own."""
    base = build_model(archs[0], seed)
    return [base] + [
        perturbed(base, seed + n) if arch == archs[0] else build_model(arch, seed + n)
        for n, arch in enumerate(archs[1:], 1)
    ]


def composition(models: list, weights: list[float] | None = None, **options) -> tessellm.ComposedForCausalLM:
    experts = dict(zip(NAMES, models[1:], strict=False))
    options = {"rule": "product", **options}
    return tessellm.compose(
        models[0], experts, weights=dict(zip(experts, weights or [1.0] * len(experts), strict=True)), **options
    )


def random_ids(batch: int = 3, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 60, (batch, length), generator=torch.Generator().manual_seed(seed))
