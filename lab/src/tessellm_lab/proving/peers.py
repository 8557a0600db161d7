"""Other routers over the same adapters, as published, each a function from readings or texts to decisions.

None of them knows "none of the experts": here each gets its score compared with a threshold, as ours does. They choose
per token and layer, or per prompt; what counts here is one choice per prompt, by the mean over tokens and layers.

- semantic-router (aurelio-labs, MIT): MiniLM; the five nearest utterances of all routes, their mean per route.
- LoGo (arXiv 2511.07129): ‖ΔW x‖ at the last token, in one block, raw.
- SpectR (arXiv 2504.03454): ‖ΔW x‖ per token and layer, raw.
- SEQR (arXiv 2509.18093): ‖ΔW x‖, z-scored per layer on examples of the experts' data.
- Arrow (arXiv 2405.11157; PEFT): |v·x| per token and layer, v the first right singular vector of ΔW; softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .decisions import Decision
from .reading import Reading

NEAREST = 5  # utterances that semantic-router looks at
LEAST_STD = 1e-6


def best_of(names: Sequence[str], score_BK: Tensor) -> list[Decision]:
    """Choose the expert with the largest score, scored by it."""
    value_B, place_B = score_BK.nan_to_num(nan=-torch.inf).max(-1)
    return [Decision(names[place], value) for place, value in zip(place_B.tolist(), value_B.tolist(), strict=True)]


def semantic_router(names: Sequence[str], prompts_BD: Tensor, utterances: Mapping[str, Tensor]) -> list[Decision]:
    """Choose by the mean similarity of a route's utterances among the nearest ones."""
    similarity_BN = prompts_BD @ torch.cat([utterances[name] for name in names]).T
    owner_N = torch.cat([torch.full((len(utterances[name]),), k) for k, name in enumerate(names)])
    value_BN, place_BN = similarity_BN.topk(min(NEAREST, similarity_BN.shape[1]))
    near_BNK = nn.functional.one_hot(owner_N[place_BN], len(names)).float()
    count_BK = near_BNK.sum(1)
    mean_BK = (value_BN[..., None] * near_BNK).sum(1) / count_BK.clamp_min(1)
    return best_of(names, mean_BK.masked_fill(count_BK == 0, -torch.inf))


def centroids(names: Sequence[str], prompts_BD: Tensor, utterances: Mapping[str, Tensor]) -> list[Decision]:
    """Choose by the similarity to the mean of a route's utterances."""
    centre_KD = torch.stack([nn.functional.normalize(utterances[name].mean(0), dim=-1) for name in names])
    return best_of(names, prompts_BD @ centre_KD.T)


def logo(names: Sequence[str], readings: Sequence[Reading], block_M: Tensor) -> list[Decision]:
    """Choose by the norm of an adapter's output at the last token, in the last block."""
    last = block_M == block_M.max()
    return best_of(names, torch.stack([r.last_MK[last].square().nansum(0).sqrt() for r in readings]))


def spectr(names: Sequence[str], readings: Sequence[Reading]) -> list[Decision]:
    """Choose by the norm of an adapter's output, the mean over tokens and layers."""
    return best_of(names, torch.stack([r.mean_MK.nanmean(0) for r in readings]))


def seqr(
    names: Sequence[str], readings: Sequence[Reading], examples: Mapping[str, Sequence[Reading]]
) -> list[Decision]:
    """Choose by norms that are z-scored per expert and layer on examples of all experts: on its own alone, which vary
    little, an expert's norms on any other prompt are far out."""
    every_NMK = torch.stack([reading.mean_MK for own in examples.values() for reading in own])
    mean_MK, std_MK = every_NMK.mean(0), every_NMK.std(0, correction=0).clamp_min(LEAST_STD)
    return best_of(names, torch.stack([((r.mean_MK - mean_MK) / std_MK).nanmean(0) for r in readings]))


def arrow(names: Sequence[str], readings: Sequence[Reading]) -> list[Decision]:
    """Choose by the mean over layers of each layer's softmax over the adapters that it has."""
    shares = []
    for reading in readings:
        share_MK = reading.first_MK.nan_to_num(nan=-torch.inf).softmax(-1)
        shares.append(share_MK.masked_fill(reading.first_MK.isnan(), torch.nan).nanmean(0))
    return best_of(names, torch.stack(shares))
