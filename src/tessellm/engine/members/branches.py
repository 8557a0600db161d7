"""Branches: one member reading one sequence. A forward over branches runs only the members that are meant: tokens of
all branches lie one behind another, sorted by member, so that members that share the base's weights share its products.

Shapes: N tokens of a forward, T of a branch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...rules import normalised
from .attention import BranchPass, TokenSpan
from .groups import Group
from .segments import Segment


@dataclass(frozen=True)
class BranchTokens:
    """The next tokens of one branch."""

    member: int  # its place in the composition
    slot: int
    tokens: Sequence[int]
    start: int  # position of the first
    keep: int = 1  # last tokens behind which log-probabilities are wanted


@torch.inference_mode()
def branch_logp(groups: Sequence[Group], branches: Sequence[BranchTokens]) -> list[Tensor]:
    """Return log-probabilities over the shared vocabulary behind the last tokens of each branch: [keep, V] each."""
    found: dict[int, Tensor] = {}
    for group in groups:
        places = [n for n, branch in enumerate(branches) if branch.member in group.members]
        places.sort(key=lambda n: (branches[n].member, branches[n].slot))
        if places:
            found |= zip(places, _group_logp(group, [branches[n] for n in places]), strict=True)
    return [found[n] for n in range(len(branches))]


def _group_logp(group: Group, branches: Sequence[BranchTokens]) -> list[Tensor]:
    """Run a group's module over branches that are sorted by member."""
    device = group.module.device
    segments: list[Segment] = []
    heads: list[Segment] = []
    spans: list[TokenSpan] = []
    kept: list[int] = []
    end = 0
    for branch in branches:
        place, begin, end = group.members.index(branch.member), end, end + len(branch.tokens)
        spans.append(TokenSpan(group.cache.row(branch.slot, place), begin, end, branch.start))
        kept += range(end - branch.keep, end)
        _extend(segments, place, end - begin)
        _extend(heads, place, branch.keep)
    if _is_step(group, branches):
        tokens_N = torch.tensor([branch.tokens[0] for branch in branches])
        positions, kv_rows = [branch.start for branch in branches], [span.kv_row for span in spans]
        return _split(group, branches, group.decoder(tokens_N, positions, kv_rows, segments))
    group.segments.set(segments, heads)
    tokens_1N = torch.tensor([[token for branch in branches for token in branch.tokens]], device=device)
    if not group.same_ids:
        tokens_1N = torch.cat([group.alignments[m].to_member(tokens_1N[:, a:b]) for m, a, b in segments], 1)
    positions = [position for b in branches for position in range(b.start, b.start + len(b.tokens))]
    rows_pass = BranchPass(group.cache, spans)
    output = group.module(
        input_ids=tokens_1N,
        position_ids=torch.tensor([positions], device=device),
        past_key_values=rows_pass,
        use_cache=True,
        logits_to_keep=torch.tensor(kept, dtype=torch.long, device=device),
        rows_pass=rows_pass,
    )
    return _split(group, branches, output.logits[0]) if kept else [output.logits[0]] * len(branches)


def _extend(segments: list[Segment], member: int, tokens: int) -> None:
    """Add a member's tokens to the last segment, if that is the member's, or behind it."""
    end = segments[-1].end if segments else 0
    if segments and segments[-1].member == member:
        segments[-1] = segments[-1]._replace(end=end + tokens)
    else:
        segments.append(Segment(member, end, end + tokens))


def _is_step(group: Group, branches: Sequence[BranchTokens]) -> bool:
    """Whether a forward is a decode step that the group has a decoder for. The first forward makes the cache."""
    ready = group.decoder is not None and not group.tapped and group.same_ids and bool(group.cache.key_RHCD)
    return ready and all(len(branch.tokens) == branch.keep == 1 for branch in branches)


def _split(group: Group, branches: Sequence[BranchTokens], logits_NV: Tensor) -> list[Tensor]:
    """Normalise the logits over the shared vocabulary, and share them out."""
    counts = [branch.keep for branch in branches]
    if group.same_ids:
        return list(normalised(logits_NV[:, : group.alignments[0].size]).split(counts))
    rows: Any = zip(branches, logits_NV.split(counts), strict=True)
    aligned = [group.alignments[group.members.index(b.member)].to_composed(own_TV) for b, own_TV in rows]
    return list(normalised(torch.cat(aligned)).split(counts))
