"""Pieces of text into OpenAI's answers: completions and chat, whole and streamed, with log-probabilities and traces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..diagnose.trace import EQUATION
from ..text.stream import Token, token_bytes
from .answers import (
    Answer,
    ChatChoice,
    ChatCompletion,
    ChatCompletionPiece,
    ChatLogprob,
    ChatLogprobs,
    ChatPiece,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Said,
    TopLogprob,
    Traced,
    TracedToken,
    Usage,
)
from .choices import TextPiece

LEAST = -9999.0  # how OpenAI writes a log-probability of minus infinity
DIGITS = 4


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

    def traced(self, text: str, tokens: Sequence[Token]) -> Traced | None:
        if not self.trace:
            return None
        return Traced(trace=[self._traced_token(text, token) for token in tokens if token.seen is not None])

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

    def piece(self, index: int, text: str, piece: TextPiece, first: bool) -> Completion:
        return Completion(**self.head("cmpl"), choices=[self._choice(index, text, piece, first)])

    def whole(self, choices: Sequence[tuple[str, TextPiece]], usage: Usage) -> Completion:
        made = [self._choice(index, text, piece, True) for index, (text, piece) in enumerate(choices)]
        return Completion(**self.head("cmpl"), choices=made, usage=usage)

    def usage(self, usage: Usage) -> Completion:
        return Completion(**self.head("cmpl"), choices=[], usage=usage)

    def _choice(self, index: int, text: str, piece: TextPiece, first: bool) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=(self.echoed[index] if first and self.echoed else "") + piece.text,
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs(piece.tokens),
            tessellm=self.traced(text, piece.tokens),
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

    def piece(self, index: int, text: str, piece: TextPiece, first: bool) -> ChatCompletionPiece:
        delta = Delta(role="assistant" if first else None, content=piece.text or ("" if first else None))
        choice = ChatPiece(
            index=index,
            delta=delta,
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs(piece.tokens),
            tessellm=self.traced(text, piece.tokens),
        )
        return ChatCompletionPiece(**self.head("chatcmpl"), choices=[choice])

    def whole(self, choices: Sequence[tuple[str, TextPiece]], usage: Usage) -> ChatCompletion:
        made = [
            ChatChoice(
                index=index,
                message=Said(content=piece.text),
                finish_reason=piece.finish_reason,
                logprobs=self._logprobs(piece.tokens),
                tessellm=self.traced(text, piece.tokens),
            )
            for index, (text, piece) in enumerate(choices)
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
        without: dict[Any, Any] = {} if choice.tessellm else {"tessellm": True}
        if isinstance(choice, ChatPiece):
            empty = {key: True for key, value in choice.delta.__dict__.items() if value is None}
            without |= {"delta": empty} if empty else {}
        choices[number] = without
    return left_out | ({"choices": choices} if choices else {})


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def rounded(value: float) -> float:
    """Few digits; what JSON lacks becomes the nearest number that it has."""
    return round(min(max(value, LEAST), -LEAST), DIGITS) if value == value else 0.0
