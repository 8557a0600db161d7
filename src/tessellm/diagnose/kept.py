"""What all members said of texts that were read, kept as far as memory allows, so that other rules can combine it
without reading again. Knows tensors, no rules and no findings.

Shapes: M members, B texts of a batch, T time, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.memory import free_bytes
from ..rules import Explanation

MOST_BYTES = 1 << 31
SHARE = 0.25  # of the free memory, at most


class KeptRows:
    """Log-probabilities of texts, in blocks [M, B, T, V], batch by batch: an observer of the model that reads them. The
    first batch that finds no room and all later ones are not kept: their lists are empty."""

    def __init__(self, device: torch.device, most: int = MOST_BYTES):
        self.batches: list[list[Tensor]] = []
        self._left = min(most, int(SHARE * free_bytes(device)))

    def begin(self) -> KeptRows:
        """Begin the next batch."""
        self.batches.append([])
        return self

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, composed_BTV: Tensor, why: Explanation) -> None:
        self._left -= logp_MBTV.nbytes
        if self._left < 0:
            self.batches[-1].clear()
        else:
            self.batches[-1].append(logp_MBTV)
