"""Steps: passes over the slots as the device runs them best. On a CPU: just run. On a GPU: captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .buffers import PromptRead, StepResult, TokenBatch
from .passes import Workspace, decode_step, prefill
from .sampling import TokenChoice
from .voices import SpecialRows

DecodePass = Callable[..., None]  # of rows, cells, choice and, if there are some, special rows
DraftPass = Callable[[int, int, int, TokenChoice], None]  # of rows, length, cells, choice


class Steps:
    """Runs passes; fetches what they chose."""

    lag = 0  # passes that may be on their way while the next is prepared

    def __init__(self, work: Workspace, context: int):
        self.work, self.context = work, context
        self.decode: DecodePass = partial(decode_step, work)
        self.prepared_seconds = 0.0  # spent on compiling and capturing
        self.captures = 0
        self.few_shapes = False  # True: rather some rows more than another number of rows
        self.sealed = False  # True: all that requests can meet was prepared

    def prefill(
        self,
        slots: Sequence[int],
        token_BT: Tensor,
        position_BT: Tensor,
        choice: TokenChoice,
        special: SpecialRows | None = None,
        reads: PromptRead = PromptRead.BEGIN,
        rows: int = 1,
    ) -> None:
        """Feed tokens of prompts, padded on the left, given on the host; the rule reads the last `rows` of them."""
        stop, start, width = int(position_BT.max()) + 1, int(position_BT[0, 0]), position_BT.shape[1]
        alike = start >= 0 and bool((position_BT == torch.arange(start, start + width)).all())
        slot_B, token_BT, position_BT = map(self.on_device, (torch.tensor(slots), token_BT, position_BT))
        keep = 1 if reads is PromptRead.NOTHING else rows
        batch = TokenBatch(token_BT, position_BT, slot_B, stop, keep, start=start if alike else None, reads=reads)
        prefill(self.work, batch, choice, special)

    def ready_prompts(self, lengths: Sequence[int], choice: TokenChoice) -> None:
        """Prepare passes over the ends of prompts of these lengths, after the first text, which makes the caches."""

    def planned(self) -> Iterator[Callable[[], object]]:
        """Plan what requests can meet, after the first text; each call prepares one pass."""
        return iter(())

    def prepared_sizes(self) -> list[tuple[int, int]]:
        """List the rows and cells of passes that do for all others."""
        return []

    def piece_seconds(self) -> dict[int, float]:
        """Return the device's seconds for pieces of prompts, by their tokens, where it tells."""
        return {}

    def run(self, name: str, run: DraftPass, rows: int, length: int, cells: int, choice: TokenChoice) -> None:
        """Run a pass that writes or verifies drafts."""
        run(rows, length, self.cells(cells), choice)

    def ready(
        self,
        drafting: Mapping[str, DraftPass],
        verify: DraftPass,
        empty: Callable[[], None],
        lengths: Sequence[int],
        rows: int,
        cells: int,
        choice: TokenChoice,
        timed: bool = True,
    ) -> dict[int, float]:
        """Prepare passes that draft, token by token, each in another way, and verify drafts of these lengths, on
        `empty` drafts; if `timed`, the device's seconds per length by the slowest way (0: a step), where it tells."""
        return {}

    def put(self, into: Tensor, values: Sequence[Any] | Tensor, rows: Sequence[int] | None = None) -> None:
        """Copy values from the host into a buffer, or into some rows of it, where `values` has the same place."""
        at = slice(None) if rows is None else list(rows)
        into[at] = torch.as_tensor(values)[at]

    def get(self, buffer: Tensor) -> Callable[[], Tensor]:
        """Copy a buffer to the host as passes so far leave it, to be read before the next such copy; the copy is waited
        for when it is called."""
        return lambda: buffer

    def fetch(self, slots: Sequence[int]) -> Callable[[], StepResult]:
        """Take what was just chosen in these slots; the copy to the host is waited for when it is called."""
        chosen = self.work.slots
        token_B1, logprob_B1 = chosen.token_S[slots, None], chosen.logprob_S[slots, None]
        broken_BM = chosen.broken_SM[slots]
        return lambda: StepResult(token_B1.tolist(), logprob_B1.tolist(), broken_BM.tolist())

    def worth_moving(self, rows: int, needed: int) -> bool:
        """Whether a step over the needed rows is faster than one over so many."""
        return needed < rows

    def rows(self, needed: int) -> int:
        """Count the rows that a pass runs which needs so many."""
        return needed

    def cells(self, needed: int) -> int:
        """Count the cells that a pass reads which needs so many."""
        return min(self.context, needed)

    def on_device(self, part: Tensor) -> Tensor:
        return part.to(self.work.slots.token_S.device)
