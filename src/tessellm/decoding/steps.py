"""Steps: passes over the slots as the device runs them best. On a CPU: just run. On a GPU: captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .state import SlotState
from .voices import Special

if TYPE_CHECKING:
    from .speculation.drafts import Alone
    from .speculation.verification import Verification

Written = tuple[list[list[int]], list[list[float]]]  # tokens of each request, and their log-probabilities


class Steps:
    """Runs prefill and decoding passes; fetches what they chose."""

    def __init__(self, state: SlotState, context: int):
        self.state, self.context = state, context
        self.lag = 0  # passes that may be on their way while the next is prepared
        self.few_shapes = False  # rather some rows more than another number of rows
        self.prepared_seconds = 0.0  # spent on compiling and capturing
        self.graph_seconds: dict[tuple[Any, ...], float] = {}  # the device's for each captured pass, when it was new
        self.busy_seconds = 0.0  # the device's, by those, since somebody set it to 0

    def prefill(
        self,
        slots: Sequence[int],
        token_BT: Tensor,
        position_BT: Tensor,
        how: str | None,
        special: Special | None = None,
    ) -> None:
        stop, start = int(position_BT.max()) + 1, int(position_BT[0, 0])
        alike = start >= 0 and bool((position_BT == torch.arange(start, start + position_BT.shape[1])).all())
        slot_B, token_BT, position_BT = map(self.on_device, (torch.tensor(slots), token_BT, position_BT))
        self.state.prefill(slot_B, token_BT, position_BT, stop, how, special, start if alike else None)

    def ready_prompts(self, lengths: Sequence[int], how: str) -> None:
        """Have passes over the ends of prompts of these lengths ready, after the first text, which makes the caches."""

    def decode(self, rows: int, cells: int, how: str, special: Special | None = None) -> None:
        self.state.decode(rows, self._cells(cells), how, special)

    def draft(self, member: Alone, rows: int, length: int, cells: int, how: str) -> None:
        member.draft(rows, length, self._cells(cells), how)

    def verify(self, drafts: Verification, rows: int, length: int, cells: int, how: str) -> None:
        drafts.verify(rows, length, self._cells(cells), how)

    def ready(
        self, drafts: Verification, member: Alone | None, lengths: Sequence[int], rows: int, cells: int, how: str
    ) -> dict[int, float]:
        """Have passes of all these lengths ready; the device's seconds for each and for a step, where it tells."""
        return {}

    def put(self, into: Tensor, values: Sequence[Any]) -> None:
        """Values from the host into a buffer."""
        into.copy_(torch.tensor(values))

    def get(self, buffer: Tensor) -> list[Any]:
        """What a buffer holds when all passes are over."""
        found: list[Any] = buffer.tolist()
        return found

    def fetch(self, slots: Sequence[int]) -> Callable[[], Written]:
        """The tokens just chosen in these slots and their log-probabilities, when asked for."""
        tokens_B1, logprobs_B1 = self.state.token_S[slots, None], self.state.logprob_S[slots, None]
        return lambda: (tokens_B1.tolist(), logprobs_B1.tolist())

    def worth_moving(self, rows: int, needed: int) -> bool:
        return needed < rows

    def _cells(self, needed: int) -> int:
        return min(self.context, needed)

    def on_device(self, part: Tensor) -> Tensor:
        return part.to(self.state.device)


def make_steps(state: SlotState, context: int, compiled: bool) -> Steps:
    """The steps for the device that the slots are on."""
    if state.device.type != "cuda":
        return Steps(state, context)
    from .cuda.graphs import GraphSteps

    return GraphSteps(state, context, compiled)
