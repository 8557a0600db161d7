"""The tokens of a pass, and what the device knows of the slots between passes: tensors, and nothing that computes.
passes.py reads and writes them; a pass is a function of them alone, so that it can be captured once and replayed.

Shapes: S slots, M members, B rows of a pass, T tokens per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .sampling import Sampling, TokenChoice
from .voices import Voice


class RowOrder(Enum):
    """Which slots the rows of a pass are."""

    ANY_SLOTS = "any"  # as slot_B says; tokens are padded on the left
    FIRST_SLOTS = "first"  # row b is slot b; tokens are padded on the right


class PromptRead(Enum):
    """What the rule reads of a prompt's tokens in a pass."""

    NOTHING = "nothing"  # the prompt goes on for longer than the rule looks back
    BEGIN = "begin"  # the last of them, and nothing of this prompt before
    GO_ON = "go on"  # all of them, after those before


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one pass."""

    token_BT: Tensor
    position_BT: Tensor  # in the sequence; −1 is padding
    slot_B: Tensor
    cells: int  # that are read
    keep: int = 1  # last positions whose logits are wanted
    order: RowOrder = RowOrder.ANY_SLOTS
    start: int | None = None  # where all rows begin, if none has padding and the cells end with them
    reads: PromptRead = PromptRead.BEGIN


@dataclass(frozen=True)
class SlotBuffers:
    """One number per slot and buffer. A position of −1 marks a slot that is not decoding."""

    token_S: Tensor  # chosen last: the next step feeds it
    position_S: Tensor  # where it will stand
    logprob_S: Tensor
    broken_SM: Tensor  # members whose last log-probabilities are NaN
    temperature_S: Tensor
    top_p_S: Tensor
    seed_S: Tensor
    top_k_S: Tensor
    frequency_S: Tensor
    presence_S: Tensor
    index_S: Tensor  # 0, 1, …
    asked: list[Sampling | None] = field(default_factory=list)  # per slot, what the sampling buffers hold
    counts: list[Tensor] = field(default_factory=list)  # times that each token was written, [S, V], if one is penalised

    @staticmethod
    def empty(slots: int, members: int, device: torch.device) -> SlotBuffers:
        index_S, zero_S = torch.arange(slots, device=device), torch.zeros(slots, device=device)
        return SlotBuffers(
            token_S=torch.zeros_like(index_S),
            position_S=torch.full_like(index_S, -1),
            logprob_S=zero_S,
            broken_SM=torch.zeros(slots, members, dtype=torch.bool, device=device),
            temperature_S=zero_S.clone(),
            top_p_S=torch.ones_like(zero_S),
            seed_S=torch.zeros_like(index_S),
            top_k_S=torch.zeros_like(index_S),
            frequency_S=zero_S.clone(),
            presence_S=zero_S.clone(),
            index_S=index_S,
            asked=[None] * slots,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """List the buffers that passes and moves change."""
        chosen = [self.token_S, self.position_S, self.logprob_S, self.broken_SM]
        asked = [self.temperature_S, self.top_p_S, self.seed_S, self.top_k_S, self.frequency_S, self.presence_S]
        return [*chosen, *asked, *self.counts]

    def enter(self, slot: int, sampling: Sampling, vocabulary: int) -> None:
        """Write what a request asks for, as far as the slot does not hold it: each number is a launch on a GPU. Filled,
        there as in `leave`: an item that is set to a number waits for all that the device does."""
        old, wanted = self.asked[slot], {"temperature": self.temperature_S, "top_p": self.top_p_S, "seed": self.seed_S}
        penalties = {"frequency_penalty": self.frequency_S, "presence_penalty": self.presence_S}
        for name, buffer in (wanted | penalties | {"top_k": self.top_k_S}).items():
            if old is None or getattr(old, name) != getattr(sampling, name):
                buffer[slot].fill_(getattr(sampling, name))
        self.asked[slot] = sampling
        if sampling.choice is TokenChoice.PENALISED:
            self.count_tokens(vocabulary)
            self.counts[0][slot].fill_(0.0)

    def count_tokens(self, vocabulary: int) -> None:
        """Make room for counts of what was written."""
        if not self.counts:
            self.counts.append(self.logprob_S.new_zeros(len(self.logprob_S), vocabulary))

    def leave(self, slot: int) -> None:
        self.position_S[slot].fill_(-1)


@dataclass(frozen=True)
class StepResult:
    """What a pass chose, on the host: per request its tokens, their log-probabilities, and which members are broken."""

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    broken: Sequence[Sequence[bool]]


class Judged(NamedTuple):
    """What the composition writes along a draft."""

    token_BT: Tensor
    logprob_BT: Tensor
    accepted_B1: Tensor  # tokens of the row's own draft before its first wrong one
    broken_BM: Tensor
    state: Any  # the rule's, after what stands


class RuleStates:
    """What rules remember of their sequences, slot first. Voices whose states are of one kind share buffers, since a
    slot has one voice at a time. Buffers are made at the first state of their kind."""

    def __init__(self, slots: int):
        self.slots = slots
        self._of_kind: dict[tuple[Any, ...], Any] = {}
        self._of_voice: WeakKeyDictionary[Voice, Any] = WeakKeyDictionary()
        self._fresh: WeakKeyDictionary[Voice, Any] = WeakKeyDictionary()

    def fresh(self, voice: Voice, make: Callable[[], Any]) -> Any:
        """Take the state of one text of which nothing was read, made once; None where its rule has none."""
        if voice not in self._fresh:
            self._fresh[voice] = make()
        return self._fresh[voice]

    def read(self, voice: Voice, slots: Any) -> Any:
        """Take a voice's state in some slots; None where its rule has none. Of a slice of slots these are views."""
        buffers = self._of_voice.get(voice)
        return None if buffers is None else type(buffers)(*(buffer[slots] for buffer in buffers))

    def write(self, voice: Voice, slots: Any, state: Any) -> None:
        """Keep a voice's new state in some slots."""
        if state is None:
            return
        if voice not in self._of_voice:
            kind = (type(state), *((new.shape[1:], new.dtype) for new in state))
            buffers = type(state)(*(new.new_zeros(self.slots, *new.shape[1:]) for new in state))
            self._of_voice[voice] = self._of_kind.setdefault(kind, buffers)
        for buffer, new in zip(self._of_voice[voice], state, strict=True):
            buffer[slots] = new

    @property
    def tensors(self) -> list[Tensor]:
        return [buffer for state in self._of_kind.values() for buffer in state]


def laid_out(new: Tensor, like: Tensor) -> Tensor:
    """Copy a tensor where it does not lie in memory as another does."""
    if new.stride() == like.stride():
        return new
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(new)


def row_bucket(needed: int, few: bool = False) -> int:
    """Round rows up to a power of two; to `few` numbers: 1, 4, 16, and powers of two from there on."""
    power = (needed - 1).bit_length()
    return 1 << (power + power % 2 if few and power < 4 else power)
