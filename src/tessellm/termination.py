"""Stopping as its own event: who may end the text, whatever rule decides the rest.

A member's stop set holds all of its end tokens. Its stop event has probability h_m = p_m(stop set); the members' stop
events are one event, although their end tokens differ. Except under `rule`, the inner rule sees that event as a single
token, and a policy decides its probability h:

    rule    nothing is changed: the inner rule sees end tokens as tokens                conservative
    owner   the h of the expert that owns the run; the rule's, where several speak     conservative
    any     the largest h_m among the trusted members                                  not conservative
    mean    the experts' mean h                                                         not conservative
    base    the base's h                                                                not conservative

A conservative policy keeps a conservative rule equal to Eq. 2 where at most one expert differs from the base. The
probability of stopping is shared out over the end tokens of the member that it came from. Imports torch alone.

Shapes: M members (0 is the base), B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

POLICIES = ("rule", "owner", "any", "mean", "base")
CONSERVATIVE = frozenset({"rule", "owner"})


def stop_sets(stops: Sequence[Sequence[int]], vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """True where a token ends a member's text: [M, V]."""
    stop_MV = torch.zeros(len(stops), vocabulary, dtype=torch.bool, device=device)
    for member, ids in enumerate(stops):
        stop_MV[member, list(ids)] = True
    return stop_MV


def stop_logp(logp_MBTV: Tensor, stop_MV: Tensor) -> Tensor:
    """log h_m: [M, B, T]."""
    return logp_MBTV.masked_fill(~stop_MV[:, None, None], -torch.inf).logsumexp(-1)


def as_event(logp_MBTV: Tensor, stop_MV: Tensor, event: int) -> Tensor:
    """Every member with its stop event on one token. Another member's end token is no continuation either: its mass
    is spread over the rest."""
    event_MBT = stop_logp(logp_MBTV, stop_MV)
    ends_V = stop_MV.any(0)
    go_MBTV = logp_MBTV.masked_fill(ends_V, -torch.inf)
    nothing_MBT1 = (go_MBTV == -torch.inf).all(-1, keepdim=True)  # all on end tokens: no opinion on the rest
    go_MBTV = torch.where(nothing_MBT1 & ~ends_V, 0.0, go_MBTV).log_softmax(-1)
    go_MBTV = go_MBTV + torch.log1p(-event_MBT.exp().clamp_max(1 - 1e-7))[..., None]
    go_MBTV[..., event] = event_MBT
    return go_MBTV.log_softmax(-1)


def most_divergent(event_MBT: Tensor) -> Tensor:
    """The expert whose stop event differs most from the base's: [B, T]."""
    stop, go = event_MBT, torch.log1p(-event_MBT.exp().clamp_max(1 - 1e-7))
    floor = -1e4
    stop, go = stop.clamp_min(floor), go.clamp_min(floor)
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

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown termination policy {self.policy!r}; known: {', '.join(POLICIES)}")
        if self.policy != "rule" and not any(self.stops):
            raise ValueError(f"the policy {self.policy!r} needs at least one end token; none of the members has one")

    @property
    def name(self) -> str:
        return str(self.rule.name)

    @property
    def window(self) -> int:
        return int(self.rule.window)

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        if self.policy == "rule":
            out: tuple[Tensor, Any] = self.rule(logp_MBTV, tokens_BT, mask_BT, state)
            return out
        logp_MBTV = logp_MBTV.to(torch.promote_types(logp_MBTV.dtype, torch.float32))
        stop_MV = stop_sets(self.stops, logp_MBTV.shape[-1], logp_MBTV.device)
        event = min(token for ids in self.stops for token in ids)
        seen_MBTV = as_event(logp_MBTV, stop_MV, event)
        heard_BT = torch.where(stop_MV.any(0)[tokens_BT], event, tokens_BT)
        trace = None
        if hasattr(self.rule, "explain"):
            logp_BTV, state, trace = self.rule.explain(seen_MBTV, heard_BT, mask_BT, state)
        else:
            logp_BTV, state = self.rule(seen_MBTV, heard_BT, mask_BT, state)
        event_MBT = seen_MBTV[..., event]
        log_h_BT, share_MBT = self.decide(event_MBT, logp_BTV[..., event], trace)
        return release(logp_MBTV, stop_MV, event, logp_BTV, log_h_BT, share_MBT), state

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


def release(
    logp_MBTV: Tensor, stop_MV: Tensor, event: int, logp_BTV: Tensor, log_h_BT: Tensor, share_MBT: Tensor
) -> Tensor:
    """h on the end tokens of the members that it came from, 1 − h on the rule's continuations."""
    go_BTV = logp_BTV.masked_fill(stop_MV.any(0), -torch.inf)
    total_BT1 = go_BTV.logsumexp(-1, keepdim=True)
    ended_BT1 = total_BT1 == -torch.inf
    log_h_BT1 = torch.where(ended_BT1, 0.0, log_h_BT[..., None])
    log_left_BT1 = torch.log1p(-log_h_BT1.exp().clamp_max(1 - 1e-7))
    go_BTV = torch.where(ended_BT1, -torch.inf, go_BTV - total_BT1 + log_left_BT1)
    own_MBTV = logp_MBTV.masked_fill(~stop_MV[:, None, None], -torch.inf)
    none_MBT1 = (own_MBTV == -torch.inf).all(-1, keepdim=True)
    end_V = stop_MV.any(0) & (torch.arange(stop_MV.shape[1], device=stop_MV.device) == event)
    fallback_V = torch.where(end_V, 0.0, -torch.inf).to(own_MBTV.dtype)
    own_MBTV = torch.where(none_MBT1, fallback_V, own_MBTV).log_softmax(-1)
    end_BTV = (own_MBTV.exp() * share_MBT[..., None]).sum(0).log() + log_h_BT1
    return torch.logaddexp(go_BTV, end_BTV).log_softmax(-1)
