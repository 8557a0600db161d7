"""Where drafts come from: the text itself, or one member alone. A draft is a guess; verification decides.

    Lookup   what followed the last time that the text ended as it does now, or comes next in what it is copying;
             costs nothing
    Alone    one member decodes by itself, on its own part of the cache, with the noise of the request

Each says what kind of draft it has for a request, so that the chance of being right is learnt for each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ...model import ComposedForCausalLM
from ...rules import working_dtype
from ..members.groups import one_member
from ..requests import Request
from ..sampling import choose, uniform
from ..slots import SlotCache
from ..steps import Steps
from .pace import Count
from .verification import Verification

LONGEST_MATCH = 4  # tokens at the end of the text that are looked for
SHORTEST_COPY = 2  # so many that were found are taken for the beginning of a copy
MOST_MISSES = 2  # tokens in a row that a copy may change
FORGET_CHANGES = 0.9  # what the last change, made again or not, leaves of those before it in the count of them
MOST_PLACES = 64  # the latest of a pair of tokens that are looked at: more would make some texts' time quadratic


class Drafter(Protocol):
    """Writes drafts into a verification's buffers."""

    def read(self, requests: Sequence[Request]) -> None:
        """The device is reading their prompts now, and the host waits."""

    def kind(self, request: Request) -> int | None:
        """What kind of draft there is for this request; None: none."""

    def first(self, request: Request) -> int | None:
        """The first token of its draft, where that is known without work."""

    def write(self, steps: Steps, running: Sequence[Request], rows: int, length: int, cells: int, how: str) -> None:
        """Drafts of up to `length` tokens for those that run in the first `rows` slots."""


class Text:
    """A text that grows; where in it each token and pair of tokens was last followed by something; and where it is
    copying from. A copy that changes a token goes on behind that token, which no run of tokens would find, and is taken
    to make the same change again (names that are replaced, letters that are exchanged), as long as copies mostly do:
    `again` counts how often they did, for all texts that share it."""

    def __init__(self, again: Count | None = None) -> None:
        self.again = again or Count(1.0, 1.0)
        self.tokens: list[int] = []
        self._after: dict[int, int] = {}  # a token, and the last place behind it
        self._after_pair: dict[tuple[int, int], int] = {}
        self._before: list[int] = []  # from each place behind a pair to the one before it; −1: none
        self._found = (0, 0)  # how many tokens of the text's end were found before, and where what came next begins
        self._source: int | None = None  # what comes next, if the text goes on copying
        self._misses = 0  # tokens in a row that were not as expected of the copy
        self._changes: dict[int, int] = {}  # tokens of sources, and what copies wrote in their place the last time
        self._unsure: list[tuple[int, int]] = []  # such of the last tokens: believed if the copy goes on behind them

    def grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._note_end()
            self._copy(token)
            self.tokens.append(token)
            if self._source is None or self._misses:
                self._found = size, start = self._find()
                if (size >= SHORTEST_COPY and self._source is None) or size == LONGEST_MATCH:
                    self._source, self._misses, self._unsure = start, 0, []

    def _note_end(self) -> None:
        """Something follows the text's end now."""
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
            self.again.add(token == change, 1, FORGET_CHANGES)
        if token in (source, change):
            self._changes.update([*self._unsure, (source, token)])
            self._misses, self._unsure = 0, []
        else:
            self._misses += 1
            self._unsure.append((source, token))
        self._source = self._source + 1 if self._misses <= MOST_MISSES else None

    def _find(self) -> tuple[int, int]:
        """The longest end that was seen before, the latest time; of a pair's places, the latest are looked at."""
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
        """What kind of draft there is, and where it begins. 0: none; −1, −2, …: from what is being copied, after none,
        one, … changed tokens; else how many tokens of the text's end were found before."""
        return self._found if self._source is None else (-1 - self._misses, self._source)

    def follow(self, start: int, length: int) -> list[int]:
        """The tokens from there on, changed as the copy changes them; past the text's end it goes on with the copy."""
        period = len(self.tokens) - start
        tokens = self.tokens[start : start + length]
        if length > period:
            tokens = [tokens[i % period] for i in range(length)]
        if self._source is None or 2 * self.again.right < self.again.judged:
            return tokens
        return [self._changes.get(token, token) for token in tokens]


class Lookup:
    """Drafts from the request's own prompt and what it has written."""

    def __init__(self, into: Verification) -> None:
        self.into, self.again = into, Count(1.0, 1.0)

    def read(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.text(request)

    def text(self, request: Request) -> Text:
        if request.text is None:
            request.text = Text(self.again)
            request.text.grow(request.prompt)
        text: Text = request.text
        known = len(text.tokens) - len(request.prompt)
        if known < len(request.tokens):
            text.grow(request.tokens[known:])
        return text

    def kind(self, request: Request) -> int | None:
        return self.text(request).match()[0] or None

    def first(self, request: Request) -> int | None:
        text = self.text(request)
        size, start = text.match()
        return text.follow(start, 1)[0] if size else None

    def write(self, steps: Steps, running: Sequence[Request], rows: int, length: int, cells: int, how: str) -> None:
        into = self.into.draft_SG[:rows]
        drafts = [[-1] * into.shape[1] for _ in range(rows)]
        for request in running:
            text = self.text(request)
            size, start = text.match()
            if size and request.slot is not None:
                wanted = min(length, room(request))
                drafts[request.slot][:wanted] = text.follow(start, wanted)
        steps.put(into, drafts)


class Alone:
    """One member drafts. Its keys and values of the drafts stay where they are: verification writes the same."""

    def __init__(self, model: ComposedForCausalLM, name: str, into: Verification):
        self.into, self.place = into, list(model.members).index(name)
        self.home = next(group for group in into.state.groups if self.place in group.members)
        self.group = self.home
        if len(self.home.members) > 1:
            cache = SlotCache(self.home.cache.slots, 1, self.home.cache.cells)
            self.group = one_member(model, name, cache)

    def read(self, requests: Sequence[Request]) -> None:
        pass

    def kind(self, request: Request) -> int | None:
        return 0

    def first(self, request: Request) -> int | None:
        return None

    def write(self, steps: Steps, running: Sequence[Request], rows: int, length: int, cells: int, how: str) -> None:
        rooms = [0] * rows
        for request in running:
            if request.slot is not None:
                rooms[request.slot] = room(request)
        steps.put(self.into.room_S[:rows], rooms)
        steps.draft(self, rows, length, cells, how)

    def draft(self, rows: int, length: int, cells: int, how: str) -> None:
        """On the device: `length` steps of the member alone, each from the token before."""
        into, state = self.into, self.into.state
        token_B, start_B = state.token_S[:rows], state.position_S[:rows]
        for step in range(length):
            real_B = (start_B >= 0) & (into.room_S[:rows] > step)
            position_B = torch.where(real_B, start_B + step, -1)
            (logits_B1V,) = self.group.logits(token_B[:, None], position_B[:, None], rows, cells, 1)
            logp_BV = logits_B1V[:, -1].to(working_dtype(logits_B1V)).log_softmax(-1)
            noise_B = uniform(state.seed_S[:rows], start_B + step + 1)
            asked = state.temperature_S[:rows], state.top_p_S[:rows], state.top_k_S[:rows]
            token_B = choose(logp_BV, *asked, noise_B, how)
            into.draft_SG[:rows, step] = torch.where(real_B, token_B, -1)

    def share_cache(self) -> None:
        """Where members run together, this one's rows of their cache, as they are, without a copy."""
        own, shared = self.group.cache, self.home.cache
        if own is not shared and not own.key_RHCD:
            among, members = self.home.members.index(self.place), shared.members
            own.key_RHCD = {layer: buffer[among::members] for layer, buffer in shared.key_RHCD.items()}
            own.value_RHCD = {layer: buffer[among::members] for layer, buffer in shared.value_RHCD.items()}


def room(request: Request) -> int:
    """How many tokens a draft may have: verification adds one more."""
    return request.sampling.max_new_tokens - request.asked - 1
