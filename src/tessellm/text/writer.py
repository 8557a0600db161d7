"""Text in, text out: what `tessellm generate` does, as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from ..decoding.speculation import Speculation
from ..errors import EngineError
from ..model import ComposedForCausalLM
from .continuations import by_engine, by_reference, engine_for, pad_id
from .prompts import encode_prompts, tokenizer_of
from .requests import Request
from .stops import stop_position
from .stream import Streamer


@dataclass(frozen=True)
class Generated:
    """One prompt's continuation."""

    prompt: str
    text: str
    tokens: int
    finish_reason: str  # stop: an end token or a stop text; length: max_new_tokens


def generate_texts(
    model: ComposedForCausalLM,
    prompts: Sequence[str],
    request: Request,
    batch_size: int = 8,
    stream: TextIO | None = None,
    engine: str = "auto",
    note: Callable[[str], None] = lambda text: None,
    speculate: str | None = None,
) -> Iterator[Generated]:
    """Continue every prompt, in order. By the fast path; by the reference if `engine` is "reference" or the fast path
    cannot run this composition; then `note` is told why. `speculate` says who drafts: "lookup" or "member:NAME"."""
    speculation = Speculation(speculate) if speculate is not None else None
    if speculation is not None:
        speculation.check(model)
        if engine == "reference":
            raise EngineError("the reference decodes without drafts: leave out --speculate or --engine reference")
    rows, request = encode_prompts(model, prompts, request)
    tokenizer = tokenizer_of(model)
    streamer = Streamer(tokenizer, stream, request.stop) if stream is not None else None
    fast = None
    if engine != "reference":
        try:
            fast = engine_for(model, rows, request, batch_size, speculation)
        except EngineError as error:
            note(str(error))
    if fast is None:
        written = by_reference(model, rows, request, batch_size, streamer)
    else:
        written = by_engine(fast, tokenizer, rows, request, streamer)
    for prompt, new_T in zip(prompts, written, strict=True):
        yield finished(model, prompt, new_T, request)


def finished(model: ComposedForCausalLM, prompt: str, new_T: list[int], request: Request) -> Generated:
    ends = set(model.config.eos_token_id or ())
    length = next((t for t, token in enumerate(new_T) if token in ends), None)
    kept = new_T if length is None else new_T[:length]
    text = tokenizer_of(model).decode(kept, skip_special_tokens=True)
    cut = stop_position(text, request.stop)
    if cut is not None:
        while kept and kept[-1] == pad_id(model):  # other prompts of the batch went on
            kept.pop()
    return Generated(prompt, text[:cut], len(kept), "stop" if length is not None or cut is not None else "length")
