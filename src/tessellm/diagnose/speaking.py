"""Text that was written, every token in its owner's colour; without colours, owners are named in brackets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import torch

from ..model import ComposedForCausalLM
from ..text.generate import Generated, generate_rows
from ..text.options import TextOptions
from ..text.stops import UNFINISHED
from ..text.visible import visible
from .shown import in_terminal
from .trace import Trace, trace


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


def generate_traced(
    model: ComposedForCausalLM,
    prompts: Sequence[str],
    options: TextOptions,
    batch_size: int,
    terminal: Terminal,
    engine: str = "auto",
    note: Callable[[str], None] = lambda text: None,
    speculate: str | None = None,
) -> Iterator[tuple[Generated, Trace]]:
    """Continue every prompt as `generate_texts` does, then read each text and show who owns which of its tokens: what
    is explained is what was written, whatever wrote it."""
    for row in generate_rows(model, prompts, options, batch_size, None, engine, note, speculate):
        ids_T = torch.tensor(row.prompt_ids + row.new_ids)
        start = len(row.prompt_ids)
        written = trace(model, ids_T, start=start).text(0, torch.arange(len(ids_T)) >= start)
        if len(prompts) > 1:
            terminal.plain(row.result.prompt)
        show(row.result, written, terminal)
        yield row.result, written


def show(result: Generated, trace: Trace, terminal: Terminal) -> None:
    """Show a finished text up to where it was cut; half characters wait for their other half."""
    tokens, shown = trace.tokens[0].tolist(), 0
    for position in range(len(tokens)):
        text = trace.tokenizer.decode(tokens[: position + 1], skip_special_tokens=True)[: len(result.text)]
        if len(text) > shown and (not text.endswith(UNFINISHED) or position == len(tokens) - 1):
            terminal.piece(text[shown:], int(trace.owner[0, position]))
            shown = len(text)
    terminal.end()
