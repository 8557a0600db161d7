"""What a model knows of the skill that is due: the probe, on the skill chains.

At the mark before a step, is the skill of that step linearly decodable? Chains of one combination are one group, so the
decoder is judged on combinations that it has not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...diagnose.activations import text_features
from ...diagnose.probe import Labels, decode
from ..skills.chains import LENGTH, Prompts
from ..stacked import Params, Shape, to_llama

ROWS = 192


def due_skill(prompts: Prompts, step: int) -> tuple[list[list[int]], list[int], Tensor]:
    """Texts up to the mark before `step` (the first is 1), that mark's position, and the expert that is due: [B]."""
    chain = int(prompts.step_BT.max())
    position = chain + 1 + LENGTH + (step - 1) * (LENGTH + 1)
    rows = [row[: position + 1] for row in prompts.tokens_BT.tolist()]
    return rows, [position] * len(rows), prompts.owner_BT[:, position + 1].cpu()


def decodability(params: Params, shape: Shape, member: int, prompts: Prompts, own: int | None = None) -> dict[str, Any]:
    """Share of texts whose second skill is read off a middle layer; with `own`, whether it is that expert's turn."""
    rows, positions, due_N = due_skill(prompts, 2)
    model: Any = to_llama(params, shape, member)
    layer = f"model.layers.{shape.layers // 2}"

    def run(ids_BT: Tensor, mask_BT: Tensor) -> Any:
        return model(input_ids=ids_BT, attention_mask=mask_BT)

    x_ND = text_features(run, model, [layer], rows, positions, batch_size=64)[layer]
    names_N = (due_N == own).long() if own is not None else torch.unique(due_N, return_inverse=True)[1]
    classes = [str(number) for number in range(int(names_N.max()) + 1)]
    chain = int(prompts.step_BT.max())
    groups_N = torch.unique(prompts.tokens_BT[:, :chain].cpu(), dim=0, return_inverse=True)[1]
    folds = min(5, len(groups_N.unique()))
    score, shuffled = decode(x_ND, Labels({}, {"due": names_N}, {"due": classes}), groups_N, folds, 1)["due"]
    return {"score": score.value, "low": score.low, "high": score.high, "chance": score.chance, "shuffled": shuffled[0]}
