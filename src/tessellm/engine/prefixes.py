"""Which tokens each KV row holds, so that a prompt which begins like another is not read twice.

A KV row belongs to a slot and a member. A row holds exactly what was written for that member, in use or not: members
that were not active have rows of their own age. The base's rows also keep the tokens' energies, so that a prompt can be
routed without reading the part that a row holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .requests import Branch, Request

WORTH = 16  # a shared beginning of fewer tokens is read again


@dataclass
class Held:
    """A row's tokens; how many of them have energies, and these."""

    tokens: list[int] = field(default_factory=list)
    energy_TK: Tensor | None = None

    @property
    def routed(self) -> int:
        return 0 if self.energy_TK is None else len(self.energy_TK)


Copy = Callable[[int, int, int, int], None]  # a source slot, a target slot, a member, tokens


class Prefixes:
    """Tokens in each KV row. A prompt's last token is always read: what follows it is wanted."""

    def __init__(self, slots: int, on: bool = True):
        """`on`: whether caches can be copied; else every prompt is read from its beginning."""
        self.rows: dict[int, list[Held]] = {}  # by member, then slot
        self.slots, self.on, self.reused_tokens = slots, on, 0

    def held(self, slot: int, member: int) -> Held:
        return self.rows.setdefault(member, [Held() for _ in range(self.slots)])[slot]

    def wrote(self, slot: int, member: int, tokens: Sequence[int]) -> None:
        """Note what a row holds now. Energies of tokens that stay are kept."""
        held = self.held(slot, member)
        held.tokens = list(tokens)
        if held.energy_TK is not None:
            held.energy_TK = held.energy_TK[: len(tokens)]

    def note_energies(self, slot: int, member: int, start: int, energy_TK: Tensor) -> None:
        """Keep the energies of a row's tokens from `start` on, in half precision."""
        held, new_TK = self.held(slot, member), energy_TK.half()
        if start == 0:
            held.energy_TK = new_TK
        elif held.routed == start and held.energy_TK is not None:
            held.energy_TK = torch.cat([held.energy_TK, new_TK])

    def forget(self) -> None:
        """Read every prompt anew. All slots must be free."""
        self.rows = {}

    def moved(self, source: int, target: int) -> None:
        """Note that a slot's rows were copied into another's."""
        for rows in self.rows.values():
            rows[target] = Held(list(rows[source].tokens), rows[source].energy_TK)

    def shared(self, request: Request, held: Held, routed: bool = False) -> int:
        """Return the number of tokens with which a prompt begins as a row does, if using them saves enough."""
        if not self.on or len(request.prompt) <= WORTH:
            return 0
        usable = min(len(request.prompt) - 1, len(held.tokens), held.routed if routed else len(held.tokens))
        common = common_prefix(request.prompt, held.tokens, usable)
        return common if common >= WORTH else 0

    def reuse(self, request: Request, branch: Branch, slot: int, member: int, copy: Copy) -> None:
        """Bring a shared beginning into a branch's row."""
        routed = request.components is None
        self.held(slot, member)
        saved, _, source = max(
            (self.shared(request, held, routed), n == slot, n) for n, held in enumerate(self.rows[member])
        )
        if saved and source != slot:
            copy(source, slot, member, saved)
        energy_TK = self.held(source, member).energy_TK
        self.rows[member][slot] = Held(request.prompt[:saved], None if energy_TK is None else energy_TK[:saved])
        if routed and energy_TK is not None and saved:
            branch.energies.append(energy_TK[:saved].float())
        branch.computed = saved
        self.reused_tokens += saved

    def waits(self, request: Request, in_slot: Sequence[Request | None]) -> bool:
        """Whether another request is reading what this one begins with: then it is better to wait for it."""
        if any(branch.computed for branch in request.branches.values()):
            return False
        for slot, other in enumerate(in_slot):
            if other is None or other is request or other.tokens or other.scheduled:
                continue
            for member in request.branches.keys() & other.branches.keys():
                ahead = other.branches[member].computed
                if (ahead, -other.number) > (0, -request.number):
                    held = self.held(slot, member)
                    if self.shared(request, Held(other.prompt, held.energy_TK)) > min(ahead, len(held.tokens)):
                        return True
        return False


def common_prefix(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Return how many tokens two texts begin with alike, `most` at most."""
    pairs = zip(range(most), one, other, strict=False)
    return next((place for place, a, b in pairs if a != b), most)
