"""CpuDecoder: a decode step of a group of members on a CPU in few tensor operations.

Computes what the module computes, over the same KV cache, without the overhead of Hugging Face's modules: layers
that read one input are one product where their weights are packed, and nothing is made that a step does not need. A row
is a member reading a sequence; rows of a member lie side by side.

Shapes: R rows, I inputs and O outputs of a layer, H key-value heads, G query heads that share one, D head size, V
vocabulary. Of a delta, R is the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...members.packed import JoinedLinear, PackedLinear
from ...model.heads import Float32Head
from ..members.cpu_linear import CpuLinear
from ..members.kv_cache import SlotCache
from ..members.low_rank import SharedWithDeltas
from ..members.segments import Segment

FAMILIES = ("llama", "mistral", "qwen2")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # others depend on the length of the text
SKEW = 256  # cells by which the lengths of rows that attend together may differ
LAYERS = (nn.Linear, Float32Head, CpuLinear, PackedLinear)


class LayerDeltas(NamedTuple):
    """A member's deltas on neighbouring layers, y += s B (A x), and their columns among all outputs. Weights are the
    member's own; in float32 at least: small products of bfloat16 take twenty times as long on a CPU."""

    columns: slice
    scale: float
    factors: tuple[tuple[Tensor, Tensor], ...]  # A and B of each layer, transposed


class Projections:
    """The layers that read one input, and every member's deltas on them."""

    def __init__(self, layers: Sequence[nn.Module]):
        own: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
        joined: Sequence[nn.Module] = [JoinedLinear(own)] if JoinedLinear.fits(own) else own
        self.products = [layer.forward for layer in joined]
        self.dtype: torch.dtype = own[0].weight.dtype
        self.deltas: dict[int, list[LayerDeltas]] = {}  # by member
        begin = 0
        for layer, width in zip(layers, (each.out_features for each in own), strict=True):
            for member, delta in enumerate(layer.deltas if isinstance(layer, SharedWithDeltas) else ()):
                if delta is not None:
                    self._add(member, delta, slice(begin, begin + width))
            begin += width

    def _add(self, member: int, delta: Any, columns: slice) -> None:
        dtype = torch.promote_types(delta.raw_OR.dtype, torch.float32)
        factors: tuple[tuple[Tensor, Tensor], ...] = ((delta.down_RI.to(dtype).T, delta.raw_OR.to(dtype).T),)
        found = self.deltas.setdefault(member, [])
        if found and found[-1].scale == delta.scale and found[-1].columns.stop == columns.start:
            before = found.pop()
            columns, factors = slice(before.columns.start, columns.stop), before.factors + factors
        found.append(LayerDeltas(columns, delta.scale, factors))

    def __call__(self, x_RI: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Return the layers' outputs side by side. Inputs may be in float32, which deltas read as they are."""
        own_RI = x_RI.to(self.dtype)
        y_RO: Tensor = self.products[0](own_RI)
        if len(self.products) > 1:
            y_RO = torch.cat([y_RO, *(product(own_RI) for product in self.products[1:])], -1)
        for member, begin, end in segments if self.deltas else ():
            for columns, scale, factors in self.deltas.get(member, ()):
                wide_RI = x_RI[begin:end].to(factors[0][0].dtype)
                parts = [wide_RI @ down_IR @ up_RO for down_IR, up_RO in factors]
                y_RO[begin:end, columns].add_(parts[0] if len(parts) == 1 else torch.cat(parts, -1), alpha=scale)
        return y_RO


class Norm:
    """RMSNorm of the residual stream, as one operation."""

    def __init__(self, norm: Any, dtype: torch.dtype):
        self.weight, self.eps = norm.weight.to(dtype), norm.variance_epsilon

    def __call__(self, x_RI: Tensor) -> Tensor:
        return functional.rms_norm(x_RI, x_RI.shape[-1:], self.weight, self.eps)


class Run(NamedTuple):
    """Rows that attend together, and their cells."""

    rows: slice
    kv: slice
    cells: slice
    seen_R11C: Tensor | None  # which of the cells each row reads; None: all


def runs_of(kv_rows: Sequence[int], positions: Sequence[int], window: int | None) -> list[Run]:
    """Let all rows attend together where they lie at equal distances and end alike, else each by itself."""
    steps = {after - before for before, after in pairwise(kv_rows)} or {1}
    together = len(steps) == 1 and min(steps) > 0 and max(positions) - min(positions) <= SKEW
    count, step = (len(kv_rows), min(steps)) if together else (1, 1)
    found = []
    for begin in range(0, len(kv_rows), count):
        rows = slice(begin, begin + count)
        last = positions[rows]
        first = [0 if window is None else max(0, position - window + 1) for position in last]
        cells, seen_R11C = slice(min(first), max(last) + 1), None
        if len({*last}) > 1:
            cell_C, bounds_2R11 = torch.arange(cells.start, cells.stop), torch.tensor([first, last])[..., None, None]
            seen_R11C = ((cell_C >= bounds_2R11[0]) & (cell_C <= bounds_2R11[1]))[:, None]
        found.append(Run(rows, slice(kv_rows[begin], kv_rows[rows][-1] + 1, step), cells, seen_R11C))
    return found


class Layer(NamedTuple):
    """One decoder layer."""

    before: Norm
    qkv: Projections
    attention_out: Projections
    between: Norm
    gate_up: Projections
    down: Projections
    window: int | None


class CpuDecoder:
    """Logits behind one token per row. The residual stream is float32 at least."""

    def __init__(self, module: Any, cache: SlotCache):
        attention = module.model.layers[0].self_attn
        self.cache, self.scale = cache, attention.scaling
        self.heads, self.kv_heads = module.config.num_attention_heads, module.config.num_key_value_heads
        self.head_size: int = attention.head_dim
        self.dtype = torch.promote_types(module.dtype, torch.float32)
        self.embed, self.norm = module.model.embed_tokens, Norm(module.model.norm, self.dtype)
        self.layers = [_read_layer(layer, module.config, self.dtype) for layer in module.model.layers]
        self.head = Projections([module.lm_head])
        like = torch.zeros(1, 1, 1, dtype=module.dtype)
        cos, sin = module.model.rotary_emb(like, torch.arange(cache.cells)[None])
        half = self.head_size // 2
        self.cos_C = cos[0, :, None, None, :half].contiguous()
        self.sin_C = torch.stack([-sin[0, :, :half], sin[0, :, :half]], 1)[:, None].contiguous()

    def __call__(
        self, token_R: Tensor, positions: Sequence[int], kv_rows: Sequence[int], segments: Sequence[Segment]
    ) -> Tensor:
        """Return logits [R, V]. `kv_rows`: each row's place in the cache, which holds its keys and values up to its
        position; this token's are written there."""
        rows, size = len(positions), self.head_size
        position_R, kv_R = torch.tensor(positions), torch.tensor(kv_rows)
        cos_R, sin_R = self.cos_C[position_R], self.sin_C[position_R]
        turned = self.heads + self.kv_heads
        runs = {window: runs_of(kv_rows, positions, window) for window in {layer.window for layer in self.layers}}
        x_RI: Tensor = self.embed(token_R).to(self.dtype)
        for index, layer in enumerate(self.layers):
            qkv_RO = layer.qkv(layer.before(x_RI), segments)
            turn_RH2D = qkv_RO[:, : turned * size].view(rows, turned, 2, size // 2)
            turned_RHD = (turn_RH2D * cos_R).addcmul_(turn_RH2D.flip(2), sin_R).view(rows, turned, size)
            key_RHCD, value_RHCD = self.cache.key_RHCD[index], self.cache.value_RHCD[index]
            key_RHCD[kv_R, :, position_R] = turned_RHD[:, self.heads :]
            value_RHCD[kv_R, :, position_R] = qkv_RO[:, turned * size :].view(rows, self.kv_heads, size)
            query_RHGD = turned_RHD[:, : self.heads].view(rows, self.kv_heads, -1, size)
            read = []
            for own, kv, cells, seen_R11C in runs[layer.window]:
                key, value = key_RHCD[kv, :, cells], value_RHCD[kv, :, cells]
                read.append(
                    functional.scaled_dot_product_attention(query_RHGD[own], key, value, seen_R11C, scale=self.scale)
                )
            attended_RHGD = read[0] if len(read) == 1 else torch.cat(read)
            x_RI += layer.attention_out(attended_RHGD.reshape(rows, -1), segments)
            gate_RO, up_RO = layer.gate_up(layer.between(x_RI), segments).chunk(2, -1)
            x_RI += layer.down(functional.silu(gate_RO).mul_(up_RO), segments)
        return self.head(self.norm(x_RI), segments)


def cpu_decoder(module: Any, cache: SlotCache) -> CpuDecoder | None:
    """Make a decoder of a group's module; None where it has a part that the decoder does not know."""
    config = module.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    known = config.model_type in FAMILIES and rope in FIXED_ROPE and getattr(config, "hidden_act", None) == "silu"
    if not known or module.device.type != "cpu":
        return None
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linear = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        if not all(_is_linear(each) for each in linear) or not all(_is_norm(each) for each in norms):
            return None
    whole = (
        _is_linear(module.lm_head) and _is_norm(module.model.norm) and type(module.model.embed_tokens) is nn.Embedding
    )
    return CpuDecoder(module, cache) if whole else None


def _is_linear(layer: Any) -> bool:
    return type(getattr(layer, "base_layer", layer)) in LAYERS


def _is_norm(layer: nn.Module) -> bool:
    return type(layer).__name__.endswith("RMSNorm")


def _read_layer(layer: Any, config: Any, dtype: torch.dtype) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
    return Layer(
        Norm(layer.input_layernorm, dtype),
        Projections([attention.q_proj, attention.k_proj, attention.v_proj]),
        Projections([attention.o_proj]),
        Norm(layer.post_attention_layernorm, dtype),
        Projections([mlp.gate_proj, mlp.up_proj]),
        Projections([mlp.down_proj]),
        window,
    )
