"""Does the fast path compute what the members compute? Looked at once, when an engine is made, on a few tokens.

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
from .members.groups import Group, member_logits

LENGTH, STEPS = 12, 3  # tokens of the text, and how many of them are fed one by one
KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
MOVING_ROPES = {"dynamic", "longrope"}  # their angles depend on the longest text of a batch
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}  # of the spread of a row; TF32 has ten bits
HALF_TOLERANCE = 0.15
REFERENCE = "Use the reference path instead: model.generate(…), or --engine reference"


def refuse_unknown(model: ComposedForCausalLM) -> None:
    """What a few tokens could not show: architectures that go on otherwise in longer texts."""
    for name in model.members:
        member = model.member(name)
        why = _unknown(member)
        if why:
            raise FastPathError(
                f"member {name!r} ({type(member).__name__}) cannot run on the fast path: {why}. {REFERENCE}"
            )


def _unknown(member: PreTrainedModel) -> str | None:
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
    the last few at once, as drafts are."""
    length = min(LENGTH, context)
    if length <= STEPS:
        return
    token_1T = (7 * torch.arange(length, device=model.device) ** 2 + 3)[None] % model.config.vocab_size
    try:
        found_MTV = _by_groups(groups, token_1T, slots)
        again_MTV = _tokens(groups, token_1T, slots, length - STEPS, length) if several else found_MTV[:, -STEPS:]
        expected = model(token_1T, use_cache=False, output_member_logprobs=True).member_logprobs
    except torch.OutOfMemoryError:
        raise
    except EngineError as error:
        raise FastPathError(f"{error}. {REFERENCE}") from error
    except Exception as error:
        raise FastPathError(
            f"the fast path cannot run these members ({type(error).__name__}: {error}). {REFERENCE}"
        ) from error
    for m, name in enumerate(model.members):
        _compare(name, model.member(name), found_MTV[m], expected[m, 0])
        _compare(name, model.member(name), again_MTV[m], expected[m, 0, -STEPS:])
    for group in groups:
        _check_windows(group)


def _by_groups(groups: Sequence[Group], token_1T: Tensor, slots: int) -> Tensor:
    """Log-probabilities of all members at every token: [M, T, V]. In the last slot, the others empty."""
    length = token_1T.shape[1]
    start = length - STEPS
    position_1T = torch.arange(length, device=token_1T.device)[None]
    slot_1 = torch.tensor([slots - 1], device=token_1T.device)
    logits_M = member_logits(groups, token_1T[:, :start], position_1T[:, :start], slot_1, start, start, 0)
    first_MTV = torch.stack([logits[0] for logits in logits_M]).float().log_softmax(-1)
    return torch.cat([first_MTV, *(_tokens(groups, token_1T, slots, t, t + 1) for t in range(start, length))], 1)


def _tokens(groups: Sequence[Group], token_1T: Tensor, slots: int, start: int, stop: int) -> Tensor:
    """The same of some tokens, fed in one pass over all slots."""
    token_ST = token_1T.new_zeros(slots, stop - start)
    position_ST = torch.full_like(token_ST, -1)
    token_ST[-1], position_ST[-1] = token_1T[0, start:stop], torch.arange(start, stop, device=token_1T.device)
    logits_M = member_logits(groups, token_ST, position_ST, slots, stop, stop - start)
    return torch.stack([logits[-1] for logits in logits_M]).float().log_softmax(-1)


def _compare(name: str, member: PreTrainedModel, found_TV: Tensor, expected_TV: Tensor) -> None:
    """The difference, as a share of how much the log-probabilities of a row spread."""
    real = expected_TV.isfinite() & found_TV.isfinite()
    spread = torch.where(real, expected_TV - expected_TV[real].mean(), 0.0).square().mean().sqrt()
    error = torch.where(real, found_TV - expected_TV, 0.0).square().mean().sqrt() / spread.clamp_min(1e-6)
    damaged = bool(expected_TV.isnan().any())  # its requests will say so
    limit = TOLERANCE.get(member.dtype, HALF_TOLERANCE)
    if not damaged and not error.item() <= limit:
        raise FastPathError(
            f"the fast path does not compute what member {name!r} ({type(member).__name__}) computes: its "
            f"log-probabilities are off by {error.item():.2g} of their spread (limit {limit:g}). {REFERENCE}"
        )


def _check_windows(group: Group) -> None:
    """Every window that the config declares must have been asked for; else a long text would see too much."""
    now, config = group.cache.now, group.module.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None)
    if window and slides and now is not None and window not in now.windows:
        raise FastPathError(
            f"the attention of {type(group.module).__name__} does not say that its window is {window}. {REFERENCE}"
        )
