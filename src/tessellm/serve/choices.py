"""One choice of an answer as it is written: news from the scheduler in, pieces of text with their tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..text.stream import TextStream, Token
from .refusals import Refusal, bad, broken, too_slow, unavailable
from .scheduler import Job, News, Scheduler


@dataclass(frozen=True)
class TextPiece:
    """Text that is certain, the tokens that end in it, and whether it is the last."""

    text: str
    tokens: list[Token]
    finish_reason: Literal["stop", "length"] | None = None


@dataclass
class RunningChoice:
    """A choice: its job and the text that comes of it."""

    job: Job
    text: TextStream
    ends: frozenset[int]
    seconds: float
    count: int = 0  # tokens that were written, up to a stop text

    def read(self, news: News) -> TextPiece:
        if news.finish_reason in ("error", "timeout", "stopping", "cancelled"):
            raise self._failure(news)
        nothing: list[dict[str, Any] | None] = [None] * len(news.tokens)
        seen = news.seen or nothing
        for token, logprob, view in zip(news.tokens, news.logprobs, seen, strict=True):
            self.count += 1
            if token in self.ends:
                break
            self.text.add(token, logprob, view)
        if news.finish_reason is None:
            return TextPiece(*self.text.release())
        self.text.finish()
        reason: Literal["stop", "length"] = "length" if news.finish_reason == "length" else "stop"
        return TextPiece(*self.text.release(all_of_it=True), "stop" if self.text.stopped else reason)

    def _failure(self, news: News) -> Refusal:
        if news.finish_reason == "timeout":
            return too_slow(self.seconds)
        if news.finish_reason == "stopping":
            return unavailable("the server was told to stop, and there is no more time for this request")
        form = self.job.request.form
        if form is not None and form.failure is not None:
            return bad(form.failure, "response_format")
        return broken(news.error or "the request was dropped")


async def pieces(scheduler: Scheduler, choices: Sequence[RunningChoice]) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """Of all choices of a request as they come. Leaves nothing running, however this ends."""
    left = len(choices)
    try:
        while left:
            number, news = await choices[0].job.news.get()
            piece = choices[number].read(news)
            left -= piece.finish_reason is not None
            if piece.text or piece.tokens or piece.finish_reason:
                yield number, piece
    finally:
        for choice in choices:
            scheduler.cancel(choice.job)
