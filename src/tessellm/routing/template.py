"""Where the last user message of a prompt is, as token ids, and where its answer begins: found by the chat template's
marks, which are derived once by putting chats into the template. Without a template the whole prompt is the message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..vocabulary.chats import encode_chat

# They begin and end in different ways; spaces may be one token with those of the template.
USUAL = ("Who painted it?", "name five trees", "42", "Explain this", "échange", "x = 1")
SPACED = ("", "\n\nHi", "  Hi", "Hi\n", "Hi\n\n", "Hi  ")
ANSWERS = ("Yes", "It is 42.", "echo", "x = 1\n", "so ")
SYSTEMS = ("Be brief.", "you are a pirate", "42")


class LastMessage(NamedTuple):
    """The span of the last user message, and the first position of the answer; None where none has begun."""

    user: slice
    answer: int | None


@dataclass(frozen=True)
class TemplateMark:
    """Token ids that are always there, then those that follow unless a message begins with spaces."""

    always: tuple[int, ...] = ()
    usual: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChatMarks:
    """The marks of a chat template; all empty without one."""

    prefix: tuple[int, ...] = ()  # what every prompt of one message begins with
    first: TemplateMark = TemplateMark()  # before the first user message of a prompt without a system prompt
    later: TemplateMark = TemplateMark()  # before any other user message
    answer: tuple[int, ...] = ()  # between the last user message and the answer

    @classmethod
    def of(cls, tokenizer: Any) -> ChatMarks:
        """Derive the marks from the tokenizer's chat template."""
        single = _render(tokenizer, [[_user(text)] for text in USUAL])
        if not single:
            return cls()
        every = [*single, *_render(tokenizer, [[_user(text)] for text in SPACED])]
        later = _before_user(tokenizer, [[_user(USUAL[0]), _turn("assistant", text)] for text in ANSWERS])
        system = _before_user(tokenizer, [[_turn("system", text)] for text in SYSTEMS])
        both = TemplateMark(_common_end([later.always, system.always]), later.usual)
        is_mark = bool(both.always) and later.usual == system.usual and not tokenizer.decode(both.always).isspace()
        if tokenizer.decode(later.always).isspace():
            later = TemplateMark()
        always, prefix = _common_start(every), _common_start(single)
        first = TemplateMark(always, prefix[len(always) :])
        answer = _common_end(every) or _common_end(single)
        return cls(prefix, first, both if is_mark else later, answer)

    @property
    def tokens(self) -> frozenset[int]:
        """The tokens of the marks. No other token ends one."""
        return frozenset({*self.first.always, *self.first.usual, *self.later.always, *self.later.usual, *self.answer})

    def read(self, ids: Sequence[int]) -> LastMessage:
        """Return where the last user message is in a row of token ids, and where its answer begins."""
        start = self._after_mark(ids)
        end = _find(ids, self.answer, start) if self.answer else None
        if end is None:
            return LastMessage(slice(start, len(ids)), None)
        return LastMessage(slice(start, end), end + len(self.answer))

    def _after_mark(self, ids: Sequence[int]) -> int:
        mark = self.later
        found = _find_last(ids, mark.always) if mark.always else None
        if found is None:
            mark = self.first
            found = 0 if mark.always and tuple(ids[: len(mark.always)]) == mark.always else None
        if found is None:
            return 0
        start = found + len(mark.always)
        return start + len(mark.usual) if tuple(ids[start : start + len(mark.usual)]) == mark.usual else start


def render(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a prompt of one user message, in the chat template where there is one."""
    rows = _render(tokenizer, [[_user(text)]])
    return rows[0] if rows else list(tokenizer(text).input_ids)


def _render(tokenizer: Any, chats: list[list[dict[str, str]]]) -> list[list[int]]:
    """Return chats as token ids; none where there is no template, or it does not take them."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    try:
        return [encode_chat(tokenizer, chat) for chat in chats]
    except Exception:  # a template raises what it likes, where it wants other roles, say
        return []


def _before_user(tokenizer: Any, contexts: list[list[dict[str, str]]]) -> TemplateMark:
    """Return the ids between these contexts and the user message behind them."""
    usual = _common_end([_common_start(_after(tokenizer, context, USUAL)) for context in contexts])
    every = (*USUAL, *SPACED)
    always = _common_end([_common_start(_after(tokenizer, context, every)) for context in contexts])
    return TemplateMark(always, usual[len(always) :] if usual[: len(always)] == always else ())


def _after(tokenizer: Any, context: list[dict[str, str]], messages: Sequence[str]) -> list[list[int]]:
    return _render(tokenizer, [[*context, _user(text)] for text in messages])


def _user(text: str) -> dict[str, str]:
    return _turn("user", text)


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _common_start(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    found: list[int] = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        found.append(column[0])
    return tuple(found)


def _common_end(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return _common_start([row[::-1] for row in rows])[::-1]


def _find(ids: Sequence[int], mark: tuple[int, ...], start: int) -> int | None:
    places = range(start, len(ids) - len(mark) + 1)
    return next((place for place in places if tuple(ids[place : place + len(mark)]) == mark), None)


def _find_last(ids: Sequence[int], mark: tuple[int, ...]) -> int | None:
    places = range(len(ids) - len(mark), -1, -1)
    return next((place for place in places if tuple(ids[place : place + len(mark)]) == mark), None)
