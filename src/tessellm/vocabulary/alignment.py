"""From the composition's ids to each member's: nothing to do, a slice (padded tables) or a gather (permuted ids).

Composed ids that are no token (padding, holes) take rows that are no token at the member. Where a member has
too few of them, the id is silent: −inf for every member, so that it is never generated.

Shapes: B batch, T time, V composed vocabulary, S rows of a member's table, U silent ids, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .member_tokens import MemberTokens


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


def align(guide: MemberTokens, members: Sequence[MemberTokens], size: int) -> dict[str, Alignment]:
    """Every member's alignment. The guide's ids are the composition's."""
    maps: dict[str, Tensor | None] = {}
    silent: set[int] = set()
    for s in members:
        maps[s.name] = None
        if s.tokenizer is not None and s.tokens != guide.tokens:
            maps[s.name], unmatched = _translate(guide.tokens, s.tokens, size, s.table_size)
            silent.update(unmatched)
    silent_U = torch.tensor(sorted(silent)) if silent else None
    return {name: Alignment(member_id_V, size, silent_U) for name, member_id_V in maps.items()}


def _translate(base: dict[str, int], member: dict[str, int], size: int, table_size: int) -> tuple[Tensor, list[int]]:
    """`member_id_V`, and the composed ids for which the member has no row left (as input they read row 0).

    Tokens go by their text; the other ids to the same id where that row is free, the rest in ascending order.
    """
    base_id_N = torch.tensor(list(base.values()))
    member_id_N = torch.tensor([member[token] for token in base])
    member_id_V = torch.full((size,), -1)
    member_id_V[base_id_N] = member_id_N
    free_S = torch.ones(table_size, dtype=torch.bool)
    free_S[member_id_N] = False

    overlap = min(size, table_size)
    same = ((member_id_V[:overlap] < 0) & free_S[:overlap]).nonzero().flatten()
    member_id_V[same] = same
    free_S[same] = False

    rest, rows = (member_id_V < 0).nonzero().flatten(), free_S.nonzero().flatten()
    member_id_V[rest] = 0
    member_id_V[rest[: len(rows)]] = rows[: len(rest)]
    return member_id_V, rest[len(rows) :].tolist()


def composed_ends(member: MemberTokens, alignment: Alignment) -> list[int]:
    """The member's end tokens in composed ids; ids outside its table or in cut-off padding are left out."""
    ids_V = torch.arange(alignment.size)
    own_id_V = alignment.to_member(ids_V)
    end_V = torch.isin(own_id_V, torch.tensor(member.end_ids, dtype=torch.long))
    silent = [] if alignment.silent_U is None else alignment.silent_U.tolist()
    return [i for i in ids_V[end_V].tolist() if i not in silent]
