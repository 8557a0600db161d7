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
probability of stopping is shared out over the end tokens of the member that it came from. Knows no
model; `Stopping` runs a rule between `as_event` and `release`.

Shapes: M members (0 is the base), B batch, T time, V vocabulary, E end tokens of any member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessellm.rules import BaseRule, Explained
from tessellm.rules.equation import working_dtype

POLICIES = ("rule", "owner", "any", "mean", "base")
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


@lru_cache(maxsize=64)
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
    return (go_MBTV + shift_MBT[..., None]).index_copy_(-1, ends.token_E, columns_MBTE), log_h_MBT


def without_ends(logp_BTV: Tensor, ends: Ends) -> Tensor:
    """End tokens impossible, all else as it is."""
    return logp_BTV.index_fill(-1, ends.token_E, -torch.inf)


def log_left(log_h: Tensor) -> Tensor:
    """log(1 − h), finite."""
    return torch.log1p(-log_h.exp().clamp_max(1 - TINY))


def most_divergent(event_MBT: Tensor) -> Tensor:
    """The expert whose stop event differs most from the base's: [B, T]."""
    stop, go = event_MBT.clamp_min(-1e4), log_left(event_MBT)
    divergence_KBT = stop[1:].exp() * (stop[1:] - stop[0]) + go[1:].exp() * (go[1:] - go[0])
    return divergence_KBT.argmax(0) + 1


def decide(policy: str, event_MBT: Tensor, spoken_BT: Tensor, told: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """log h, and how much of it comes from each member (sums to one over members); `told`: by the rule."""
    index_M = torch.arange(len(event_MBT), device=event_MBT.device)[:, None, None]
    if policy == "mean":
        return _mean(event_MBT, index_M)
    if policy == "owner":
        owner_BT = told["run_owner_BT"] if "run_owner_BT" in told else most_divergent(event_MBT)
        several_BT = owner_BT == 0
        chosen_BT = torch.where(several_BT, event_MBT.argmax(0), owner_BT)
        log_h_BT = torch.where(several_BT, spoken_BT, event_MBT.gather(0, chosen_BT[None])[0])
    else:
        chosen_BT = _loudest_trusted(event_MBT, told) if policy == "any" else torch.zeros_like(event_MBT[0]).long()
        log_h_BT = event_MBT.gather(0, chosen_BT[None])[0]
    return log_h_BT, (index_M == chosen_BT).to(event_MBT.dtype)


def _mean(event_MBT: Tensor, index_M: Tensor) -> tuple[Tensor, Tensor]:
    """The experts' mean h, and each one's part of it."""
    share_MBT = event_MBT.masked_fill(index_M == 0, -torch.inf)
    log_h_BT = share_MBT.logsumexp(0) - torch.tensor(len(event_MBT) - 1.0).log().item()
    safe_MBT = share_MBT.masked_fill(share_MBT.amax(0) == -torch.inf, 0.0)
    return log_h_BT, safe_MBT.softmax(0)


def _loudest_trusted(event_MBT: Tensor, told: Mapping[str, Tensor]) -> Tensor:
    """The member that wants to stop most, among those that the rule trusts: all, where it does not say."""
    if "trusted_BTM" in told:
        event_MBT = event_MBT.masked_fill(~told["trusted_BTM"].permute(2, 0, 1), -torch.inf)
    return event_MBT.argmax(0)


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
    return go_BTV.index_copy_(-1, ends.token_E, end_BTE).log_softmax(-1)


@dataclass(frozen=True)
class Stopping(BaseRule):
    """A rule whose stopping a policy decides: under its own name, for members with these end tokens. Where no member
    has one, end tokens are left to the rule."""

    rule: BaseRule
    policy: str
    stops: tuple[tuple[int, ...], ...] = ()
    default: str = "rule"  # the policy that a description leaves out
    name: str = field(init=False, repr=False, compare=False)
    stateful: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.rule.name)
        object.__setattr__(self, "stateful", self.rule.stateful)
        check_policy(self.policy)

    def with_ends(self, end_ids: Sequence[Sequence[int]]) -> Stopping:
        return replace(self, stops=tuple(tuple(ids) for ids in end_ids))

    def describe(self) -> dict[str, Any]:
        policy = {} if self.policy == self.default else {"termination": self.policy}
        return self.rule.describe() | policy

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        logp_BTV, state, _ = self.explain(logp_MBTV, tokens_BT, mask_BT, state)
        return logp_BTV, state

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> Explained:
        """Run the rule on what it hears, all ways to stop as one event, and say why it said that."""
        if self.policy == "rule" or not any(self.stops):
            return self.rule.explain(logp_MBTV, tokens_BT, mask_BT, state)
        logp_MBTV, ends = logp_MBTV.to(working_dtype(logp_MBTV)), ends_of(self.stops, logp_MBTV.device)
        is_end_BT = (tokens_BT[..., None] == ends.token_E).any(-1)
        heard_BT = torch.where(is_end_BT, ends.token_E[ends.event], tokens_BT)
        seen_MBTV, event_MBT = as_event(logp_MBTV, ends)
        logp_BTV, state, why = self.rule.explain(seen_MBTV, heard_BT, mask_BT, state)
        spoken_BT = logp_BTV.index_select(-1, ends.token_E[:1])[..., 0]
        log_h_BT, share_MBT = decide(self.policy, event_MBT, spoken_BT, why.more)
        return release(logp_MBTV, ends, logp_BTV, log_h_BT, share_MBT), state, why
