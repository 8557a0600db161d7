"""Speculation: drafts that all active members verify in one forward, so that it brings several tokens instead of one.

engine = Engine(model, speculation=Speculation("lookup"))          # or "none"
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import EngineError

__all__ = ["Speculation"]
LENGTHS = (1, 2, 4, 8)  # of drafts; few, since each may be captured for itself
LENGTHS_ON_GPU = (3, 7)  # a forward has one token more: it fills the blocks of rows that kernels compute anyway
LONGEST = 8


@dataclass(frozen=True)
class Speculation:
    """Where drafts come from: `lookup`, what followed the last time that the text ended as it does now; or `none`."""

    draft: str = "lookup"

    def __post_init__(self) -> None:
        if self.draft not in ("lookup", "none"):
            raise EngineError(f"drafts come from 'lookup' or 'none'; got {self.draft!r}")

    @property
    def drafts(self) -> bool:
        return self.draft == "lookup"
