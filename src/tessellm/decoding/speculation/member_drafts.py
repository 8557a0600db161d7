"""Drafts that members write: one that was named, or per row the one that the rule believes, while the others rest.

    MemberDrafter     lets one member decode by itself, on its own part of the cache, with the noise of the request
    BelievedDrafter   lets the member decode whose law the rule believes most; the others read what it wrote in one
                      pass, when it is verified

Verification leaves empty drafts behind, by whom the rule believes then. So members can go on writing before the host
has heard what came of their last drafts.

Shapes: B rows (slots with room for a draft).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...model import ComposedForCausalLM
from ...rules import working_dtype
from ..buffers import RowOrder, TokenBatch
from ..members.attention import SlotCache
from ..members.groups import make_group, member_logits
from ..passes import Workspace, choose_tokens
from ..requests import Request
from ..sampling import TokenChoice
from ..steps import DraftPass, Steps
from .drafts import Drafter
from .verification import Believed, DraftBuffers

Planned = tuple[int, int, int]  # a request's number, room for its draft, and who writes it


class MemberDrafter(Drafter):
    """Lets one member draft. Its keys and values of the drafts stay where they are: verification writes the same."""

    def __init__(
        self, model: ComposedForCausalLM, place: int, work: Workspace, drafts: DraftBuffers, name: str = "draft"
    ):
        self.work, self.drafts, self.place, self.name = work, drafts, place, name
        self.home = next(group for group in work.groups if place in group.members)
        self.group = self.home
        if len(self.home.members) > 1:
            cache = SlotCache(self.home.cache.slots, 1, self.home.cache.cells)
            self.group = make_group(model, (place,), cache)

    def look(self, steps: Steps, in_slot: Mapping[int, Request]) -> list[int]:
        return [0] * len(in_slot)

    def passes(self) -> dict[str, DraftPass]:
        """Name the pass that drafts, on the cache as it is now."""
        if self.group.cache is not self.home.cache and not self.group.cache.key_RHCD:
            self.group.cache.take_rows(self.home.cache, self.home.members.index(self.place))
        return {self.name: self.draft}

    def write(self, steps: Steps, in_slot: Mapping[int, Request], length: int, cells: int, choice: TokenChoice) -> None:
        rooms = {slot: request.room for slot, request in in_slot.items()}
        asked = {slot: (room, self.place) for slot, room in rooms.items() if room > 0}
        steps.put(self.drafts.plan_SX, self.drafts.planned(asked))
        self.write_own(steps, max(in_slot) + 1, min(length, max(rooms.values())), cells, choice)

    def write_own(self, steps: Steps, rows: int, length: int, cells: int, choice: TokenChoice) -> None:
        """Write the drafts that are this member's to write, token by token."""
        for name, run in self.passes().items():
            for _ in range(length):
                steps.run(name, run, rows, 1, cells, choice)

    def draft(self, rows: int, length: int, cells: int, choice: TokenChoice) -> None:
        """Add `length` tokens to the member's own drafts that have room, each from the one before; on the device."""
        drafts, slots, (at_B, order) = self.drafts, self.work.slots, self._drafting(rows)
        start_B = slots.position_S[at_B]
        room_B = torch.where(drafts.writer_S[at_B] == self.place, drafts.room_S[at_B], 0)
        for _ in range(length):
            done_B = drafts.done_S[at_B]
            real_B = (start_B >= 0) & (done_B < room_B)
            last_B = drafts.draft_SG[at_B, (done_B - 1).clamp_min(0)]
            token_B1 = torch.where(done_B > 0, last_B, slots.token_S[at_B]).clamp_min(0)[:, None]
            position_B1 = torch.where(real_B, start_B + done_B, -1)[:, None]
            batch = TokenBatch(token_B1, position_B1, at_B, cells, 1, order)
            (logits_B1V,) = member_logits([self.group], batch)
            said_BV = logits_B1V[:, -1]
            if choice is not TokenChoice.GREEDY:
                said_BV = said_BV.to(working_dtype(said_BV)).log_softmax(-1)
            token_B, _ = choose_tokens(slots, said_BV, at_B, start_B + done_B + 1, choice)
            column_B = done_B.clamp_max(drafts.draft_SG.shape[1] - 1)
            drafts.draft_SG[at_B, column_B] = torch.where(real_B, token_B, drafts.draft_SG[at_B, column_B])
            drafts.done_S[at_B] = done_B + real_B

    def _drafting(self, rows: int) -> tuple[Tensor, RowOrder]:
        """Choose the slots of a pass: its own with room on a CPU, where a row less is time saved; all where passes are
        captured, whatever the drafts are. There a row less saves next to nothing, since a pass reads weights."""
        index_B = self.work.slots.index_S[:rows]
        if index_B.device.type != "cpu":
            return index_B, RowOrder.FIRST_SLOTS
        at_B = index_B[(self.drafts.room_S[:rows] > 0) & (self.drafts.writer_S[:rows] == self.place)]
        return at_B, RowOrder.FIRST_SLOTS if len(at_B) == int(at_B[-1]) + 1 else RowOrder.ANY_SLOTS


class BelievedDrafter(Drafter):
    """Lets the member draft, per row, whose law is believed most; the others rest until the draft is verified.

    How often drafts are right is learnt by how sure the rule is. Where it believes Eq. 2, which takes all members, it
    is sure of none of them."""

    def __init__(self, model: ComposedForCausalLM, work: Workspace, drafts: DraftBuffers):
        self.model, self.work, self.drafts = model, work, drafts
        self.writer: dict[int, int] = {}  # by slot, whom the rule believed at the last look
        self._heard: dict[tuple[int, int], Believed] = {}  # by a request's number and its tokens, after the last pass
        self._planned: dict[int, Planned] = {}  # by slot, what the device goes on with
        self._begun: frozenset[int] = frozenset()  # members that wrote a token of the next drafts
        self._thrown_away = 0
        self._found_2S = torch.zeros_like(work.slots.index_S).repeat(2, 1)
        self._by_place: dict[int, MemberDrafter] = {}
        for place in range(len(model.members)) if model.device.type == "cuda" else ():  # to capture their passes
            self.by(place)

    def look(self, steps: Steps, in_slot: Mapping[int, Request]) -> list[int]:
        """See whom the rule believes; where the last verified draft told, the device is not asked."""
        heard = [self._heard.get((request.number, request.asked)) for request in in_slot.values()]
        found = [each for each in heard if each is not None]
        if len(found) < len(heard):
            found = self._ask(steps, in_slot)
        self.writer = {slot: member for slot, (member, _) in zip(in_slot, found, strict=True)}
        return [sure for _, sure in found]

    def _ask(self, steps: Steps, slots: Collection[int]) -> list[Believed]:
        """Ask the device whom the rule believes in slots."""
        rows, voice = max(slots) + 1, self.work.voice
        found = voice.rule.believed_members(self.work.states.read(voice, slice(rows)))
        self._found_2S[:, :rows] = torch.stack(found)
        members, sure = steps.get(self._found_2S)().tolist()
        return [(members[slot], sure[slot]) for slot in slots]

    def hear(
        self, in_slot: Mapping[int, Request], tokens: Sequence[Sequence[int]], believed: Sequence[Believed]
    ) -> None:
        came = list(zip(in_slot.items(), map(len, tokens), believed, strict=True))
        self._heard = {(request.number, request.asked + count): who for (_, request), count, who in came}
        self._planned = {
            slot: (request.number, request.room - count, member) for (slot, request), count, (member, _) in came
        }

    def forget(self) -> None:
        self._planned = {}
        self._take_up(())

    def in_vain(self) -> int:
        thrown_away, self._thrown_away = self._thrown_away, 0
        return thrown_away

    def passes(self) -> dict[str, DraftPass]:
        """Name the passes that draft, of every member that did."""
        return {name: run for drafter in self._by_place.values() for name, run in drafter.passes().items()}

    def by(self, place: int) -> MemberDrafter:
        """Make the drafter of one member, once."""
        if place not in self._by_place:
            self._by_place[place] = MemberDrafter(self.model, place, self.work, self.drafts, f"draft by {place}")
        return self._by_place[place]

    def write(self, steps: Steps, in_slot: Mapping[int, Request], length: int, cells: int, choice: TokenChoice) -> None:
        plans = {slot: (request.number, request.room, self.writer[slot]) for slot, request in in_slot.items()}
        new = [slot for slot, plan in plans.items() if self._planned.get(slot) != plan]
        if new:
            asked = {slot: (room, place) for slot, (_, room, place) in plans.items() if room > 0}
            steps.put(self.drafts.plan_SX, self.drafts.planned(asked), new if len(new) < len(plans) else None)
        begun = self._take_up(plans[slot][2] for slot in plans.keys() - new)
        self._planned = {}  # until the drafts are verified
        most: dict[int, int] = {}
        for _, room, place in plans.values():
            most[place] = max(room, most.get(place, 0))
        for place in sorted(most):
            self.by(place).write_own(
                steps, max(in_slot) + 1, min(length, most[place]) - (place in begun), cells, choice
            )

    def _take_up(self, places: Iterable[int]) -> frozenset[int]:
        """Find the members, of those whose drafts go on, that have begun; what others began is thrown away."""
        begun, self._begun = self._begun, frozenset()
        kept = begun.intersection(places)
        self._thrown_away += len(begun) - len(kept)
        return kept

    def begin_next(
        self, steps: Steps, in_slot: Mapping[int, Request], length: int, cells: int, choice: TokenChoice
    ) -> None:
        """Let whoever writes now write one token more: where all of a draft stands, and the same member is believed,
        it is the next draft's first."""
        going = {self.writer[slot] for slot, request in in_slot.items() if request.room > length + 1}
        for place in sorted(going):
            self.by(place).write_own(steps, max(in_slot) + 1, 1, cells, choice)
        self._begun = frozenset(going)
