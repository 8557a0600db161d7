"""Text as it comes, to a terminal or a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from transformers import TextStreamer

from .stops import held_back, stop_position


class Streamer(TextStreamer):
    """Text as it comes, to any stream, up to the first stop text."""

    def __init__(self, tokenizer: Any, stream: TextIO, stops: Sequence[str]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stream, self.stops, self.text, self.shown = stream, stops, "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        cut = stop_position(self.text, self.stops)
        if cut is None:
            cut = len(self.text) - (0 if stream_end else held_back(self.text, self.stops))
        print(self.text[self.shown : cut], end="\n" if stream_end else "", flush=True, file=self.stream)
        self.shown = max(self.shown, cut)
