"""Check that the fast path computes what the members compute, once, when an engine is made, on a few tokens.

Most architectures differ in nothing that the fast path has to know. Those that do (recurrent ones, a position bias in
the attention, masks of their own) are refused: by what their configs say where a few tokens could not show it, and by
their log-probabilities otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import EngineError, FastPathError
from ..model import ComposedForCausalLM
from .buffers import RowOrder, TokenBatch
from .members.groups import Group, member_logits

LENGTH, STEPS = 12, 3  # tokens of the text; those at its end that are fed one by one
KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
MOVING_ROPES = {"dynamic", "longrope"}  # their angles depend on the longest text of a batch
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}  # share of a row's spread; TF32 has ten bits
HALF_TOLERANCE = 0.15
REFERENCE = "Use the reference path instead: model.generate(…), or --engine reference"


def refuse_unknown(model: ComposedForCausalLM) -> None:
    """Refuse architectures that compute something else in longer texts, which a few tokens could not show."""
    for name in model.members:
        member = model.member(name)
        why = _why_unknown(member)
        if why:
            raise FastPathError(
                f"member {name!r} ({type(member).__name__}) cannot run on the fast path: {why}. {REFERENCE}"
            )


def _why_unknown(member: PreTrainedModel) -> str | None:
    config = member.config.get_text_config()
    if getattr(member, "_is_stateful", False):
        return "it is recurrent, and its state cannot be put into slots"
    if config.is_encoder_decoder:
        return "it is an encoder and a decoder"
    layers = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if layers:
        return f"it has layers of the kind {sorted(layers)[0]!r}"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if kinds & MOVING_ROPES:
        return f"its rotary positions ({(kinds & MOVING_ROPES).pop()}) depend on the longest text of a batch"
    return None


@torch.inference_mode()
def check(model: ComposedForCausalLM, groups: Sequence[Group], slots: int, context: int, several: bool = False) -> None:
    """Compare the groups with their members, on one text: fed in one piece, then token by token, and then (`several`)
    the last few at once, as drafts are. Where prompts are read by kernels of their own, which takes caches that are
    there, in one piece again. Leaves the caches empty."""
    length = min(LENGTH, context)
    if length <= STEPS:
        return
    token_1T = (7 * torch.arange(length, device=model.device) ** 2 + 3)[None] % model.config.vocab_size
    try:
        fast_MTV = _by_groups(groups, token_1T, slots)
        again_MTV = _tokens(groups, token_1T, slots, length - STEPS, length) if several else fast_MTV[:, -STEPS:]
        fused = any(group.reads_fused for group in groups)
        read_MTV = _prompt(groups, token_1T, slots) if fused else fast_MTV
        slow_M = [model.member_logits(name, token_1T, None, 0, {})[0].float().log_softmax(-1) for name in model.members]
    except torch.OutOfMemoryError:
        raise
    except EngineError as error:
        raise FastPathError(f"{error}. {REFERENCE}") from error
    except Exception as error:
        raise FastPathError(
            f"the fast path cannot run these members ({type(error).__name__}: {error}). {REFERENCE}"
        ) from error
    for m, name in enumerate(model.members):
        _compare(name, model.member(name), fast_MTV[m], slow_M[m])
        _compare(name, model.member(name), again_MTV[m], slow_M[m][-STEPS:])
        _compare(name, model.member(name), read_MTV[m], slow_M[m])
    for group in groups:
        _check_windows(group)
        group.cache.clear(slots - 1)


def _by_groups(groups: Sequence[Group], token_1T: Tensor, slots: int) -> Tensor:
    """Compute log-probabilities of all members at every token, in the last slot: [M, T, V]."""
    start, length = token_1T.shape[1] - STEPS, token_1T.shape[1]
    first_MTV = _prompt(groups, token_1T[:, :start], slots)
    return torch.cat([first_MTV, *(_tokens(groups, token_1T, slots, t, t + 1) for t in range(start, length))], 1)


def _prompt(groups: Sequence[Group], token_1T: Tensor, slots: int) -> Tensor:
    """Compute the same for tokens that are fed in one piece, as a prompt is."""
    length = token_1T.shape[1]
    position_1T = torch.arange(length, device=token_1T.device)[None]
    slot_1 = torch.tensor([slots - 1], device=token_1T.device)
    batch = TokenBatch(token_1T, position_1T, slot_1, length, length, start=0)
    return torch.stack([logits[0] for logits in member_logits(groups, batch)]).float().log_softmax(-1)


def _tokens(groups: Sequence[Group], token_1T: Tensor, slots: int, start: int, stop: int) -> Tensor:
    """Compute the same for some tokens, fed in one pass over all slots, the others empty."""
    token_ST = token_1T.new_zeros(slots, stop - start)
    position_ST = torch.full_like(token_ST, -1)
    token_ST[-1], position_ST[-1] = token_1T[0, start:stop], torch.arange(start, stop, device=token_1T.device)
    slot_S = torch.arange(slots, device=token_1T.device)
    batch = TokenBatch(token_ST, position_ST, slot_S, stop, stop - start, RowOrder.FIRST_SLOTS)
    return torch.stack([logits[-1] for logits in member_logits(groups, batch)]).float().log_softmax(-1)


def _compare(name: str, member: PreTrainedModel, fast_TV: Tensor, expected_TV: Tensor) -> None:
    """Measure the difference as a share of how much the log-probabilities of a row spread."""
    real = expected_TV.isfinite() & fast_TV.isfinite()
    spread = torch.where(real, expected_TV - expected_TV[real].mean(), 0.0).square().mean().sqrt()
    error = torch.where(real, fast_TV - expected_TV, 0.0).square().mean().sqrt() / spread.clamp_min(1e-6)
    damaged = bool(expected_TV.isnan().any())  # its requests will say so
    limit = TOLERANCE.get(member.dtype, HALF_TOLERANCE)
    if not damaged and not error.item() <= limit:
        raise FastPathError(
            f"the fast path does not compute what member {name!r} ({type(member).__name__}) computes: its "
            f"log-probabilities are off by {error.item():.2g} of their spread (limit {limit:g}). {REFERENCE}"
        )


def _check_windows(group: Group) -> None:
    """Refuse a window that the config declares and no layer asked for: a long text would see too much."""
    config = group.module.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None)
    if window and slides and window not in group.cache.windows:
        raise FastPathError(
            f"the attention of {type(group.module).__name__} does not say that its window is {window}. {REFERENCE}"
        )
