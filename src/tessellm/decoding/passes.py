"""The algorithm, in the order in which a token meets it: `prefill` reads a prompt and chooses its first new token, then
every `decode_step` adds one token per slot. (`verify`, in speculation/, adds several.)

Each is a function of buffers on the device: nothing is looked at in between, so that it can be captured and replayed.
What a pass decides is written after all that may run out of memory, so that a pass can be tried again. A member is
broken in a row where it computes NaN: a softmax over NaN or +∞ is NaN throughout, so that one column tells.

Shapes: S slots, B rows of the pass, T tokens per row, M members, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..rules import Rule, normalised, working_dtype
from .buffers import Judged, PromptRead, RowOrder, RuleStates, SlotBuffers, TokenBatch, laid_out
from .members.groups import Group, member_logits
from .sampling import TokenChoice, choose, penalised, uniform
from .voices import SpecialRows, Voice

READ_ROWS = 32  # positions of a prompt that a compiled rule reads at once
READ_AT_ONCE = 1 << 20  # log-probabilities of a prompt, on a CPU: as many as its cache holds
READ_AT_ONCE_ON_GPU = 1 << 28  # a GiB, of which a rule makes several

Logits = Sequence[Tensor] | Tensor
Combined = tuple[Tensor, Tensor, Any]  # composed log-probabilities, broken members, the rule's state
Decided = tuple[Tensor, Tensor, Tensor, Any]  # tokens, their log-probabilities, broken members, the rule's state


def combine(rule: Rule, logits_M: Logits, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Combined:
    """Run the rule over the members' logits."""
    logp_MBTV = normalised(logits_M)
    logp_BTV, state = rule(logp_MBTV, token_BT, mask_BT, state)
    return logp_BTV, logp_MBTV[..., 0].isnan().any(-1).T, state


def decide(rule: Rule, logits_M: Logits, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Decided:
    """Choose the likeliest token after the last position."""
    logp_MBTV = normalised(logits_M)
    logp_BTV, state = rule(logp_MBTV, token_BT, mask_BT, state)
    logprob_B, token_B = logp_BTV[:, -1].max(-1)
    return token_B, logprob_B, logp_MBTV[..., 0].isnan().any(-1).T, state


def standing(token_BT: Tensor, fed_BT: Tensor, real_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Count the tokens of each row's draft that stand, those before its first wrong one, [B, 1]; and tell which of the
    positions fed are left then. `token_BT`: what is written behind each of them."""
    right_BG = (token_BT[:, :-1] == fed_BT[:, 1:]) & real_BT[:, 1:]
    accepted_B1 = right_BG.long().cumprod(1).sum(1, keepdim=True)
    return accepted_B1, real_BT & (torch.arange(fed_BT.shape[1], device=fed_BT.device) <= accepted_B1)


@dataclass(frozen=True)
class RuleRunner:
    """The composition's rule as a device runs it best: `combine` and `decide` of that rule, called or compiled."""

    combine: Callable[..., Combined]
    decide: Callable[..., Decided]
    drafts_at_once: bool  # whether all tokens of a draft are read by one call of the rule
    read: Callable[..., Combined] | None = None  # READ_ROWS positions of one prompt; what the last of them says
    read_prompts: Callable[..., Combined] | None = None  # whole prompts, where the rule has kernels of its own
    judge_drafts: Callable[..., Judged] | None = None  # all drafts at once, likewise


@dataclass(frozen=True)
class Workspace:
    """All that passes work on."""

    groups: Sequence[Group]
    voice: Voice  # the composition's own
    runner: RuleRunner
    slots: SlotBuffers
    states: RuleStates
    row_numbers: int  # logits of one position, over all members
    drafts: list[Tensor] = field(default_factory=list)  # of every slot, where there are drafts

    @property
    def tensors(self) -> list[Tensor]:
        """List all that passes change, but for the members' caches."""
        return [*self.slots.tensors, *self.states.tensors, *self.drafts]

    def move(self, source: int, target: int) -> None:
        """Move all that is known of a slot, but for its cells, into another."""
        for buffer in self.tensors:
            buffer[target] = buffer[source]
        self.slots.asked[target] = self.slots.asked[source]
        self.slots.leave(source)


def prefill(work: Workspace, batch: TokenBatch, choice: TokenChoice, special: SpecialRows | None = None) -> None:
    """Feed tokens of prompts, padded on the left; at the prompts' ends also choose their first new tokens."""
    slots, slot_B = work.slots, batch.slot_B
    silent = 0 if special else _silent_rows(work.voice, batch)
    batch = replace(batch, keep=batch.keep - silent)
    logits_M = member_logits(work.groups, batch)
    if batch.reads is PromptRead.NOTHING:
        slots.logprob_S.index_fill_(0, slot_B, 0.0)  # an indexed number would wait for the device
        slots.broken_SM[slot_B] = normalised([logits[:, -1:] for logits in logits_M])[:, :, 0, 0].isnan().T
        return
    fed_BT, real_BT = batch.token_BT[:, -batch.keep :], batch.position_BT[:, -batch.keep :] >= 0
    begun = batch.reads is PromptRead.GO_ON
    if special is None:
        state = work.states.read(work.voice, slot_B) if begun else None
        if silent:
            like_MBTV = logits_M[0][None, :, :1].expand(len(logits_M), -1, -1, -1).to(working_dtype(logits_M[0]))
            state = work.voice.rule.begin(batch.token_BT[:, -batch.keep - silent : -batch.keep], like_MBTV)
        listens = silent > 0 and work.voice.rule.is_asked(fed_BT)
        if work.runner.read_prompts is None and work.runner.read is not None and batch.keep >= READ_ROWS:
            logp_BV, broken_BM = read_in_blocks(work, logits_M, fed_BT, real_BT, slot_B, state)
        else:
            read = work.runner.read_prompts or partial(_read_prompt, work.voice, listens=listens)
            logp_BV, broken_BM, state = read(logits_M, fed_BT, real_BT, state)
            work.states.write(work.voice, slot_B, state)
    else:
        logp_BV, broken_BM = _nothing_said(logits_M)
        for voice, rows in special.voices.items():
            at_B = torch.tensor(rows, device=slot_B.device)
            heard_M = [logits[at_B] for logits in logits_M]
            state = work.states.read(voice, slot_B[at_B]) if begun else None
            logp_BV[at_B], broken_BM[at_B], state = _read_prompt(
                voice, heard_M, fed_BT[at_B], real_BT[at_B], state, special=special
            )
            work.states.write(voice, slot_B[at_B], state)
    if choice is TokenChoice.NONE:
        slots.logprob_S.index_fill_(0, slot_B, 0.0)
        slots.broken_SM[slot_B] = broken_BM
        return
    position_B = batch.position_BT[:, -1] + 1
    token_B, logprob_B = choose_tokens(slots, logp_BV, slot_B, position_B, choice)
    if special is not None:
        special.observe(logits_M, logp_BV, token_B)
    slots.token_S[slot_B], slots.logprob_S[slot_B] = token_B, logprob_B.float()
    slots.broken_SM[slot_B], slots.position_S[slot_B] = broken_BM, position_B
    if choice is TokenChoice.PENALISED:  # written, not added: a bucket may hold a row twice
        slots.counts[0][slot_B, token_B] = (position_B > 0).float()


def _silent_rows(voice: Voice, batch: TokenBatch) -> int:
    """Count the first of the rows kept whose logits the rule does not need: on a CPU, where looking at tokens costs
    nothing and computing logits does, and where no row is padding."""
    if batch.token_BT.device.type != "cpu" or batch.start is None or batch.reads is not PromptRead.BEGIN:
        return 0
    return voice.rule.silent_rows(batch.token_BT[:, -batch.keep :])


def _read_prompt(
    voice: Voice,
    logits_M: Sequence[Tensor],
    token_BT: Tensor,
    real_BT: Tensor,
    state: Any,
    listens: bool = False,
    special: SpecialRows | None = None,
) -> Combined:
    """Run a voice's rule over the end of a prompt, some positions at a time, from the beginning or from a state on; the
    last position's log-probabilities, broken members, and the state. `listens`: what it says before the last position
    does not count. `special`: is told why the rule says so."""
    broken_MB = torch.zeros(len(logits_M), len(token_BT), dtype=torch.bool, device=token_BT.device)
    most = READ_AT_ONCE if token_BT.device.type == "cpu" else READ_AT_ONCE_ON_GPU
    size = max(1, most // (len(logits_M) * logits_M[0][:, :1].numel()))
    for at in (slice(start, start + size) for start in range(0, token_BT.shape[1], size)):
        logp_MBTV = normalised([logits[:, at] for logits in logits_M])
        broken_MB = broken_MB | logp_MBTV[:, :, -1, 0].isnan()
        given = logp_MBTV, token_BT[:, at], real_BT[:, at], state
        if listens and at.stop < token_BT.shape[1]:
            state = voice.rule.listen(logp_MBTV, token_BT[:, at], state)
        elif special is None:
            logp_BTV, state = voice.rule(*given)
        else:
            logp_BTV, state, why = voice.rule.explain(*given)
            special.why[voice] = why.map(lambda column: column[:, -1:])
    return logp_BTV[:, -1], broken_MB.T, state


def read_in_blocks(
    work: Workspace, logits_M: Sequence[Tensor], token_BT: Tensor, real_BT: Tensor, slot_B: Tensor, state: Any
) -> tuple[Tensor, Tensor]:
    """Run the composition's own rule over the ends of prompts as it was compiled: text by text, READ_ROWS positions at
    a time, which always look alike; what is left over comes first, uncompiled unless it, too, is always the same: where
    a prompt is as long as the rule looks back. The last position's log-probabilities, and broken members."""
    rule, read, steps = work.voice.rule, work.runner.read, token_BT.shape[1]
    assert read is not None
    read_rest = read if steps == rule.window + 1 else partial(combine, rule)
    fresh = work.states.fresh(work.voice, lambda: _nothing_read(rule, logits_M, token_BT))
    said, broken, after = [], [], []
    for b, before in enumerate(states_by_text(work, logits_M, token_BT, state)):
        row = slice(b, b + 1)
        broken_1M = torch.zeros_like(work.slots.broken_SM[:1])
        for start in range(steps % READ_ROWS - READ_ROWS, steps, READ_ROWS):
            at = slice(max(start, 0), start + READ_ROWS)
            if at.stop <= at.start:
                continue
            given = [logits[row, at] for logits in logits_M], token_BT[b, at][None], real_BT[b, at][None], before
            logp, found_1M, new = read(*given) if start >= 0 else read_rest(*given)
            before = new if new is None else type(new)(*map(laid_out, new, fresh))
            broken_1M = broken_1M | found_1M
        said.append(logp)
        broken.append(broken_1M)
        after.append(before)
    if fresh is not None:
        work.states.write(work.voice, slot_B, type(fresh)(*(torch.cat(each) for each in zip(*after, strict=True))))
    return torch.cat(said), torch.cat(broken)


def states_by_text(work: Workspace, logits_M: Sequence[Tensor], token_BT: Tensor, state: Any) -> list[Any]:
    """Take the state of each text apart; all lie in memory as one of which nothing was read, which it is where there is
    none yet: or what was compiled would be compiled again."""
    fresh = work.states.fresh(work.voice, lambda: _nothing_read(work.voice.rule, logits_M, token_BT))
    if state is None:
        return [fresh] * len(token_BT)
    return [
        type(state)(*(laid_out(each[b : b + 1], like) for each, like in zip(state, fresh, strict=True)))
        for b in range(len(token_BT))
    ]


def _nothing_read(rule: Rule, logits_M: Sequence[Tensor], token_BT: Tensor) -> Any:
    """Make the state of a text of which nothing was read: that behind padding."""
    logp_M11V = normalised([torch.zeros_like(logits[:1, :1]) for logits in logits_M])
    state = rule(logp_M11V, token_BT[:1, :1], torch.zeros_like(token_BT[:1, :1], dtype=torch.bool), None)[1]
    if state is None:
        return None
    return type(state)(*(each.clone(memory_format=torch.contiguous_format) for each in state))


def decode_step(
    work: Workspace, rows: int, cells: int, choice: TokenChoice, special: SpecialRows | None = None
) -> None:
    """Add one token to each of the first `rows` slots; their members read so many cells."""
    slots = work.slots
    token_B1, position_B1 = slots.token_S[:rows, None], slots.position_S[:rows, None]
    real_B1, next_B = position_B1 >= 0, position_B1[:, 0] + 1
    batch = TokenBatch(token_B1, position_B1, slots.index_S[:rows], cells, 1, RowOrder.FIRST_SLOTS)
    logits_M = member_logits(work.groups, batch)
    if special is None:
        before = work.states.read(work.voice, slice(rows))
        if choice is TokenChoice.GREEDY:
            token_B, logprob_B, broken_BM, after = work.runner.decide(logits_M, token_B1, real_B1, before)
        else:
            logp_B1V, broken_BM, after = work.runner.combine(logits_M, token_B1, real_B1, before)
            token_B, logprob_B = choose_tokens(slots, logp_B1V[:, -1], slice(rows), next_B, choice)
        for buffer, new in zip(before or (), after or (), strict=True):
            buffer.copy_(new)
    else:
        token_B, logprob_B, broken_BM = _decode_special(work, special, logits_M, batch, choice)
    slots.token_S[:rows], slots.logprob_S[:rows] = token_B, logprob_B.float()
    slots.broken_SM[:rows], slots.position_S[:rows] = broken_BM, torch.where(real_B1[:, 0], next_B, -1)
    if choice is TokenChoice.PENALISED:
        slots.counts[0].index_put_((slots.index_S[:rows], token_B), real_B1[:, 0].float(), accumulate=True)


def _decode_special(
    work: Workspace, special: SpecialRows, logits_M: Sequence[Tensor], batch: TokenBatch, choice: TokenChoice
) -> tuple[Tensor, Tensor, Tensor]:
    """Run every voice's rule over its rows, choose, and show observers: tokens, log-probabilities, broken members."""
    (logp_BV, broken_BM), after = _nothing_said(logits_M), []
    for voice, rows in special.voices.items():
        at_B = torch.tensor(rows, device=logp_BV.device)
        logp_MB1V = normalised([logits[at_B] for logits in logits_M])
        said_B1V, state, special.why[voice] = voice.rule.explain(
            logp_MB1V, batch.token_BT[at_B], batch.position_BT[at_B] >= 0, work.states.read(voice, at_B)
        )
        logp_BV[at_B], broken_BM[at_B] = said_B1V[:, -1], logp_MB1V[:, :, 0, 0].isnan().T
        after.append((voice, at_B, state))
    position_B = batch.position_BT[:, -1] + 1
    token_B, logprob_B = choose_tokens(work.slots, logp_BV, slice(len(logp_BV)), position_B, choice)
    special.observe(logits_M, logp_BV, token_B)
    for voice, at_B, state in after:
        work.states.write(voice, at_B, state)
    return token_B, logprob_B, broken_BM


def _nothing_said(logits_M: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Make room for log-probabilities [B, V] and broken members [B, M]."""
    logp_BV = torch.zeros_like(logits_M[0][:, -1], dtype=working_dtype(logits_M[0]))
    return logp_BV, torch.zeros(len(logp_BV), len(logits_M), dtype=torch.bool, device=logp_BV.device)


def choose_tokens(
    slots: SlotBuffers, logp_BV: Tensor, at: Any, position_B: Tensor, choice: TokenChoice
) -> tuple[Tensor, Tensor]:
    """Choose the token at a position of each of the slots `at`; its log-probability."""
    if choice is TokenChoice.GREEDY:
        logprob_B, token_B = logp_BV.max(-1)
        return token_B, logprob_B
    noise_B = uniform(slots.seed_S[at], position_B)
    said_BV = logp_BV
    if choice is TokenChoice.PENALISED:
        said_BV = penalised(logp_BV, slots.counts[0][at], slots.frequency_S[at], slots.presence_S[at])
    token_B = choose(said_BV, slots.temperature_S[at], slots.top_p_S[at], slots.top_k_S[at], noise_B, choice)
    return token_B, logp_BV.gather(-1, token_B[:, None])[:, 0]
