"""Rules for benchmarks/resting.py: the worst that members who rest can meet, and what they meet on real prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resting_traces import Trace
from tessellm.rules import BaseRule
from tessellm.rules.belief import Belief
from tessellm.rules.laws import Heard
from tessellm.rules.resting import SUREST

DOUBT = 1e-4  # share of what `belief` itself says in what is said: it must be computed


class LastToken(NamedTuple):
    """The last real token that was fed; 0 before the first."""

    token_B: Tensor


@dataclass(frozen=True)
class Contrary(BaseRule):
    """A rule that is sure of another member after every token, by the token itself, and then says the base's law
    without what that member would say: no draft is ever right."""

    members: int
    name: str = "contrary"
    window: int = 1
    lets_members_rest = True

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        first_B = torch.zeros_like(tokens_BT[:, 0]) if state is None else state.token_B
        fed_BX = torch.cat([first_B[:, None], tokens_BT], 1)
        index_T = torch.arange(1, fed_BX.shape[1], device=fed_BX.device)
        last_BX = torch.nn.functional.pad(torch.where(mask_BT, index_T, 0), (1, 0)).cummax(1).values
        token_BX = fed_BX.gather(1, last_BX)  # the last real one up to each place
        named_BTV = logp_MBTV.take_along_dim((token_BX[:, :-1] % self.members)[None, ..., None], 0)[0]
        law_BTV = logp_MBTV[0].scatter(-1, named_BTV.argmax(-1, keepdim=True), -torch.inf).log_softmax(-1)
        return law_BTV, LastToken(token_BX[:, -1])

    def believed_members(self, state: LastToken) -> tuple[Tensor, Tensor]:
        return state.token_B % self.members, torch.full_like(state.token_B, SUREST)


class ReplayState(NamedTuple):
    """What `belief` keeps, which kind of trace a text follows, and how many of its rows were read."""

    pending_BLV: Tensor
    started_B: Tensor
    belief_BL: Tensor
    answering_B: Tensor
    opening_B: Tensor
    ring_BWF: Tensor
    kind_B: Tensor
    rows_B: Tensor


class Replayed(Belief):
    """`belief`, computed as it is, but for whom it believes: that follows recorded answers (resting_traces.py), of one
    kind one after another. Whoever was believed must have said what was written, since members here all say the same.
    The kind is the prompt's last token; prompts are of `prompt` tokens. A member that the composition lacks is another
    expert of it."""

    state_type = ReplayState

    def __init__(self, traces: Sequence[Trace], members: int, prompt: int, device: torch.device | str):
        super().__init__(span=prompt)
        self.kinds = list(dict.fromkeys(trace.kind for trace in traces))
        tables = [_chained([trace for trace in traces if trace.kind == kind], members) for kind in self.kinds]
        longest = max(len(believed) for believed, _ in tables)
        size_K = [len(believed) for believed, _ in tables]
        rows = [[[*each, *[0] * (longest - len(each))] for each in table] for table in tables]
        own = {"prompt": prompt, "table_K2X": torch.tensor(rows, device=device)}
        for name, value in {**own, "size_K": torch.tensor(size_K, device=device)}.items():
            object.__setattr__(self, name, value)

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def begun(self, logp_MBTV: Tensor) -> Any:
        state = super().begun(logp_MBTV)
        return ReplayState(*state, *[torch.zeros_like(state.opening_B)] * 2)

    def weigh(
        self, heard: Heard, tokens_BT: Tensor, mask_BT: Tensor, before: Sequence[Tensor], known: Any = None
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        *own, kind_B, rows_B = before
        belief_BTL, score_BTK, after = super().weigh(heard, tokens_BT, mask_BT, own, known)
        rows_BT = rows_B[:, None] + mask_BT.long().cumsum(1)
        last_BT = (rows_BT == self.prompt) & mask_BT  # type: ignore[attr-defined]
        kind_B = torch.where(last_BT.any(1), (tokens_BT * last_BT).sum(1) % len(self.kinds), kind_B)
        index_L = torch.arange(belief_BTL.shape[-1], device=tokens_BT.device)
        named_BTL = index_L == self._at(0, kind_B, rows_BT - 1)[..., None]
        replayed_BTL = (named_BTL * (1 - DOUBT) + belief_BTL.exp() * DOUBT).log()
        return replayed_BTL, score_BTK, (*after, kind_B, rows_BT[:, -1])

    def believed_members(self, state: ReplayState) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return tuple(self._at(which, state.kind_B, state.rows_B[:, None])[:, 0] for which in (0, 1))  # type: ignore[return-value]

    def _at(self, which: int, kind_B: Tensor, rows_BT: Tensor) -> Tensor:
        """Look up who is believed (0) or how surely (1) after so many rows."""
        at_BT = (rows_BT - self.prompt).clamp_min(0) % self.size_K[kind_B][:, None]  # type: ignore[attr-defined]
        return self.table_K2X[kind_B[:, None], which, at_BT]  # type: ignore[attr-defined,no-any-return]


def _chained(traces: Sequence[Trace], members: int) -> tuple[list[int], list[int]]:
    """One answer after another: who is believed, and how surely."""
    believed, sure = [], []
    for trace in traces:
        before = [trace.believed[0], *trace.believed]
        if not all(named in right for named, right in zip(before, trace.right, strict=False)):
            raise ValueError("a token was written that whoever was believed would not have said: it cannot be replayed")
        believed += [place and 1 + (place - 1) % (members - 1) for place in trace.believed]
        sure += trace.sure
    return believed, sure
