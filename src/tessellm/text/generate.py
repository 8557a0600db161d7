"""Text in, text out: what `tessellm generate` does, as functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import torch

from ..engine.engine import Engine
from ..engine.speculation import Speculation
from ..errors import EngineError, GenerationError
from ..model import ComposedForCausalLM
from .engines import engine_for
from .options import TextOptions
from .prompts import encode_prompts, tokenizer_of
from .reference import by_reference, pad_id
from .stops import stop_position
from .stream import Streamer
from .structured import Structures
from .writer import Writer, order


@dataclass(frozen=True)
class Generated:
    """One prompt's continuation."""

    prompt: str
    text: str
    tokens: int
    finish_reason: str  # stop: an end token or a stop text; length: max_new_tokens


class WrittenRow(NamedTuple):
    """A prompt's continuation, and the token ids of both; an end token is among the new ones."""

    prompt_ids: list[int]
    new_ids: list[int]
    result: Generated


def generate_rows(
    model: ComposedForCausalLM,
    prompts: Sequence[str],
    options: TextOptions,
    batch_size: int = 8,
    stream: TextIO | None = None,
    engine: str = "auto",
    note: Callable[[str], None] = lambda text: None,
    speculate: str | None = None,
) -> Iterator[WrittenRow]:
    """Continue every prompt, in order. By the fast path; by the reference if `engine` is "reference" or the fast path
    cannot run this composition; then `note` is told why. `speculate` says where drafts come from: "lookup" or
    "none"."""
    speculation = Speculation(speculate) if speculate is not None else None
    if speculation is not None and speculation.drafts and engine == "reference":
        raise EngineError("the reference decodes without drafts: leave out --speculate or --engine reference")
    rows, options = encode_prompts(model, prompts, options)
    streamer = None
    if stream is not None:
        streamer = Streamer(tokenizer_of(model), stream, options.stop, model.config.eos_token_id or ())
    sizes = [(len(row), options.max_new_tokens) for row in rows]
    fast = engine_for(model, sizes, batch_size, speculation, note) if engine != "reference" else None
    if fast is None and options.schema is not None:
        raise EngineError("the reference holds no text to a schema: leave out --schema or --engine reference")
    if fast is None:
        written = by_reference(model, rows, options, batch_size, streamer)
    else:
        written = by_engine(fast, tokenizer_of(model), rows, options, streamer)
    ends = set(model.config.eos_token_id or ())
    for prompt, row, new_T in zip(prompts, rows, written, strict=True):
        result = finished(model, prompt, new_T, options)
        ended = new_T[result.tokens : result.tokens + 1]
        yield WrittenRow(row, new_T[: result.tokens] + [token for token in ended if token in ends], result)


def generate_texts(*given: Any, **options: Any) -> Iterator[Generated]:
    """Continue every prompt as `generate_rows` does, which says what may be given; without token ids."""
    for written in generate_rows(*given, **options):
        yield written.result


def by_engine(
    engine: Engine,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    options: TextOptions,
    streamer: Streamer | None = None,
) -> Iterator[list[int]]:
    """Yield the new tokens of each row, in order, end token included."""
    form = None
    if options.schema is not None:
        form = Structures(tokenizer, engine.limits.vocabulary, engine.ends).of(options.schema)
    ordered = [order(engine, tokenizer, row, options, number, form) for number, row in enumerate(rows)]
    left, shown = deque(request for request, _ in ordered), 0
    if streamer is not None:
        streamer.put(torch.tensor(rows[0]))  # which it does not show
    for _, request in Writer(engine).write(ordered):
        if streamer is not None:
            streamer.put(torch.tensor(request.tokens[shown:]))
            shown = len(request.tokens)
        while left and left[0].done:
            ended = left.popleft()
            if ended.finish_reason == "error":
                raise GenerationError(f"prompt {len(rows) - len(left)}: {ended.error}")
            if streamer is not None:
                streamer.end()
            yield ended.tokens


def finished(model: ComposedForCausalLM, prompt: str, new_T: list[int], options: TextOptions) -> Generated:
    ends = set(model.config.eos_token_id or ())
    length = next((t for t, token in enumerate(new_T) if token in ends), None)
    kept = new_T if length is None else new_T[:length]
    text = tokenizer_of(model).decode(kept, skip_special_tokens=True)
    cut = stop_position(text, options.stop)
    if cut is not None:
        while kept and kept[-1] == pad_id(model):  # other prompts of the batch went on
            kept.pop()
    return Generated(prompt, text[:cut], len(kept), "stop" if length is not None or cut is not None else "length")
