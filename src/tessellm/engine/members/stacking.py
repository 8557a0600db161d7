"""Members of one architecture as one module: the rows of all members pass through it together.

Which rows are whose, `Segments` says. The module is a structural copy of the first member in which

    a module whose parameters all members share       reads all rows at once: base weights are read once
    a linear layer with low-rank deltas on a shared base   does so too, and adds the deltas in one batched product
    a linear layer that each member has for itself    becomes a stacked product over members
    a norm that each member has for itself            runs once, around the gains of all
    any other module with parameters of its own       sees each member's rows apart

so it works on every architecture whose modules treat rows independently, and computes what the members compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import EngineError
from ...members.adapters import share
from . import attention
from .cpu_linear import MemberModules, quicken
from .low_rank import LowRank, SharedWithDeltas, read_low_rank
from .segments import Segments
from .stacked_linear import StackedLinear
from .stacked_norm import StackedNorm


class PerMember(nn.Module):
    """Runs modules without a batched form: each sees its own member's rows."""

    def __init__(self, modules: Sequence[nn.Module], segments: Segments):
        super().__init__()
        self.own, self.segments = MemberModules(modules), segments

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.get_submodule("own.0"), name)  # e.g. an embedding's weight, asked for its dtype

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.segments.apply(x, [partial(own, *args, **kwargs) if args or kwargs else own for own in self.own])


def stack(members: Sequence[PreTrainedModel], segments: Segments) -> PreTrainedModel:
    """Make one module for the rows of all these members, around their own parameters."""
    combined = share(members[0])
    combined.config._attn_implementation = attention.NAME
    for module in combined.modules():
        if hasattr(module, "layer_idx"):  # what the reference does with a soft cap, we do
            module.applies_softcap = members[0].config._attn_implementation != "sdpa"
    output = combined.get_output_embeddings()
    _stack_children(combined, members, segments)
    head = combined.get_output_embeddings()
    if hasattr(head, "segments"):  # it sees the tokens alone behind which logits are wanted
        head.segments = segments.kept
    quicken(combined, output)
    return combined.eval()


def can_stack(members: Sequence[PreTrainedModel]) -> bool:
    """Whether these are of one architecture: the same class and the same shapes of everything."""
    return len({_shape_of(member) for member in members}) == 1


def shares_base(member: PreTrainedModel, base: PreTrainedModel) -> bool:
    """Whether a member is the base, around the very same tensors, with low-rank deltas on it and at most modules of its
    own that are no linear layers (norms, input embeddings): those are small, or read a few rows at a time."""
    if type(member) is not type(base):
        return False
    theirs = {id(parameter) for parameter in base.parameters()}
    own = [path for path, p in member.named_parameters() if id(p) not in theirs]
    return bool(own) and all(_is_delta(member, path) or _is_beside(member, path) for path in own)


def _is_beside(member: nn.Module, path: str) -> bool:
    """Whether a parameter belongs to a norm or to a table of embeddings."""
    module = member.get_submodule(path.rpartition(".")[0])
    return isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower()


def _is_delta(member: nn.Module, path: str) -> bool:
    """Whether a parameter belongs to a layer that reads as a low-rank delta."""
    parts = path.split(".")
    return any(read_low_rank(member.get_submodule(".".join(parts[:n]))) is not None for n in range(1, len(parts)))


def _shape_of(member: PreTrainedModel) -> tuple:
    ignored = {"_name_or_path", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
    kept = sorted((key, str(value)) for key, value in member.config.to_dict().items() if key not in ignored)
    return type(member).__name__, member.dtype, member.device, member.config._attn_implementation, tuple(kept)


def _stack_children(parent: nn.Module, members: Sequence[nn.Module], segments: Segments) -> None:
    for name, child in list(parent.named_children()):
        own = [member.get_submodule(name) for member in members]
        replacement = _combine(child, own, segments)
        if replacement is None:
            _check_plain(own)
            _stack_children(child, own, segments)
        else:
            setattr(parent, name, replacement)


def _combine(child: nn.Module, own: list[nn.Module], segments: Segments) -> nn.Module | None:
    """Make one module of several; None: look at their children."""
    deltas = [read_low_rank(module) for module in own]
    if any(deltas):
        return _with_deltas(own, deltas, segments)
    if any(True for _ in child.children()):
        return None
    if _same_tensors(own):
        return child
    if all(type(module) is nn.Linear for module in own):
        return StackedLinear(own, segments)  # type: ignore[arg-type]
    return StackedNorm(own, segments) if StackedNorm.fits(own) else PerMember(own, segments)


def _check_plain(own: Sequence[nn.Module]) -> None:
    """Refuse a module with children and parameters besides theirs that not all members share."""
    beside = [[id(p) for p in module.parameters(recurse=False)] for module in own]
    if any(ids != beside[0] for ids in beside[1:]):
        raise EngineError(f"{type(own[0]).__name__} has parameters of its own beside its children's: run members apart")


def _with_deltas(own: list[nn.Module], deltas: list[LowRank | None], segments: Segments) -> nn.Module:
    layers = [module if delta is None else delta.base_layer for module, delta in zip(own, deltas, strict=True)]
    if _same_tensors(layers):
        return SharedWithDeltas(layers[0], deltas, segments)
    return PerMember(own, segments)


def _same_tensors(modules: Sequence[nn.Module]) -> bool:
    """Whether all modules stand around the very same parameters, and around buffers that hold the same."""
    first, buffers = [id(parameter) for parameter in modules[0].parameters()], list(modules[0].buffers())
    return all(
        [id(parameter) for parameter in module.parameters()] == first
        and all(map(torch.equal, buffers, module.buffers()))
        for module in modules[1:]
    )
