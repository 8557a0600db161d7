"""What one member's tokens are. Knows no other members."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class MemberTokens:
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
