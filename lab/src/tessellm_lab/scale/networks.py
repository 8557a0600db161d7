"""The students: plain MLPs and transformers, many at once, with a leading run axis (see `common.stacked`).

A network reads a task's code once and S samples of the task, and answers each sample. `hidden` collects what linear
layers (or blocks) put out for a task's first sample, one entry a layer.

Shapes: E run, B task, S sample, I code, N input, D width, O output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..common.stacked import ROPE_BASE, Params, mix, rotate

EPSILON = 1e-6


@dataclass(frozen=True)
class Mlp:
    """[code; sample] → depth × (linear, ReLU) → linear."""

    width: int = 1024
    depth: int = 4
    kind: str = "mlp"

    def initialise(self, codes: Sequence[int], inputs: int, outputs: int, generator: torch.Generator) -> Params:
        """LeCun-normal weights for runs with codes of these widths; shorter codes are padded with zeros."""
        device, runs = generator.device, len(codes)
        fan_in_E = torch.tensor([code + inputs for code in codes], device=device)
        first = torch.randn(runs, max(codes) + inputs, self.width, generator=generator, device=device)
        first = first / fan_in_E[:, None, None].sqrt()
        params = {"code": first[:, : max(codes)].contiguous(), "sample": first[:, max(codes) :].contiguous()}
        sizes = [(self.width, self.width)] * (self.depth - 1) + [(self.width, outputs)]
        for layer, size in enumerate(sizes, 1):
            params[f"{layer}"] = torch.randn(runs, *size, generator=generator, device=device) / size[0] ** 0.5
        widths = [self.width] * self.depth + [outputs]
        return params | {f"bias.{n}": torch.zeros(runs, size, device=device) for n, size in enumerate(widths)}

    def __call__(
        self,
        params: Params,
        code_EBI: Tensor,
        x_EBSN: Tensor,
        dtype: torch.dtype = torch.float32,
        hidden: list[Tensor] | None = None,
    ) -> Tensor:
        code, x = code_EBI.to(dtype), x_EBSN.to(dtype)
        h = mix(x, params["sample"]) + torch.bmm(code, params["code"].to(dtype))[:, :, None]
        for layer in range(self.depth + 1):
            if layer:
                h = mix(h.relu(), params[f"{layer}"])
            h = h + params[f"bias.{layer}"][:, None, None].to(dtype)
            if hidden is not None:
                hidden.append(h[:, :, 0].float())
        return h


@dataclass(frozen=True)
class Transformer:
    """One token for the code and one a sample; causal, pre-norm, normalised queries and keys, rotary positions."""

    width: int = 256
    depth: int = 4
    heads: int = 4
    kind: str = "transformer"

    def initialise(self, codes: Sequence[int], inputs: int, outputs: int, generator: torch.Generator) -> Params:
        device, runs, wide = generator.device, len(codes), 4 * self.width

        def normal(rows: int, columns: int) -> Tensor:
            return torch.randn(runs, rows, columns, generator=generator, device=device) / rows**0.5

        scale_E = torch.tensor([max(codes) / code for code in codes], device=device).sqrt()
        params = {
            "code": normal(max(codes), self.width) * scale_E[:, None, None],
            "sample": normal(inputs, self.width),
            "out": normal(self.width, outputs),
        }
        for layer in range(self.depth):
            params |= {
                f"{layer}.qkv": normal(self.width, 3 * self.width),
                f"{layer}.attend": normal(self.width, self.width) / (2 * self.depth) ** 0.5,
                f"{layer}.up": normal(self.width, wide),
                f"{layer}.down": normal(wide, self.width) / (2 * self.depth) ** 0.5,
            }
        return params

    def __call__(
        self,
        params: Params,
        code_EBI: Tensor,
        x_EBSN: Tensor,
        dtype: torch.dtype = torch.float32,
        hidden: list[Tensor] | None = None,
    ) -> Tensor:
        code = torch.bmm(code_EBI.to(dtype), params["code"].to(dtype))[:, :, None]
        h = torch.cat([code, mix(x_EBSN.to(dtype), params["sample"])], 2)
        tokens, size = h.shape[2], self.width // self.heads
        frequency = ROPE_BASE ** (-torch.arange(0, size, 2, device=h.device, dtype=torch.float32) / size)
        angle = torch.outer(torch.arange(tokens, device=h.device, dtype=torch.float32), frequency).repeat(1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        for layer in range(self.depth):
            qkv = mix(_normed(h), params[f"{layer}.qkv"]).view(-1, tokens, 3, self.heads, size)
            q, k, v = (part.squeeze(2).transpose(1, 2) for part in qkv.split(1, 2))
            q, k = rotate(_normed(q), cos, sin), rotate(_normed(k), cos, sin)
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + mix(o.transpose(1, 2).reshape(h.shape), params[f"{layer}.attend"])
            h = h + mix(functional.gelu(mix(_normed(h), params[f"{layer}.up"])), params[f"{layer}.down"])
            if hidden is not None:
                hidden.append(h[:, :, 1].float())
        return mix(_normed(h[:, :, 1:]), params["out"])


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=EPSILON)


Network = Mlp | Transformer
