"""Stopping as its own event: who may end the text, whatever rule decides the rest.

A member's stop set holds all of its end tokens. Its stop event has probability h_m = p_m(stop set); the members' stop
events are one event, although their end tokens differ. Except under `rule`, the inner rule sees that event as a single
token, and a policy decides its probability h:

    rule    nothing is changed: the inner rule sees end tokens as tokens                conservative
    owner   the h of the expert that owns the run; the rule's, where several speak     conservative
    any     the largest h_m among the trusted members                                  not conservative
    mean    the experts' mean h                                                         not conservative
    base    the base's h                                                                not conservative

A conservative policy keeps a conservative rule equal to Eq. 2 where at most one expert differs from the base, but for
the choice among several end tokens: an expert that stops as often as the base, with another token, is not noticed. The
probability of stopping is shared out over the end tokens of the member that it came from. Knows no model.

Shapes: M members (0 is the base), B batch, T time, V vocabulary, E end tokens of any member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .evidence import Trace, explained

POLICIES = ("rule", "owner", "any", "mean", "base")
CONSERVATIVE = frozenset({"rule", "owner"})
TINY = 1e-7  # no member is surer than this that it stops


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"unknown termination policy {policy!r}; known: {', '.join(POLICIES)}")


class Ends(NamedTuple):
    """The end tokens of all members, and whose each is."""

    token_E: Tensor
    own_ME: Tensor

    @property
    def event(self) -> int:
        """Where in E the stop event stands while the inner rule runs: the smallest id."""
        return 0


def ends_of(stops: tuple[tuple[int, ...], ...], device: torch.device) -> Ends:
    """The members' end tokens as tensors."""
    tokens = sorted({token for ids in stops for token in ids})
    with torch.inference_mode(False):  # made once: must also serve a backward pass
        own_ME = torch.tensor([[token in ids for token in tokens] for ids in stops], device=device)
        return Ends(torch.tensor(tokens, device=device), own_ME)


def as_event(logp_MBTV: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
    """Every member with its stop event on one token, and log h_m [M, B, T]. Another member's end token is no
    continuation either: its mass is spread over the rest. A member that knows nothing but end tokens stops."""
    own_MBTE = logp_MBTV.index_select(-1, ends.token_E).masked_fill(~ends.own_ME[:, None, None], -torch.inf)
    go_MBTV = without_ends(logp_MBTV, ends)
    total_MBT = go_MBTV.logsumexp(-1)
    nothing_MBT = total_MBT == -torch.inf
    log_h_MBT = own_MBTE.logsumexp(-1).masked_fill(nothing_MBT, 0.0)
    shift_MBT = torch.where(nothing_MBT, 0.0, log_left(log_h_MBT) - total_MBT)
    columns_MBTE = torch.full_like(own_MBTE, -torch.inf)
    columns_MBTE[..., ends.event] = log_h_MBT
    return with_ends(go_MBTV + shift_MBT[..., None], ends, columns_MBTE), log_h_MBT


def without_ends(logp_BTV: Tensor, ends: Ends) -> Tensor:
    """End tokens impossible, all else as it is."""
    if not torch.compiler.is_compiling():
        return logp_BTV.index_fill(-1, ends.token_E, -torch.inf)
    return with_ends(logp_BTV, ends, logp_BTV.new_full((len(ends.token_E),), -torch.inf))


def with_ends(logp_BTV: Tensor, ends: Ends, column_BTE: Tensor) -> Tensor:
    """New columns for the end tokens, into the tensor given. Compiled: a choice of each number, which becomes part of
    whatever pass comes next, as writing to places does not."""
    if not torch.compiler.is_compiling():
        return logp_BTV.index_copy_(-1, ends.token_E, column_BTE)
    index_V = torch.arange(logp_BTV.shape[-1], device=logp_BTV.device)
    for e, token in enumerate(ends.token_E.unbind()):
        logp_BTV = torch.where(index_V == token, column_BTE[..., e : e + 1], logp_BTV)
    return logp_BTV


def log_left(log_h: Tensor) -> Tensor:
    """log(1 − h), finite."""
    return torch.log1p(-log_h.exp().clamp_max(1 - TINY))


def most_divergent(event_MBT: Tensor) -> Tensor:
    """The expert whose stop event differs most from the base's: [B, T]."""
    stop, go = event_MBT.clamp_min(-1e4), log_left(event_MBT)
    divergence_KBT = stop[1:].exp() * (stop[1:] - stop[0]) + go[1:].exp() * (go[1:] - go[0])
    return divergence_KBT.argmax(0) + 1


def run_owner(trace: Any) -> Tensor:
    """Who may end the text: stopping cannot be taken back, so where the members interfere it is the owner of the run,
    by its evidence or by that of the last run, before anyone who merely has something to say now: [B, T]."""
    steady_BT = torch.where(trace.leader_BT > 0, trace.leader_BT, trace.standing_BT)
    return torch.where(trace.blended_BT | (steady_BT == 0), trace.owner_BT, steady_BT)


@dataclass(frozen=True)
class Terminated:
    """A rule with a policy for stopping. `stops` holds the end tokens of every member, the base first."""

    rule: Any
    stops: tuple[tuple[int, ...], ...]
    policy: str = "owner"
    _ends: dict[str, Ends] = field(default_factory=dict, init=False, repr=False, compare=False)  # a copy a device

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if self.policy != "rule" and not any(self.stops):
            raise ValueError(f"the policy {self.policy!r} needs at least one end token; none of the members has one")

    @property
    def name(self) -> str:
        return str(self.rule.name)

    @property
    def window(self) -> int:
        return int(self.rule.window)

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.explain(logp_MBTV, tokens_BT, mask_BT, state)[:2]

    def explain(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any
    ) -> tuple[Tensor, Any, Trace | None]:
        if self.policy == "rule":
            return explained(self.rule, logp_MBTV, tokens_BT, mask_BT, state)
        logp_MBTV = logp_MBTV.to(torch.promote_types(logp_MBTV.dtype, torch.float32))
        ends = self.ends_on(logp_MBTV.device)
        seen_MBTV, event_MBT = as_event(logp_MBTV, ends)
        is_end_BT = (tokens_BT[..., None] == ends.token_E).any(-1)
        heard_BT = torch.where(is_end_BT, ends.token_E[ends.event], tokens_BT)
        logp_BTV, state, trace = explained(self.rule, seen_MBTV, heard_BT, mask_BT, state)
        spoken_BT = logp_BTV.index_select(-1, ends.token_E[:1])[..., 0]
        log_h_BT, share_MBT = self.decide(event_MBT, spoken_BT, trace)
        return release(logp_MBTV, ends, logp_BTV, log_h_BT, share_MBT), state, trace

    def ends_on(self, device: torch.device) -> Ends:
        """The end tokens on that device, copied there once."""
        place = str(device)
        if place not in self._ends:
            self._ends[place] = ends_of(self.stops, device)
        return self._ends[place]

    def decide(self, event_MBT: Tensor, spoken_BT: Tensor, trace: Any) -> tuple[Tensor, Tensor]:
        """log h, and how much of it comes from each member (sums to one over members)."""
        members = event_MBT.shape[0]
        index_M = torch.arange(members, device=event_MBT.device)[:, None, None]
        loudest_BT = event_MBT.argmax(0)
        if self.policy == "base":
            return event_MBT[0], (index_M == torch.zeros_like(loudest_BT)).to(event_MBT.dtype)
        if self.policy == "mean":
            share_MBT = event_MBT.masked_fill(index_M == 0, -torch.inf)
            log_h_BT = share_MBT.logsumexp(0) - torch.tensor(members - 1.0).log().item()
            safe_MBT = share_MBT.masked_fill(share_MBT.amax(0) == -torch.inf, 0.0)
            return log_h_BT, safe_MBT.softmax(0)
        if self.policy == "any":
            trusted_MBT = torch.ones_like(event_MBT, dtype=torch.bool)
            if trace is not None:
                evidence_MBT = trace.evidence_BTM.permute(2, 0, 1)
                trusted_MBT = evidence_MBT >= evidence_MBT[1:].amax(0) - self.rule.trust
            chosen_BT = event_MBT.masked_fill(~trusted_MBT, -torch.inf).argmax(0)
        else:  # owner
            owner_BT = most_divergent(event_MBT) if trace is None else run_owner(trace)
            several_BT = owner_BT == 0
            chosen_BT = torch.where(several_BT, loudest_BT, owner_BT)
        log_h_BT = event_MBT.gather(0, chosen_BT[None])[0]
        if self.policy == "owner":
            log_h_BT = torch.where(several_BT, spoken_BT, log_h_BT)
        return log_h_BT, (index_M == chosen_BT).to(event_MBT.dtype)


def release(logp_MBTV: Tensor, ends: Ends, logp_BTV: Tensor, log_h_BT: Tensor, share_MBT: Tensor) -> Tensor:
    """h on the end tokens of the members that it came from, 1 − h on the rule's continuations."""
    end_MBTE = logp_MBTV.index_select(-1, ends.token_E)
    go_BTV = without_ends(logp_BTV, ends)
    total_BT = go_BTV.logsumexp(-1)
    ended_BT = total_BT == -torch.inf
    log_h_BT = log_h_BT.masked_fill(ended_BT, 0.0)
    go_BTV = go_BTV + torch.where(ended_BT, 0.0, log_left(log_h_BT) - total_BT)[..., None]
    own_MBTE = end_MBTE.masked_fill(~ends.own_ME[:, None, None], -torch.inf)
    nothing_MBT1 = (own_MBTE == -torch.inf).all(-1, keepdim=True)  # then the event's own token stands for the end
    is_event_E = torch.arange(len(ends.token_E), device=ends.token_E.device) == ends.event
    own_MBTE = torch.where(nothing_MBT1, torch.where(is_event_E, 0.0, -torch.inf).to(own_MBTE.dtype), own_MBTE)
    part_BTE = (own_MBTE.softmax(-1) * share_MBT[..., None]).sum(0)
    none_BTE = part_BTE == 0
    end_BTE = part_BTE.masked_fill(none_BTE, 1.0).log().masked_fill(none_BTE, -torch.inf) + log_h_BT[..., None]
    return with_ends(go_BTV, ends, end_BTE).log_softmax(-1)
