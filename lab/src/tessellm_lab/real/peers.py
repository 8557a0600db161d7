"""What else one does with the same adapters, by PEFT: merge them into one model, or let Arrow route every token.

Merges are of the adapters' whole deltas, by PEFT's functions on tensors, added to a copy of the base.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tessellm.members.adapters import share

Merge = Callable[[list[Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Method:
    """A function of PEFT's, its options, its paper, and the strengths among which development prompts choose."""

    function: str
    options: Mapping[str, Any]
    reference: str
    strengths: tuple[float, ...]

    def bound(self) -> Merge:
        from peft.utils import merge_utils

        return partial(getattr(merge_utils, self.function), **self.options)


METHODS = {
    "task-arithmetic": Method("task_arithmetic", {}, "arXiv 2212.04089", (0.2, 0.3, 0.5, 0.7, 1.0)),
    "ties": Method("ties", {"density": 0.2}, "arXiv 2306.01708", (0.5, 1.0, 1.5, 2.0)),
    "dare-ties": Method("dare_ties", {"density": 0.5}, "arXiv 2311.03099", (0.5, 1.0, 1.5, 2.0)),
}


@torch.no_grad()
def merged(
    base: PreTrainedModel, experts: Sequence[PreTrainedModel], method: str, strength: float, seed: int = 0
) -> PreTrainedModel:
    """The base with the adapters of these experts merged into it; `strength` weighs each. `seed` is for DARE."""
    model, merge = copy.deepcopy(base), METHODS[method].bound()
    weights = torch.full((len(experts),), strength, device=base.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, layer in model.named_modules():
            deltas = [delta for expert in experts if (delta := _delta(expert.get_submodule(name))) is not None]
            if deltas:
                weight: Any = layer.weight
                weight += merge(deltas, weights).to(weight.dtype)
    return model


def _delta(layer: Any) -> Tensor | None:
    """What an adapter adds to a layer's weights, in float32; None where it adds nothing."""
    if not hasattr(layer, "get_delta_weight"):
        return None
    (active,) = layer.active_adapters
    return layer.get_delta_weight(active).float()


def arrow(base: PreTrainedModel, adapters: Mapping[str, Path], top_k: int) -> PreTrainedModel:
    """PEFT's Arrow over the adapters (arXiv 2405.11157), around the base's own tensors."""
    from peft import ArrowConfig, create_arrow_model

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        paths = [str(path) for path in adapters.values()]
        made = create_arrow_model(share(base), paths, ArrowConfig(top_k=min(top_k, len(paths))))
    return made.get_base_model().eval()
