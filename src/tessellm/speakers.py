"""What one member's tokens are, and how the composition's ids become that member's. Knows no other members."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Speaker:
    """What is known of one member's tokens."""

    name: str
    table_size: int  # rows of its output embedding (config.vocab_size)
    tokenizer: PreTrainedTokenizerBase | None  # None: not known, only sizes can be compared
    end_ids: tuple[int, ...] = ()  # all end tokens of its config and generation config, in its own ids

    @cached_property
    def vocab(self) -> dict[str, int]:
        return {} if self.tokenizer is None else self.tokenizer.get_vocab()

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Those with a row. There may be others: Gemma 3 1B has 262144 rows and a token with id 262144."""
        if max(self.vocab.values(), default=-1) < self.table_size:
            return self.vocab
        return {token: i for token, i in self.vocab.items() if i < self.table_size}


@dataclass(frozen=True, eq=False)
class Alignment:
    """From the composition's ids to one member's."""

    member_id_V: Tensor | None  # composed id v is the member's member_id_V[v]; None: the same ids
    size: int  # V
    silent_U: Tensor | None = None  # composed ids that some member has no row for; the same for every member
    _copies: dict[torch.device, list[Tensor | None]] = field(default_factory=dict, repr=False)

    def to_member(self, tokens_BT: Tensor) -> Tensor:
        """Input ids for this member."""
        member_id_V, _ = self._on(tokens_BT.device)
        return tokens_BT if member_id_V is None else member_id_V[tokens_BT]

    def to_composed(self, logits_BTS: Tensor) -> Tensor:
        """The member's logits as composed columns: a softmax afterwards is over shared tokens only."""
        member_id_V, silent_U = self._on(logits_BTS.device)
        cut = slice(self.size)
        logits_BTV = logits_BTS[..., cut] if member_id_V is None else logits_BTS.index_select(-1, member_id_V)
        return logits_BTV if silent_U is None else logits_BTV.index_fill(-1, silent_U, -torch.inf)

    def _on(self, device: torch.device) -> list[Tensor | None]:
        """Both maps on that device, copied there once."""
        if device not in self._copies:
            maps = (self.member_id_V, self.silent_U)
            with torch.inference_mode(False):  # a copy made while generating must also serve a backward pass
                self._copies[device] = [ids if ids is None else ids.to(device) for ids in maps]
        return self._copies[device]
