"""Write drafts: from the text itself, or by one member alone. A draft is a guess; verification decides.

    LookupDrafter   takes what followed the last time that the text ended as it does now, or what comes next in the
                    passage that it is copying; costs nothing
    MemberDrafter   lets one member decode by itself, on its own part of the cache, with the noise of the request

Each says what kind of draft it has for a request, so that the acceptance rate is learnt per kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from ...model import ComposedForCausalLM
from ...rules import working_dtype
from ..members.groups import make_group
from ..passes import Workspace, choose_tokens
from ..requests import Request
from ..sampling import TokenChoice
from ..slots import RowOrder, SlotCache, TokenBatch
from ..steps import Steps
from .pace import AcceptanceCount
from .verification import DraftBuffers

LONGEST_MATCH = 4  # tokens at the end of the text that are looked for
SHORTEST_COPY = 2  # a match of this many tokens is taken for the beginning of a copy
MOST_MISSES = 2  # tokens in a row that a copy may change
KEEP_CHANGES = 0.9  # weight of earlier changes, made again or not, after each later one
MOST_PLACES = 64  # latest places of a pair of tokens that are compared: more would make some texts' time quadratic


class Drafter(Protocol):
    """Writes drafts into DraftBuffers."""

    def read(self, requests: Sequence[Request]) -> None:
        """Read prompts while the device reads them and the host waits."""

    def kind(self, request: Request) -> int | None:
        """Name the kind of draft that there is for a request; None: there is none."""

    def first(self, request: Request) -> int | None:
        """Look up the first token of a request's draft; None where that takes work."""

    def write(self, steps: Steps, in_slot: Mapping[int, Request], length: int, cells: int, choice: TokenChoice) -> None:
        """Write drafts of up to `length` tokens for the requests in slots."""


class LookupText:
    """A text that grows, with an index of where each token and pair of tokens last had a successor, and the place that
    the text is copying from. A copy that changes a token goes on behind that token, which no run of tokens would find,
    and is expected to make the same change again (names that are replaced, letters that are exchanged), as long as
    copies mostly do: `repeated` counts how often they did, over all texts that share it."""

    def __init__(self, repeated: AcceptanceCount | None = None) -> None:
        self.repeated = repeated or AcceptanceCount(1.0, 1.0)
        self.tokens: list[int] = []
        self._after: dict[int, int] = {}  # token → the last place behind it
        self._after_pair: dict[tuple[int, int], int] = {}
        self._before: list[int] = []  # place behind a pair → the earlier such place; −1: none
        self._match = (0, 0)  # tokens of the text's end that occur earlier, and the place behind them there
        self._source: int | None = None  # the place that comes next, if the text goes on copying
        self._misses = 0  # tokens in a row that differ from the copied passage
        self._changes: dict[int, int] = {}  # token of a copied passage → what the copy wrote in its place last time
        self._unsure: list[tuple[int, int]] = []  # changes among the last tokens: kept if the copy goes on behind them

    def grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._note_end()
            self._copy(token)
            self.tokens.append(token)
            if self._source is None or self._misses:
                self._match = size, start = self._longest_match()
                if (size >= SHORTEST_COPY and self._source is None) or size == LONGEST_MATCH:
                    self._source, self._misses, self._unsure = start, 0, []

    def _note_end(self) -> None:
        """Index the text's end, which has a successor now."""
        end, before = len(self.tokens), -1
        if end:
            self._after[self.tokens[-1]] = end
        if end > 1:
            pair = self.tokens[-2], self.tokens[-1]
            before, self._after_pair[pair] = self._after_pair.get(pair, -1), end
        self._before.append(before)

    def _copy(self, token: int) -> None:
        if self._source is None:
            return
        source = self.tokens[self._source]
        change = self._changes.get(source, source)
        if change != source:
            self.repeated.add(token == change, 1, KEEP_CHANGES)
        if token in (source, change):
            self._changes.update([*self._unsure, (source, token)])
            self._misses, self._unsure = 0, []
        else:
            self._misses += 1
            self._unsure.append((source, token))
        self._source = self._source + 1 if self._misses <= MOST_MISSES else None

    def _longest_match(self) -> tuple[int, int]:
        """Find the longest end of the text that occurs earlier, at its latest place."""
        tokens, best = self.tokens, (0, 0)
        place = self._after_pair.get((tokens[-2], tokens[-1]), -1) if len(tokens) > 1 else -1
        if place < 0:
            return (1, self._after[tokens[-1]]) if tokens[-1] in self._after else best
        for _ in range(MOST_PLACES):
            size = 2
            while size < min(place, LONGEST_MATCH) and tokens[place - size - 1] == tokens[-size - 1]:
                size += 1
            if size > best[0]:
                best = size, place
            place = self._before[place]
            if size == LONGEST_MATCH or place < 0:
                break
        return best

    def match(self) -> tuple[int, int]:
        """Name the kind of draft that there is, and the place where it begins. 0: none; −1, −2, …: the passage being
        copied, after none, one, … changed tokens; else the number of tokens that match."""
        return self._match if self._source is None else (-1 - self._misses, self._source)

    def follow(self, start: int, length: int) -> list[int]:
        """Take the tokens from a place on, changed as the copy changes them; past the text's end it repeats itself."""
        period = len(self.tokens) - start
        tokens = self.tokens[start : start + length]
        if length > period:
            tokens = [tokens[i % period] for i in range(length)]
        if self._source is None or 2 * self.repeated.right < self.repeated.judged:
            return tokens
        return [self._changes.get(token, token) for token in tokens]


class LookupDrafter:
    """Drafts from the request's own prompt and what it has written."""

    def __init__(self, drafts: DraftBuffers) -> None:
        self.drafts, self._repeated = drafts, AcceptanceCount(1.0, 1.0)
        self._texts: WeakKeyDictionary[Request, LookupText] = WeakKeyDictionary()

    def read(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.text(request)

    def text(self, request: Request) -> LookupText:
        """Bring the request's text up to date."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = LookupText(self._repeated)
            text.grow(request.prompt)
        text.grow(request.tokens[len(text.tokens) - len(request.prompt) :])
        return text

    def kind(self, request: Request) -> int | None:
        return self.text(request).match()[0] or None

    def first(self, request: Request) -> int | None:
        text = self.text(request)
        size, start = text.match()
        return text.follow(start, 1)[0] if size else None

    def write(self, steps: Steps, in_slot: Mapping[int, Request], length: int, cells: int, choice: TokenChoice) -> None:
        into = self.drafts.draft_SG[: max(in_slot) + 1]
        drafts = [[-1] * into.shape[1] for _ in into]
        for slot, request in in_slot.items():
            text = self.text(request)
            size, start = text.match()
            if size:
                wanted = min(length, request.room)
                drafts[slot][:wanted] = text.follow(start, wanted)
        steps.put(into, drafts)


class MemberDrafter:
    """Lets one member draft. Its keys and values of the drafts stay where they are: verification writes the same."""

    def __init__(self, model: ComposedForCausalLM, name: str, work: Workspace, drafts: DraftBuffers):
        self.work, self.drafts, self.place = work, drafts, list(model.members).index(name)
        self.home = next(group for group in work.groups if self.place in group.members)
        self.group = self.home
        if len(self.home.members) > 1:
            cache = SlotCache(self.home.cache.slots, 1, self.home.cache.cells)
            self.group = make_group(model, (self.place,), cache)

    def read(self, requests: Sequence[Request]) -> None:
        pass

    def kind(self, request: Request) -> int | None:
        return 0

    def first(self, request: Request) -> int | None:
        return None

    def write(self, steps: Steps, in_slot: Mapping[int, Request], length: int, cells: int, choice: TokenChoice) -> None:
        rows = max(in_slot) + 1
        rooms = [in_slot[slot].room if slot in in_slot else 0 for slot in range(rows)]
        steps.put(self.drafts.room_S[:rows], rooms)
        steps.run("draft", self.draft, rows, length, cells, choice)

    def draft(self, rows: int, length: int, cells: int, choice: TokenChoice) -> None:
        """Run `length` steps of the member alone, each from the token before; on the device."""
        drafts, slots = self.drafts, self.work.slots
        token_B, start_B = slots.token_S[:rows], slots.position_S[:rows]
        for step in range(length):
            real_B = (start_B >= 0) & (drafts.room_S[:rows] > step)
            position_B1 = torch.where(real_B, start_B + step, -1)[:, None]
            batch = TokenBatch(token_B[:, None], position_B1, slots.index_S[:rows], cells, 1, RowOrder.FIRST_SLOTS)
            (logits_B1V,) = self.group.logits(batch)
            logp_BV = logits_B1V[:, -1].to(working_dtype(logits_B1V)).log_softmax(-1)
            token_B, _ = choose_tokens(slots, logp_BV, slice(rows), start_B + step + 1, choice)
            drafts.draft_SG[:rows, step] = torch.where(real_B, token_B, -1)

    def share_cache(self) -> None:
        """Take this member's rows of its group's cache, as they are, without a copy."""
        if self.group.cache is not self.home.cache and not len(self.group.cache):
            self.group.cache.take_rows(self.home.cache, self.home.members.index(self.place))
