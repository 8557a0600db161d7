"""Tokens in, text out, as it comes: whole characters only, nothing that may belong to a stop text.

Some tokens are parts of characters, and some change with those before them (a leading space that is dropped at the
start of a text). So new tokens are decoded together with the last ones that were shown, and what is new in the result
is the text that they add; it waits while it ends in half a character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TextIO

import torch
from transformers.generation.streamers import BaseStreamer

from .stops import UNFINISHED, held_back, prompt_tail, stop_position

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(eq=False)
class Token:
    """A token that was written, and which characters of the text are its own."""

    id: int
    logprob: float
    seen: dict[str, Any] | None
    start: int
    end: int


@dataclass
class TextStream:
    """What one request has written so far, up to the first stop text."""

    tokenizer: Any
    stops: Sequence[str] = ()
    prompt: Sequence[int] = ()
    text: str = ""
    stopped: bool = False
    pending: list[Token] = field(default_factory=list)  # whose text was not yet released
    _sent: int = 0

    def __post_init__(self) -> None:
        self._ids = prompt_tail(self.tokenizer, self.prompt)
        self._start, self._read = 0, len(self._ids)

    def add(self, token: int, logprob: float = 0.0, seen: dict[str, Any] | None = None) -> None:
        """Read one more token; behind a stop text it brings nothing."""
        if self.stopped:
            return
        before = len(self.text)
        self._ids.append(token)
        self._extend(whole=True)
        self.pending.append(Token(token, logprob, seen, before, len(self.text)))

    def finish(self) -> None:
        """End the text: incomplete characters are shown as they are."""
        if not self.stopped:
            self._extend(whole=False)
            if self.pending:
                self.pending[-1].end = len(self.text)

    def _extend(self, whole: bool) -> None:
        known = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if len(now) <= len(known) or (whole and now.endswith(UNFINISHED)):
            return
        self._start, self._read = self._read, len(self._ids)
        from_ = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += now[len(known) :]
        cut = stop_position(self.text[from_:], self.stops)
        if cut is not None:
            self.text, self.stopped = self.text[: from_ + cut], True

    def release(self, all_of_it: bool = False) -> tuple[str, list[Token]]:
        """Return what can be sent: text that no stop text can take back, and the tokens complete in it."""
        ended = all_of_it or self.stopped
        upto = len(self.text) if ended else len(self.text) - held_back(self.text, self.stops)
        piece, self._sent = self.text[self._sent : upto], max(self._sent, upto)
        shown = [n for n, token in enumerate(self.pending, 1) if ended or token.start < token.end <= self._sent]
        done = self.pending[: max(shown, default=0)]  # parts of characters wait for the last part
        self.pending = self.pending[len(done) :]
        for token in done:
            token.end = min(token.end, len(self.text))
        return piece, [token for token in done if token.start < token.end or not self.stopped]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Streamer(BaseStreamer):
    """Shows a text on a terminal or in a file while it is written: by the engine, or by Hugging Face's `generate`,
    which puts the prompt first."""

    def __init__(self, tokenizer: Any, stream: TextIO, stops: Sequence[str], ends: Iterable[int] = ()):
        self.stream, self.ends, self.text = stream, frozenset(ends), TextStream(tokenizer, stops)
        self.after_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Show new tokens; the first that come are the prompt."""
        for token in value.flatten().tolist() if self.after_prompt else ():
            if token not in self.ends:
                self.text.add(token)
        self.after_prompt = True
        self._show(self.text.release()[0])

    def end(self) -> None:
        self.text.finish()
        self._show(self.text.release(all_of_it=True)[0] + "\n")

    def _show(self, text: str) -> None:
        print(text, end="", flush=True, file=self.stream)


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes that a token stands for, also where they are no whole characters."""
    raw = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(raw, str):
        return b""
    byte = BYTE.fullmatch(raw)
    if byte:
        return bytes([int(byte[1], 16)])
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if UNFINISHED in text and all(character in byte_letters() for character in raw):
        return bytes(byte_letters()[character] for character in raw)
    if raw.startswith("▁") and not text.startswith(" "):  # decoding alone drops it
        text = f" {text}"
    return text.encode("utf-8", "replace")


def token_text(tokenizer: Any, token: int) -> str:
    """Return a token as text; bytes that are no characters become escapes."""
    return token_bytes(tokenizer, token).decode("utf-8", "backslashreplace")


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: printable ones stand for themselves, the rest follow
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}
