"""Tasks as sets of modules: masks, which of them are trained on, and the weights that make a mask a task.

A mask says which of M modules a task uses, one to K of them. A latent z = mask ⊙ weights is one task. Splits are over
masks: a held-out combination is never trained on, whatever its weights.

Shapes: T mask, M module, E run, B task.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from tessellm.errors import TessellmError, nearest

SUPPORTS = ("random", "equal", "disconnected", "non_compositional", "popular", "unpopular")
LATENTS = ("discrete", "khot", "continuous")


def all_masks(modules: int, most: int) -> Tensor:
    """Every set of one to `most` modules: [T, M]."""
    sets = [chosen for size in range(1, most + 1) for chosen in combinations(range(modules), size)]
    masks = torch.zeros(len(sets), modules, dtype=torch.bool)
    for row, chosen in enumerate(sets):
        masks[row, list(chosen)] = True
    return masks


def split(masks_TM: Tensor, support: str, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Masks to train on and masks held out.

    random             a share `held_out` is held out; every module is trained on and their co-occurrence is connected
    equal              the same number, and all modules trained on equally often, within one
    popular            the same number, the first module's masks among them as far as they fit
    unpopular          the same number as far as they go: only one alone and one pair use the last module
    disconnected       two halves of the modules never meet in training; all masks that mix them are held out
    non_compositional  every mask with the last module is held out
    """
    if support not in SUPPORTS:
        raise TessellmError(f"unknown support {support!r}; {nearest(support, SUPPORTS)}")
    modules = masks_TM.shape[1]
    if support == "disconnected":
        first = masks_TM[:, : modules // 2].any(1)
        mixed = first & masks_TM[:, modules // 2 :].any(1)
        return masks_TM[~mixed], masks_TM[mixed]
    if support == "non_compositional":
        return masks_TM[~masks_TM[:, -1]], masks_TM[masks_TM[:, -1]]
    generator = torch.Generator().manual_seed(seed)
    size = len(masks_TM) - int(held_out * len(masks_TM))
    for _ in range(10_000):
        order = torch.randperm(len(masks_TM), generator=generator)
        if support == "popular":
            order = torch.cat([order[masks_TM[order, 0]], order[~masks_TM[order, 0]]])
        elif support == "unpopular":
            order = _with_two_of_the_last(masks_TM, order)
        chosen_T = torch.zeros(len(masks_TM), dtype=torch.bool)
        chosen_T[order[:size]] = True
        if support == "equal" and not _equalise_(chosen_T, masks_TM):
            continue
        if is_connected(masks_TM[chosen_T]):
            return masks_TM[chosen_T], masks_TM[~chosen_T]
    raise TessellmError(f"no {support} choice of {size} of {len(masks_TM)} masks connects all {modules} modules")


def is_connected(masks_TM: Tensor) -> bool:
    """Whether every module appears, and modules that appear together link all of them."""
    together_MM = (masks_TM.float().T @ masks_TM.float()) > 0
    reached_M = together_MM[0]
    for _ in range(masks_TM.shape[1]):
        reached_M = (together_MM[reached_M]).any(0) if reached_M.any() else reached_M
    return bool(masks_TM.any(0).all() and reached_M.all())


def _with_two_of_the_last(masks_TM: Tensor, order_T: Tensor) -> Tensor:
    """The last module's own mask and one of its pairs, then all masks without it; none of its others."""
    last_T, sizes_T = masks_TM[order_T, -1], masks_TM[order_T].sum(1)
    alone, pair = order_T[last_T & (sizes_T == 1)], order_T[last_T & (sizes_T == 2)]
    return torch.cat([alone, pair[:1], order_T[~last_T]])


def _equalise_(chosen_T: Tensor, masks_TM: Tensor) -> bool:
    """Exchange chosen masks for others, commonest module for rarest, until counts are within one."""
    index = {tuple(mask): row for row, mask in enumerate(masks_TM.tolist())}
    for _ in range(10 * len(masks_TM)):
        counts_M = masks_TM[chosen_T].sum(0)
        common, rare = int(counts_M.argmax()), int(counts_M.argmin())
        if counts_M[common] - counts_M[rare] <= 1:
            return True
        for row in torch.nonzero(chosen_T & masks_TM[:, common] & ~masks_TM[:, rare])[:, 0].tolist():
            other = masks_TM[row].clone()
            other[common], other[rare] = False, True
            partner = index[tuple(other.tolist())]
            if not chosen_T[partner]:
                chosen_T[row], chosen_T[partner] = False, True
                break
        else:
            return False
    return False


def latents(mask_BM: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Weights for masks [..., M]: .5, .6, … 1 (`discrete`), 1 (`khot`), or anything between .5 and 1 (`continuous`)."""
    mask = mask_BM.float()
    if kind == "khot":
        return mask
    if kind == "discrete":
        return mask * (torch.randint(5, 11, mask.shape, generator=generator, device=mask.device) / 10)
    if kind == "continuous":
        e = -torch.rand(mask.shape, generator=generator, device=mask.device).clamp(min=1e-7).log() * mask
        return (0.5 * e / (e.sum(-1, keepdim=True) + 1) + 0.5) * mask
    raise TessellmError(f"unknown latents {kind!r}; {nearest(kind, LATENTS)}")


class MaskTable:
    """Masks of several runs, to draw from without leaving the device."""

    def __init__(self, masks_E: list[Tensor], device: torch.device | str):
        longest = max(map(len, masks_E))
        self.count_E1 = torch.tensor([[len(masks)] for masks in masks_E], device=device)
        padded = [torch.cat([masks, masks[:1].expand(longest - len(masks), -1)]) for masks in masks_E]
        self.masks_ETM = torch.stack(padded).to(device)

    def draw(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Random masks of each run: [E, B, M]."""
        runs, _, modules = self.masks_ETM.shape
        at = torch.rand(runs, tasks, generator=generator, device=self.masks_ETM.device)
        index_EB = (at * self.count_E1).long().clamp(max=self.count_E1 - 1)
        return self.masks_ETM.gather(1, index_EB[..., None].expand(-1, -1, modules))
