"""Text as it is written, every token in its owner's colour; without colours, owners are named in brackets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import torch
from transformers.generation.streamers import BaseStreamer

from ..model import ComposedForCausalLM
from ..text.generate import Generated, finished
from ..text.options import TextOptions
from ..text.prompts import encode_prompts, tokenizer_of
from ..text.reference import reference_batches
from ..text.stops import UNFINISHED
from ..text.visible import visible
from .recorder import Recorder
from .shown import in_terminal
from .trace import Trace, generated


class Terminal:
    """Where owned pieces of text are shown."""

    def __init__(self, stream: TextIO, members: Sequence[str]):
        self.stream, self.members = stream, members
        forced = bool(os.environ.get("FORCE_COLOR"))
        self.colours = forced or (stream.isatty() and "NO_COLOR" not in os.environ)
        self._named = 0  # whose brackets are open

    def legend(self) -> None:
        if self.colours:
            names = "  ".join(in_terminal(name, number) for number, name in enumerate(self.members))
            self._write(f"{names}\n")

    def plain(self, text: str) -> None:
        self._write(self._closed() + visible(text))

    def piece(self, text: str, owner: int) -> None:
        if self.colours:
            self._write(in_terminal(text, owner))
            return
        opening = f"[{visible(self.members[owner])}|" if owner and owner != self._named else ""
        closing = self._closed() if owner != self._named else ""
        self._named = owner
        self._write(closing + opening + visible(text))

    def end(self) -> None:
        self._write(self._closed() + "\n")

    def _closed(self) -> str:
        closing = "]" if self._named else ""
        self._named = 0
        return closing

    def _write(self, text: str) -> None:
        print(text, end="", flush=True, file=self.stream)


class OwnerStreamer(BaseStreamer):
    """Shows each token of one text as it comes; half characters wait for their other half."""

    def __init__(self, model: ComposedForCausalLM, recorder: Recorder, terminal: Terminal):
        self.tokenizer, self.recorder, self.terminal = tokenizer_of(model), recorder, terminal
        self.tokens: list[int] | None = None  # None before the prompt
        self.shown = ""

    def put(self, value: torch.Tensor) -> None:
        if self.tokens is None:
            self.tokens = []
            return
        self.tokens += value.flatten().tolist()
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith(UNFINISHED):
            self.terminal.piece(text[len(self.shown) :], self.recorder.owner_B[0])
            self.shown = text

    def end(self) -> None:
        self.terminal.end()


def generate_traced(
    model: ComposedForCausalLM, prompts: Sequence[str], options: TextOptions, batch_size: int, terminal: Terminal
) -> Iterator[tuple[Generated, Trace]]:
    """Continue every prompt and show who owns which token: one prompt while it is written, several, or a text that may
    end before a stop text, when they are done."""
    live = len(prompts) == 1 and not options.stop
    recorder = Recorder(model, last_only=True)

    def more() -> dict[str, Any]:
        nonlocal recorder
        recorder, cache = Recorder(model, last_only=True), model.new_cache()
        cache.observer = recorder
        streamer = OwnerStreamer(model, recorder, terminal) if live else None
        return {"past_key_values": cache, "streamer": streamer}

    left = iter(prompts)
    rows, options = encode_prompts(model, prompts, options)
    for start, output_BT in reference_batches(model, rows, options, batch_size, more):
        trace = generated(model, recorder, output_BT, start)
        for number, prompt in zip(range(len(output_BT)), left, strict=False):
            result = finished(model, prompt, output_BT[number, start:].tolist(), options)
            one = trace.text(number, trace.scored[number])
            if not live:
                show(result, one, terminal)
            yield result, one


def show(result: Generated, trace: Trace, terminal: Terminal) -> None:
    """A finished text, up to where it was cut."""
    terminal.plain(result.prompt)
    left = len(result.text)
    for position in range(trace.tokens.shape[1]):
        piece = trace.token_text(int(trace.tokens[0, position]))[:left]
        if piece:
            terminal.piece(piece, int(trace.owner[0, position]))
        left -= len(piece)
    terminal.end()
