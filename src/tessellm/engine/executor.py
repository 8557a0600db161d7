"""Executor: runs forwards over slots, and chooses tokens, as a device does it best.

BranchExecutor   (branch_executor.py) runs the active members of each sequence: on a CPU, and members as they are
SlotExecutor     (cuda/) runs all members of each slot, by graphs that were captured once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .members.groups import Group
from .prefill_controller import Chunk
from .requests import Request

Views = dict[Request, list[dict[str, Any]]]  # what observers returned, per token


@dataclass(frozen=True)
class StepResult:
    """What a forward chose, on the host: per request its tokens, their log-probabilities, and members with NaN."""

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    nonfinite: Sequence[Sequence[bool]]
    views: Views = field(default_factory=dict)


@dataclass(frozen=True)
class Pending:
    """A forward whose results may still be on their way to the host."""

    requests: Sequence[Request]
    slots: Sequence[int]  # that it wrote
    scheduled: Sequence[int]  # new tokens of each request
    fetch: Callable[[], StepResult]


class Executor:
    """What the engine needs of one. A plain executor has nothing to prepare, and moves nothing."""

    groups: Sequence[Group]
    in_flight = 0  # forwards that may be on their way while the next is prepared
    moves = False  # whether sequences move into the first slots, so that a step has fewer rows
    padded = False  # whether rows of a prefill are padded to the longest
    joint = False  # whether a forward over prompts decodes running requests, too
    few_shapes = False  # rather some rows more than another number of rows
    takes_forms = True  # whether texts can be held to a form
    sealed = False  # all that requests can meet was prepared
    captures = 0
    prepared_seconds = 0.0  # spent on compiling and capturing

    def enter(self, slot: int, request: Request) -> None:
        """Give a slot to a request: its branches, its sampling parameters."""
        raise NotImplementedError

    def leave(self, slot: int) -> None:
        """Note that nobody has the slot."""

    def copy(self, source: int, target: int, member: int, kv_len: int) -> None:
        """Copy the beginning of a member's KV row into another slot's."""
        raise NotImplementedError

    def clear(self, slot: int) -> None:
        """Make a slot's cells finite, where a forward multiplies cells that it masks."""

    def prefill(self, chunk: Chunk, running: Sequence[Request] = (), slots: Sequence[int] = ()) -> Pending:
        """Read parts of prompts; choose the first tokens of those that all branches have read. Where it is joint, add a
        token to every running sequence in the same forward."""
        raise NotImplementedError

    def decode(self, running: Sequence[Request], slots: Sequence[int]) -> Pending:
        """Add a token to every sequence."""
        raise NotImplementedError

    def verify(
        self, running: Sequence[Request], slots: Sequence[int], drafts: Sequence[Sequence[int]], length: int
    ) -> StepResult:
        """Add between one and `length` + 1 tokens to every sequence: those of its draft that it would write itself, and
        one more. None where the draft made a member's row nonfinite."""
        raise NotImplementedError

    def rows(self, running: Sequence[Request], slots: Sequence[int]) -> int:
        """Return the number of rows that a step runs."""
        raise NotImplementedError

    def move(self, source: int, target: int, kv_len: int) -> None:
        """Move all that is known of a slot into another."""
        raise NotImplementedError

    def worth_moving(self, rows: int, needed: int) -> bool:
        """Return whether a step over the needed slots is faster than one over so many."""
        return False

    def ready_drafts(
        self, lengths: Sequence[int], running: Sequence[Request], slots: Sequence[int]
    ) -> Mapping[int, float]:
        """Prepare forwards over drafts of these lengths; the device's seconds per length (0: a step) where it tells."""
        return {}

    def count_tokens(self) -> None:
        """Make room for what penalties count, before anything is captured."""

    def planned(self) -> Iterator[Callable[[], object]]:
        """Plan what requests can meet, after the first text; each call prepares one forward."""
        return iter(())

    def planned_drafts(self, lengths: Sequence[int]) -> Iterator[Callable[[], object]]:
        """Plan forwards with drafts of these lengths likewise."""
        return iter(())

    def prepared_sizes(self) -> list[tuple[int, int]]:
        """List the rows and cells of forwards that do for all others."""
        return []

    def chunk_seconds(self) -> dict[int, float]:
        """Return the device's seconds for chunks of prompts, by their tokens, where it tells."""
        return {}


def row_bucket(needed: int, few: bool = False) -> int:
    """Round rows up to a power of two; to `few` numbers: 1, 4, 16, and powers of two from there on."""
    power = (needed - 1).bit_length()
    return 1 << (power + power % 2 if few and power < 4 else power)
