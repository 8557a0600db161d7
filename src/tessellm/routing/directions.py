"""What an expert reads, as a few directions per linear layer: the leading right singular vectors of ΔW, unit rows.

Singular values only tell a change from rounding: directions times these values route worse."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MemberError
from ..members.lora_layers import read_lora

ROWS = 4  # directions of a LoRA layer
FULL_ROWS = 16  # of a layer that was trained in full
EXACT = 256  # the smaller side of a ΔW up to which its decomposition is exact
OVERSAMPLING, ITERATIONS = 8, 3  # of the iteration that finds leading directions
SPREAD = 1e-6  # singular values below this share of the largest are rounding
WEAK = 1e-4  # a ΔW with singular values below this share of ‖W‖ changes nothing that could be told
ROUNDING = 0.015  # a ΔW under this share of ‖W‖ that leads nowhere is what bfloat16 or int8 makes of W
FLAT = 2.0  # a ΔW leads nowhere if its largest singular value is under so many times that of noise of its size


def block_of(path: str) -> int | None:
    """Return the number of the block that a module belongs to; None outside the blocks."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a model's blocks by their paths. A layer that PEFT wrapped has the base's path."""
    found: dict[str, nn.Module] = {}
    latest = ""
    for path, module in model.named_modules():  # a wrapper comes before what is in it
        inside = latest and path.startswith(f"{latest}.")
        is_linear = _is_linear(module) or _is_linear(getattr(module, "base_layer", None))
        if is_linear and not inside and block_of(path) is not None:
            found[path] = module
            latest = path
    return found


def count_blocks(model: nn.Module) -> int:
    return 1 + max((block_of(path) or 0 for path in linear_layers(model)), default=-1)


@torch.no_grad()
def directions(
    base: nn.Module, expert: nn.Module, name: str, rows: int = ROWS, full_rows: int = FULL_ROWS
) -> dict[str, Tensor]:
    """Return the leading directions of ΔW per adapted layer of the base, [rows, d_in] in float32 on the CPU.

    Empty where expert and base have linear layers that are equal up to rounding. Fewer rows where ΔW has less rank.
    """
    found, theirs = {}, linear_layers(expert)
    ours = linear_layers(base)
    if not ours.keys() & theirs.keys():
        raise MemberError(
            f"member {name!r} has no linear layer in common with the base, so a router cannot compare the two. "
            "Expected an adapter or a fine-tune of the base's architecture; or use rule: product"
        )
    for path, module in theirs.items():
        if path not in ours:
            continue
        where = f"member {name!r}: layer {path}"
        delta = read_lora(module)
        if delta is not None:
            leading = _of_factors(delta.down_RI.float(), delta.up_OR.float(), rows)
        else:
            leading = _of_weights(ours[path], _merged(module), where, full_rows)
        if not leading.isfinite().all():
            raise MemberError(f"{where} has weights that are not finite, so a router cannot compare it with the base")
        if len(leading):
            found[path] = leading.cpu().contiguous()
    return found


def _of_factors(down_RI: Tensor, up_OR: Tensor, rows: int) -> Tensor:
    """Leading directions of B A, in the space of its rank."""
    small_RI = torch.linalg.qr(up_OR).R @ down_RI
    if not small_RI.isfinite().all():
        return small_RI
    _, sigma, right = torch.linalg.svd(small_RI, full_matrices=False)
    return _kept(sigma, right[:rows], WEAK * len(up_OR) ** 0.5)  # ‖W‖ is about √outputs


def _of_weights(ours: nn.Module, theirs: nn.Module, where: str, rows: int) -> Tensor:
    """Leading directions of the difference between two layers' weights."""
    if ours.weight is theirs.weight:
        return torch.empty(0, 0)
    weight_OI, their_OI = dense_weight(ours), dense_weight(theirs)
    if weight_OI.shape != their_OI.shape:
        raise MemberError(
            f"{where} has the shape {tuple(their_OI.shape)}, the base's {tuple(weight_OI.shape)}. Expected a fine-tune "
            "of this base"
        )
    delta_OI = their_OI.to(weight_OI.device) - weight_OI
    if not delta_OI.isfinite().all():
        return delta_OI
    sigma, right = _leading(delta_OI, rows)
    outputs, inputs = delta_OI.shape
    noise = float(delta_OI.norm()) * (outputs**-0.5 + inputs**-0.5)  # σ₁ of a random matrix of this norm
    leads = len(sigma) and float(sigma[0]) >= FLAT * noise
    if not leads and float(delta_OI.norm()) < ROUNDING * float(weight_OI.norm()):
        return right[:0]
    return _kept(sigma, right[:rows], WEAK * float(weight_OI.norm()))


def _kept(sigma: Tensor, right: Tensor, least: float) -> Tensor:
    """Return the directions that are not rounding; none where ΔW as a whole is too weak."""
    if not len(sigma) or float(sigma[0]) <= least:
        return right[:0]
    return right[sigma[: len(right)] > SPREAD * float(sigma[0])]


def _leading(delta_OI: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Leading singular values and right singular vectors; by subspace iteration where the matrix is large."""
    if min(delta_OI.shape) > EXACT:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(len(delta_OI), rows + OVERSAMPLING, generator=generator).to(delta_OI)
        for _ in range(ITERATIONS):
            right = torch.linalg.qr(delta_OI.T @ start).Q
            start = torch.linalg.qr(delta_OI @ right).Q
        delta_OI = start.T @ delta_OI
    _, sigma, right = torch.linalg.svd(delta_OI, full_matrices=False)
    return sigma, right


def _merged(layer: Any) -> nn.Module:
    """Return a layer's base with the adapter merged in, where PEFT wrapped it in anything but LoRA."""
    if not hasattr(layer, "base_layer"):
        return layer
    copied = copy.deepcopy(layer)
    copied.merge()
    return copied.base_layer


def dense_weight(layer: nn.Module) -> Tensor:
    """Return a linear layer's weight as a dense float32 matrix, [out, in]; quantised ones are dequantised."""
    weight: Any = layer.weight
    if hasattr(weight, "quant_state") or type(weight).__name__ == "Int8Params":
        from peft.utils.integrations import dequantize_module_weight

        weight = dequantize_module_weight(layer)
    elif hasattr(weight, "dequantize") and type(weight.data) is not Tensor:
        weight = weight.dequantize()
    weight = weight.detach().float()
    return weight.T if type(layer).__name__ == "Conv1D" else weight


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
