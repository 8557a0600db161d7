"""Stopping as its own event, over the whole vocabulary: slow and obvious. The fast form must equal it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
