"""What a model knows of the skill that is due: the probe, on the skill chains.

At the mark before a step, is the skill of that step linearly decodable? Chains of one combination are one group, so the
decoder is judged on combinations that it has not seen. Layers are read on the device, and decoded off it.

Shapes: E model, N text, T time, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.finite import TrainingError, unsound
from ..common.stacked import Params, Shape, logits
from ..common.workers import by_processes
from ..probe.probe import Labels, decode
from ..skills.chains import LENGTH, Prompts

ROWS = 192


class Read(NamedTuple):
    """What one layer holds at the mark before the second step of every text."""

    x_END: Tensor  # half precision
    due_N: Tensor  # the expert that is due
    groups_N: Tensor  # texts of one combination

    def named(self, name: str) -> dict[str, Tensor]:
        return {name: self.x_END, f"{name}.due": self.due_N, f"{name}.groups": self.groups_N}

    @classmethod
    def of(cls, tensors: dict[str, Tensor], name: str) -> Read:
        return cls(tensors[name], tensors[f"{name}.due"], tensors[f"{name}.groups"])


def due_skill(prompts: Prompts, step: int) -> tuple[Tensor, Tensor]:
    """Texts up to the mark before `step` (the first is 1) [N, T], and the expert that is due: [N]."""
    chain = int(prompts.step_BT.max())
    position = chain + 1 + LENGTH + (step - 1) * (LENGTH + 1)
    return prompts.tokens_BT[:, : position + 1], prompts.owner_BT[:, position + 1].cpu()


@torch.no_grad()
def read(params: Params, shape: Shape, prompts: Prompts, name: str) -> Read:
    """A middle layer of every model of a stack."""
    tokens_NT, due_N = due_skill(prompts, 2)
    models = next(iter(params.values())).shape[0]
    blocks: list[Tensor] = []
    logits(params, shape, tokens_NT.expand(models, -1, -1), hidden=blocks)
    x_END = blocks[shape.layers // 2][:, :, -1].half().cpu()
    for model in range(models):
        if not bool(x_END[model].isfinite().all()):
            names = unsound(params, model)
            cause = f"neither are its parameters {', '.join(names)}" if names else "its parameters are finite"
            raise TrainingError(f"{name}, model {model}: layer {shape.layers // 2} is not finite; {cause}")
    chain = int(prompts.step_BT.max())
    groups_N = torch.unique(prompts.tokens_BT[:, :chain].cpu(), dim=0, return_inverse=True)[1]
    return Read(x_END, due_N, groups_N)


def decodability(x_ND: Tensor, due_N: Tensor, groups_N: Tensor, own: int | None = None) -> dict[str, Any]:
    """Share of texts whose second skill is read off the layer; with `own`, whether it is that expert's turn."""
    names_N = (due_N == own).long() if own is not None else torch.unique(due_N, return_inverse=True)[1]
    classes = [str(number) for number in range(int(names_N.max()) + 1)]
    folds = min(5, len(groups_N.unique()))
    score, shuffled = decode(x_ND, Labels({}, {"due": names_N}, {"due": classes}), groups_N, folds, 1)["due"]
    return {"score": score.value, "low": score.low, "high": score.high, "chance": score.chance, "shuffled": shuffled[0]}


Job = tuple[Any, Any, Any, int | None]  # the arguments of `decodability`, as arrays


def decode_all(jobs: list[Job], workers: int) -> Iterator[dict[str, Any]]:
    """`decodability` of many models."""
    return by_processes(_decode, jobs, workers)


def _decode(x_ND: Any, due_N: Any, groups_N: Any, own: int | None) -> dict[str, Any]:
    return decodability(torch.from_numpy(x_ND), torch.from_numpy(due_N), torch.from_numpy(groups_N), own)
