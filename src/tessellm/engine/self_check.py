"""Check that the fast path computes what the members compute, once, when an engine is made, on a few tokens.

Most architectures differ in nothing that the fast path has to know. Those that do (recurrent ones, a position bias in
the attention, masks of their own) are refused: by what their configs say where a few tokens could not show it, and by
their log-probabilities otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import EngineError, FastPathError
from ..model import ComposedForCausalLM
from .members.branches import BranchTokens, branch_logp
from .members.groups import Group

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


Read = Callable[[Tensor, int, int], Tensor]  # a text [1, T], and which of its tokens are read next: [M, tokens, V]


@torch.inference_mode()
def check(model: ComposedForCausalLM, groups: Sequence[Group], reads: Sequence[Read], context: int) -> None:
    """Compare the groups with their members, on one text: by each way to read, in one piece, then token by token, and
    then the last few at once, as drafts are. Where prompts are read by kernels of their own, which take caches that are
    there, in one piece again."""
    length = min(LENGTH, context)
    if length <= STEPS:
        return
    token_1T = (7 * torch.arange(length, device=model.device) ** 2 + 3)[None] % model.config.vocab_size
    start = length - STEPS
    prompt, step = reads
    try:
        fast_MTV = torch.cat([prompt(token_1T, 0, start), *(step(token_1T, t, t + 1) for t in range(start, length))], 1)
        again_MTV = step(token_1T, start, length)
        read_MTV = prompt(token_1T, 0, length)
        slow_M = [model.member_logits(name, token_1T, None, 0, {})[0].float().log_softmax(-1) for name in model.members]
    except torch.OutOfMemoryError:
        raise
    except EngineError as error:
        raise FastPathError(f"{error}. {REFERENCE}") from error
    except Exception as error:
        raise FastPathError(
            f"the fast path cannot run members of {type(model.base).__name__} ({type(error).__name__}: {error}). "
            f"{REFERENCE}"
        ) from error
    for m, name in enumerate(model.members):
        _compare(name, model.member(name), fast_MTV[m], slow_M[m])
        _compare(name, model.member(name), again_MTV[m], slow_M[m][-STEPS:])
        _compare(name, model.member(name), read_MTV[m], slow_M[m])
    for group in groups:
        _check_windows(group)


def branch_reads(groups: Sequence[Group], members: int, slots: int) -> tuple[Read, Read]:
    """Read by branches, in the last slot."""

    def read(token_1T: Tensor, start: int, stop: int) -> Tensor:
        tokens = token_1T[0, start:stop].tolist()
        branches = [BranchTokens(member, slots - 1, tokens, start, len(tokens)) for member in range(members)]
        return torch.stack(branch_logp(groups, branches)).float()

    return read, read


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
