"""Output layers of half-precision members that give float32 logits.

A product in half precision adds up in float32 and rounds the sum: bfloat16 keeps three digits of a logit. Eq. 2 adds
the members' logits with counts that cancel, so that it adds up those roundings, where one member alone has one. Here
the sum is not rounded. Knows no rule.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 1 << 19  # weights that are float32 at once, where no product of half precision gives float32: they stay cached


class Float32Head(nn.Linear):
    """A linear layer with half-precision weights and float32 outputs."""

    def forward(self, x: Tensor) -> Tensor:
        rows_RI = x.reshape(-1, self.in_features)
        if x.device.type == "cuda" and x.dtype == self.weight.dtype and not torch.is_grad_enabled():
            out_RO = torch.mm(rows_RI, self.weight.T, out_dtype=torch.float32)
        else:
            blocks = self.weight.split(max(1, BLOCK // self.in_features))
            out_RO = torch.cat([functional.linear(rows_RI.float(), block.float()) for block in blocks], -1)
        if self.bias is not None:
            out_RO = out_RO + self.bias.float()
        return out_RO.unflatten(0, x.shape[:-1])


def widen_head(member: nn.Module) -> None:
    """Make a member's logits float32 where its output layer is a plain one in half precision. The module stays itself,
    with its hooks, its name and its tied weight; quantized and offloaded layers stay as they are."""
    head = member.get_output_embeddings()  # type: ignore[operator]
    for layer in _layers(head):
        plain = type(layer) is nn.Linear and type(layer.weight.data) is Tensor and not hasattr(layer, "_hf_hook")
        if plain and layer.weight.dtype.itemsize == 2:
            layer.__class__ = Float32Head


def _layers(head: nn.Module | None) -> list[nn.Module]:
    """List the layers that give an output: the head itself, or what PEFT has put into its place."""
    saved = getattr(head, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict):
        return [layer for each in saved.values() for layer in _layers(each)]
    inner = getattr(head, "base_layer", head)
    return [inner] if isinstance(inner, nn.Module) else []
