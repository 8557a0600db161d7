"""Full fine-tunes as low-rank deltas on the base, so that they cost what LoRA experts cost. Lossy, asked for, measured.

Every linear layer of an expert becomes the base's plus the best delta of a given rank (truncated SVD). Norms and input
embeddings stay exactly what they are. What is lost is measured as KL(exact composition ‖ compressed composition) along
texts, and above a limit the compression is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..adapters import share
from ..errors import EngineError
from ..model import ComposedForCausalLM
from ..shared_tensors import unique_bytes
from .engine import Engine
from .low_rank import LowRank
from .sampling import Sampling
from .stacking import can_stack, shares_base

RANK = 64
LIMIT = 0.01  # nats a token
TEXTS, NEW_TOKENS = 8, 48  # that the exact composition writes where no texts are given


@dataclass(frozen=True)
class Loss:
    """What compression cost, along texts: nats a token, and how often the best token stayed the best."""

    experts: tuple[str, ...]
    tokens: int
    kl: float  # mean of KL(exact ‖ compressed)
    largest: float
    same_best: float
    ranks: tuple[int, int]  # lowest and highest of any layer
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return (
            f"KL(exact ‖ compressed) is {self.kl:.3g} nats a token on average, {self.largest:.3g} at most, over "
            f"{self.tokens} tokens; {self.same_best:.2%} of the best tokens are the same; ranks {self.ranks[0]} to "
            f"{self.ranks[1]}; weights {self.bytes_after / max(1, self.bytes_before):.0%} of what they were"
        )


def compress(
    model: ComposedForCausalLM,
    rank: int | None = None,
    energy: float | None = None,
    limit: float = LIMIT,
    texts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> tuple[ComposedForCausalLM, Loss]:
    """The composition with its full fine-tunes compressed, and what that cost; EngineError if more than `limit`.

    `rank` is that of every delta; `energy` takes the lowest rank that keeps this share of a delta's squared norm.
    `texts` are token ids to measure on; by default the exact composition writes some.
    """
    if rank is not None and energy is not None:
        raise EngineError("expected a rank or an energy, not both")
    if rank is not None and rank < 1:
        raise EngineError(f"expected a rank of at least 1; got {rank}")
    if energy is not None and not 0 < energy <= 1:
        raise EngineError(f"expected 0 < energy ≤ 1; got {energy}")
    chosen = [name for name in model.members if name != "base" and _is_full(model, name)]
    if not chosen:
        raise EngineError("no expert is a full fine-tune of the base's architecture: there is nothing to compress")
    members, ranks = {name: model.member(name) for name in model.members}, []
    for name in chosen:
        members[name], own = compressed_member(model.base, members[name], rank or RANK, energy)
        ranks += own
    small = ComposedForCausalLM(copy.deepcopy(model.config), members, model.alignments)  # type: ignore[arg-type]
    small.tokenizer, small.notes = model.tokenizer, model.notes
    rows = [list(text) for text in texts] if texts is not None else _own_texts(model, seed)
    loss = measure_loss(model, small, rows, tuple(chosen), (min(ranks, default=0), max(ranks, default=0)))
    if not loss.kl <= limit:
        raise EngineError(
            f"compressing {', '.join(chosen)} loses too much (limit {limit:g} nats a token): {loss}. Take a higher "
            "rank or energy, raise the limit, or run them exactly"
        )
    return small, loss


def _is_full(model: ComposedForCausalLM, name: str) -> bool:
    return can_stack([model.member(name), model.base]) and not shares_base(model.member(name), model.base)


@torch.no_grad()
def compressed_member(
    base: PreTrainedModel, expert: PreTrainedModel, rank: int, energy: float | None
) -> tuple[PreTrainedModel, list[int]]:
    """The expert as deltas on the base's linear layers, and their ranks. Other modules are the expert's own where they
    differ from the base's."""
    small: Any = share(base)
    ranks = []
    for path, theirs in expert.named_modules():
        layer = small.get_submodule(path)
        if type(theirs) is nn.Linear:
            replacement = _delta_layer(layer, theirs, rank, energy)
            if replacement is not None:
                ranks.append(len(replacement.down_RI))
                small.set_submodule(path, replacement)
        elif any(True for _ in theirs.parameters(recurse=False)) and not _equal(layer, theirs):
            if any(True for _ in theirs.children()):
                raise EngineError(f"{type(theirs).__name__} has parameters beside its children's: it stays exact")
            small.set_submodule(path, theirs)
    return small.eval(), ranks


def _equal(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(recurse=False), right.parameters(recurse=False), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _delta_layer(layer: nn.Linear, theirs: nn.Linear, rank: int, energy: float | None) -> LowRank | None:
    """The base's layer with the best delta towards theirs; None where they are the same."""
    if theirs.bias is not None and not torch.equal(layer.bias, theirs.bias):
        raise EngineError("a linear layer's bias differs from the base's; such experts are not compressed")
    delta_OI = theirs.weight.double() - layer.weight.double()
    if not delta_OI.any():
        return None
    down_RI, up_OR = best_factors(delta_OI, rank, energy)
    return LowRank(layer, down_RI.to(theirs.weight.dtype), up_OR.to(theirs.weight.dtype))


def best_factors(delta_OI: Tensor, rank: int, energy: float | None) -> tuple[Tensor, Tensor]:
    """down [R, in] and up [out, R] whose product is nearest to the delta: by the eigenvectors of its smaller square."""
    flat = delta_OI.shape[0] <= delta_OI.shape[1]
    square = delta_OI @ delta_OI.T if flat else delta_OI.T @ delta_OI
    value_N, vector_NN = torch.linalg.eigh(square)
    value_N, vector_NN = value_N.flip(0).clamp_min(0), vector_NN.flip(1)
    if energy is not None:
        kept = value_N.cumsum(0) >= energy * value_N.sum()
        rank = int(kept.int().argmax()) + 1 if kept.any() else len(value_N)
    part_NR = vector_NN[:, :rank]
    return (part_NR.T @ delta_OI, part_NR) if flat else (part_NR.T, delta_OI @ part_NR)


def _own_texts(model: ComposedForCausalLM, seed: int) -> list[list[int]]:
    """What the exact composition writes by itself, sampled."""
    start = model.config.bos_token_id if model.config.bos_token_id is not None else 0
    limit = model.config.max_position_embeddings or NEW_TOKENS + 2
    new = min(NEW_TOKENS, limit - 2)
    engine = Engine(model, slots=TEXTS, context=new + 2, compiled=False)
    asked = [Sampling(new, temperature=1.0, seed=seed * TEXTS + n, ignore_end=True) for n in range(TEXTS)]
    return [request.prompt + request.tokens for request in engine.generate([[start]] * TEXTS, asked)]


@torch.inference_mode()
def measure_loss(
    exact: ComposedForCausalLM,
    small: ComposedForCausalLM,
    rows: Sequence[Sequence[int]],
    experts: tuple[str, ...],
    ranks: tuple[int, int],
) -> Loss:
    """KL(exact ‖ small) at every token of every row, by model.py."""
    kls, same = [], []
    for row in rows:
        ids = torch.tensor([row], device=exact.device)
        left_TV, right_TV = (model(ids, use_cache=False).logits[0].double() for model in (exact, small))
        ratio_TV = (left_TV.clamp_min(-1e4) - right_TV.clamp_min(-1e4)) * left_TV.exp()
        kls.append(ratio_TV.sum(-1))
        same.append(left_TV.argmax(-1) == right_TV.argmax(-1))
    kl_N, same_N = torch.cat(kls).clamp_min(0), torch.cat(same).double()
    before, after = (unique_bytes(model.members.values()) for model in (exact, small))
    return Loss(experts, len(kl_N), kl_N.mean().item(), kl_N.max().item(), same_N.mean().item(), ranks, before, after)
