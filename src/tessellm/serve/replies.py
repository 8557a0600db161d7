"""Pieces of text into OpenAI's answers: completions and chat, whole and streamed, with log-probabilities and traces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from ..diagnose.trace import EQUATION
from ..text.stream import Token, token_bytes
from .answers import (
    Answer,
    AnswerRoute,
    ChatChoice,
    ChatCompletion,
    ChatCompletionPiece,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatPiece,
    ChoiceAbout,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Said,
    TopLogprob,
    TracedToken,
    Usage,
)
from .choices import TextPiece

LEAST = -9999.0  # how OpenAI writes a log-probability of minus infinity
DIGITS = 4


@dataclass(frozen=True)
class WrittenPiece:
    """What is new of a choice: a piece, the text so far, whether it is the first piece, and then who answers."""

    text: str
    piece: TextPiece
    first: bool = True
    route: dict[str, Any] | None = None


class Reply:
    """How one request's answers are written. `top`: log-probabilities asked for; None: not even the token's own."""

    def __init__(self, tokenizer: Any, model: str, members: Sequence[str], top: int | None, trace: bool):
        self.tokenizer, self.model, self.members, self.top, self.trace = tokenizer, model, members, top, trace
        self.created = int(time.time())
        self.bytes_of = lru_cache(maxsize=4096)(lambda token: token_bytes(tokenizer, token))

    def head(self, prefix: str) -> dict[str, Any]:
        if not hasattr(self, "id"):
            self.id = f"{prefix}-{uuid.uuid4().hex}"
        return {"id": self.id, "created": self.created, "model": self.model}

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "backslashreplace")

    def top_of(self, token: Token) -> list[tuple[int, float]]:
        if not self.top or token.seen is None:
            return []
        return list(zip(token.seen["ids"], token.seen["logps"], strict=True))[: self.top]

    def about(self, written: WrittenPiece) -> ChoiceAbout | None:
        """Return what we add to a choice."""
        if written.route is None and not self.trace:
            return None
        seen = [token for token in written.piece.tokens if token.seen is not None] if self.trace else []
        trace = [self._traced_token(written.text, token) for token in seen]
        route = None if written.route is None else AnswerRoute(**written.route)
        return ChoiceAbout(route=route, trace=trace if self.trace else None)

    def _traced_token(self, text: str, token: Token) -> TracedToken:
        seen = token.seen
        assert seen is not None
        voices = (*self.members, "composed")
        tops = zip(seen["top_ids"], seen["top_logprobs"], strict=True)
        return TracedToken(
            id=token.id,
            text=text[token.start : token.end],
            owner=self.members[seen["owner"]],
            share=dict(zip(self.members, map(rounded, seen["share"]), strict=True)),
            log_z=rounded(seen["log_z"]),
            clash=rounded(seen["clash"]),
            gap=rounded(seen["gap"]),
            novel=seen["novel"],
            divergence=dict(zip(self.members[1:], map(rounded, seen["divergence"]), strict=True)),
            logprob=dict(zip(voices, map(rounded, seen["logprob"]), strict=True)),
            top={
                voice: [(self.text_of(i), rounded(p)) for i, p in zip(ids, logps, strict=True)]
                for voice, (ids, logps) in zip(voices, tops, strict=True)
            },
            belief=self._believed(seen["law"]) if "law" in seen else None,
        )

    def _believed(self, laws: Sequence[float]) -> dict[str, float]:
        return dict(zip((*self.members, EQUATION), map(rounded, laws), strict=True))


class CompletionReply(Reply):
    kind = "completions"
    echoed: Sequence[str] = ()  # what each choice begins with, if its prompt is to be given back

    def piece(self, index: int, written: WrittenPiece) -> Completion:
        return Completion(**self.head("cmpl"), choices=[self._choice(index, written)])

    def whole(self, choices: Sequence[WrittenPiece], usage: Usage) -> Completion:
        made = [self._choice(index, written) for index, written in enumerate(choices)]
        return Completion(**self.head("cmpl"), choices=made, usage=usage)

    def usage(self, usage: Usage) -> Completion:
        return Completion(**self.head("cmpl"), choices=[], usage=usage)

    def _choice(self, index: int, written: WrittenPiece) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=(self.echoed[index] if written.first and self.echoed else "") + written.piece.text,
            finish_reason=written.piece.finish_reason,
            logprobs=self._logprobs(written.piece.tokens),
            tessellm=self.about(written),
        )

    def _logprobs(self, tokens: Sequence[Token]) -> CompletionLogprobs | None:
        if self.top is None:
            return None
        tops = [{self.text_of(i): finite(p) for i, p in self.top_of(token)} for token in tokens]
        return CompletionLogprobs(
            tokens=[self.text_of(token.id) for token in tokens],
            token_logprobs=[finite(token.logprob) for token in tokens],
            top_logprobs=tops if self.top else None,
            text_offset=[token.start for token in tokens],
        )


class ChatReply(Reply):
    kind = "chat"

    def piece(self, index: int, written: WrittenPiece) -> ChatCompletionPiece:
        piece, first = written.piece, written.first
        delta = ChatDelta(role="assistant" if first else None, content=piece.text or ("" if first else None))
        choice = ChatPiece(
            index=index,
            delta=delta,
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs(piece.tokens),
            tessellm=self.about(written),
        )
        return ChatCompletionPiece(**self.head("chatcmpl"), choices=[choice])

    def whole(self, choices: Sequence[WrittenPiece], usage: Usage) -> ChatCompletion:
        made = [
            ChatChoice(
                index=index,
                message=Said(content=written.piece.text),
                finish_reason=written.piece.finish_reason,
                logprobs=self._logprobs(written.piece.tokens),
                tessellm=self.about(written),
            )
            for index, written in enumerate(choices)
        ]
        return ChatCompletion(**self.head("chatcmpl"), choices=made, usage=usage)

    def usage(self, usage: Usage) -> ChatCompletionPiece:
        return ChatCompletionPiece(**self.head("chatcmpl"), choices=[], usage=usage)

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if self.top is None:
            return None
        content = [
            ChatLogprob(
                **self._one(token.id, token.logprob),
                top_logprobs=[TopLogprob(**self._one(i, p)) for i, p in self.top_of(token)],
            )
            for token in tokens
        ]
        return ChatLogprobs(content=content)

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text_of(token), "logprob": finite(logprob), "bytes": list(self.bytes_of(token))}


def as_event(answer: Answer) -> bytes:
    """A piece as a server-sent event; what a piece does not have is left out, as OpenAI does."""
    body = answer.model_dump_json(exclude=_absent(answer))
    return f"data: {body}\n\n".encode()


def as_body(answer: Answer) -> bytes:
    return answer.model_dump_json(exclude=_absent(answer)).encode()


def _absent(answer: Any) -> dict[Any, Any]:
    """Keys of ours, and usage, where there is nothing in them."""
    left_out: dict[Any, Any] = {} if answer.usage else {"usage": True}
    choices: dict[int, dict[Any, Any]] = {}
    for number, choice in enumerate(answer.choices):
        without: dict[Any, Any] = {"tessellm": _empty(choice.tessellm)} if choice.tessellm else {"tessellm": True}
        if isinstance(choice, ChatPiece):
            without["delta"] = _empty(choice.delta)
        choices[number] = without
    return left_out | ({"choices": choices} if choices else {})


def _empty(part: BaseModel) -> dict[str, Any]:
    """Return the keys of a part, and of its parts, that hold nothing."""
    left_out: dict[str, Any] = {}
    for key, value in part.__dict__.items():
        if value is None:
            left_out[key] = True
        elif isinstance(value, AnswerRoute):
            left_out[key] = _empty(value)
    return left_out


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def rounded(value: float) -> float:
    """Few digits; what JSON lacks becomes the nearest number that it has."""
    return round(min(max(value, LEAST), -LEAST), DIGITS) if value == value else 0.0
