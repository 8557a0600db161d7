"""Branches: work of which no part needs another's results, such as each member's product, side by side in a graph.

One member's product of a short prompt keeps a fifth of an H200 busy. Captured on streams of their own, those of all
members run at the same time. Outside of a graph the host cannot start them fast enough for that to matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def side_by_side(device: torch.device, work: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """What each returns. While a graph is captured they are branches of it; otherwise they are run one by one.

    Every branch begins after all that was started here before, and what follows begins after all branches: so memory
    that a branch gives back is taken again only by work that comes later in the graph, too.
    """
    if device.type != "cuda" or len(work) < 2 or not torch.cuda.is_current_stream_capturing():
        return [each() for each in work]
    here, branches = torch.cuda.current_stream(device), _branches(device, len(work) - 1)
    found = []
    for stream, each in zip(branches, work[1:], strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found.append(each())
    found.insert(0, work[0]())
    for stream in branches:
        here.wait_stream(stream)
    return found


def _branches(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    streams = _streams.setdefault(device, [])
    streams += [torch.cuda.Stream(device) for _ in range(count - len(streams))]
    return streams[:count]
