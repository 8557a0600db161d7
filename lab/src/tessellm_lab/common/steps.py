"""How far a training came: what it logs, and the steps that it reached before its seconds were over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Steps:
    """What `stacked.train` reports to."""

    what: str
    planned: int
    log: Callable[[str], None]
    reached: int = 0

    def __call__(self, step: int, loss_E: Tensor) -> None:
        self.reached = step + 1
        losses = ", ".join(f"{loss:.4f}" for loss in loss_E.tolist())
        self.log(f"{self.what}: step {self.reached} of {self.planned}, loss {losses}")

    def kept(self) -> dict[str, Any]:
        """Return it as a result file keeps it."""
        return {"reached": self.reached, "planned": self.planned}
