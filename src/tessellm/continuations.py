"""New tokens for rows of token ids, by the fast path or by model.py: batches, stop texts, text as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any, TextIO, cast

import torch
from transformers import StoppingCriteria, TextStreamer

from .decoding.engine import Engine
from .decoding.requests import Request as EngineRequest
from .decoding.sampling import Sampling
from .decoding.speculation import Speculation
from .errors import EngineError, GenerationError
from .model import ComposedForCausalLM

UNFINISHED = "\ufffd"  # what a decoder makes of half a character
NEW_TOKENS = 80  # more never arrive at once
WORTH_COMPILING = 20_000  # new tokens; for fewer, compiling takes longer than it saves
PLAIN: dict[str, tuple] = {  # what else a generation config may ask for, and the values that ask for nothing
    "repetition_penalty": (None, 1, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1, 1.0),
    "num_beams": (None, 1),
    "penalty_alpha": (None,),
}


@dataclass(frozen=True)
class Request:
    """How to generate."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    chat: bool = False
    fit: bool = False  # as many new tokens as the context has room for, if that is fewer; one at the least

    def __post_init__(self) -> None:
        Sampling(self.max_new_tokens, self.temperature, self.top_p, self.seed)  # which says what cannot be asked for


def unusual_settings(model: ComposedForCausalLM) -> list[str]:
    """What the generation config asks for and only the reference knows."""
    return sorted(key for key, plain in PLAIN.items() if getattr(model.generation_config, key, None) not in plain)


def engine_for(
    model: ComposedForCausalLM,
    rows: Sequence[Sequence[int]],
    request: Request,
    batch_size: int = 8,
    speculation: Speculation | None = None,
) -> Engine:
    """An engine with room for these rows. EngineError: use the reference."""
    unknown = unusual_settings(model)
    if unknown:
        raise EngineError(f"the generation config sets {', '.join(unknown)}, which the fast path does not know")
    slots = max(1, min(batch_size, len(rows)))
    longest = max(map(len, rows), default=1) + request.max_new_tokens
    compiled = len(rows) * request.max_new_tokens >= WORTH_COMPILING
    return Engine(model, slots, longest, compiled=compiled, speculation=speculation)


def by_engine(
    engine: Engine, tokenizer: Any, rows: Sequence[Sequence[int]], request: Request, streamer: TextStreamer | None
) -> Iterator[list[int]]:
    """The new tokens of each row, in order, an end token included."""
    running = deque(
        engine.submit(
            row, Sampling(request.max_new_tokens, request.temperature, request.top_p, (request.seed << 24) + number)
        )
        for number, row in enumerate(rows)
    )
    streamed = 0
    if streamer is not None:
        streamer.put(torch.tensor(rows[0]))  # which it does not show
    while running:
        for arrived in engine.step():
            if request.stop:  # also of one that is done: with drafts its last tokens came together
                stop_at_text(engine, arrived, tokenizer, request.stop)
            if streamer is not None and len(arrived.tokens) > streamed:
                streamer.put(torch.tensor(arrived.tokens[streamed:]))
                streamed = len(arrived.tokens)
        while running and running[0].done:
            ended = running.popleft()
            if ended.finish_reason == "error":
                raise GenerationError(f"prompt {len(rows) - len(running)}: {ended.error}")
            if streamer is not None:
                streamer.end()
            yield ended.tokens


def stop_at_text(engine: Engine, arrived: EngineRequest, tokenizer: Any, stops: Sequence[str]) -> None:
    """End a request whose text holds a stop text, and forget the tokens that came after it."""
    new, arrived.searched = len(arrived.tokens) - arrived.searched, len(arrived.tokens)
    if not _letters(tokenizer, tuple(stops)).may_end(arrived.tokens, new):
        return

    def stopped(tokens: list[int]) -> bool:
        return stop_position(tokenizer.decode(tokens, skip_special_tokens=True), stops) is not None

    end = max(len(stop.encode()) for stop in stops) + NEW_TOKENS  # a token is a byte or more: what came before was read
    if stopped(arrived.tokens[-end:]) and stopped(arrived.tokens):
        engine.cancel(arrived)
        while stopped(arrived.tokens[:-1]):
            arrived.tokens.pop()


class _Letters(dict[int, int]):
    """The characters of stop texts that a token brings, a bit each. One that is a part of a character, or nothing by
    itself, may bring any. Read twice in a row: decoders drop a space at the beginning of a text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self.tokenizer, self.bits = tokenizer, {letter: 1 << n for n, letter in enumerate(sorted(set("".join(stops))))}
        self.needed = [self._sum(stop) for stop in stops]
        self.reach = max(len(stop.encode()) for stop in stops)  # a token is a byte or more
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self.reach = 3 * self.reach + 2  # "do n't" is read as "don't", "a ' b" as "a'b"

    def __missing__(self, token: int) -> int:
        text = self.tokenizer.decode([token] * 2, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self[token] = self._sum(text) if text and UNFINISHED not in text else self._sum(self.bits)
        return self[token]

    def _sum(self, text: Iterable[str]) -> int:
        return reduce(or_, (self.bits.get(letter, 0) for letter in text))

    def may_end(self, tokens: Sequence[int], new: int) -> bool:
        """Whether a stop text can have come to its end with one of the new tokens, the last ones."""
        brought = reduce(or_, map(self.__getitem__, tokens[1 - self.reach - new :]), 0)
        return any(needed & brought == needed for needed in self.needed)


_letters = lru_cache(maxsize=8)(_Letters)


def by_reference(
    model: ComposedForCausalLM,
    rows: Sequence[Sequence[int]],
    request: Request,
    batch_size: int,
    streamer: TextStreamer | None,
) -> Iterator[list[int]]:
    """The new tokens of each row, in order; padding may follow the end."""
    for start, output_BT in reference_batches(model, rows, request, batch_size, lambda: {"streamer": streamer}):
        yield from output_BT[:, start:].tolist()


def reference_batches(
    model: ComposedForCausalLM,
    rows: Sequence[Sequence[int]],
    request: Request,
    batch_size: int,
    options: Callable[[], dict[str, Any]],
) -> Iterator[tuple[int, torch.Tensor]]:
    """The length of some rows' padded prompts, and those with what was written. `options` are made for every batch and
    given to `generate`."""
    torch.manual_seed(request.seed)
    generate = cast(Any, model).generate
    for start in range(0, len(rows), batch_size):
        ids_BT, mask_BT = left_padded(rows[start : start + batch_size], model)
        stopping = [_StopTexts(model.tokenizer, request.stop, ids_BT.shape[1])] if request.stop else None
        output_BT = generate(
            ids_BT, attention_mask=mask_BT, stopping_criteria=stopping, **settings_of(model, request), **options()
        )
        yield ids_BT.shape[1], output_BT


def settings_of(model: ComposedForCausalLM, request: Request) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "do_sample": request.temperature > 0,
    }
    if request.temperature > 0:
        settings.update(temperature=request.temperature, top_p=request.top_p, top_k=0)
    settings["pad_token_id"] = pad_id(model)
    return settings


def pad_id(model: ComposedForCausalLM) -> int:
    ends = model.config.eos_token_id or [0]
    pad = model.generation_config.pad_token_id
    return pad if pad is not None else ends[0]


def left_padded(rows: Sequence[Sequence[int]], model: ComposedForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    longest, pad = max(map(len, rows)), pad_id(model)
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=model.device), torch.tensor(mask, device=model.device)


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop text begins."""
    return min((text.find(stop) for stop in stops if stop in text), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop text."""
    starts = (stop[:size] for stop in stops for size in range(1, len(stop)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


class _StopTexts(StoppingCriteria):
    """Rows end when a stop text stands in what they wrote. It reads the text itself, so it works for every tokenizer:
    the library's own criterion reads the vocabulary, and fails where a normaliser changes the case."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt_length: int):
        self.tokenizer, self.stops, self.prompt_length = tokenizer, stops, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self.tokenizer.batch_decode(input_ids[:, self.prompt_length :], skip_special_tokens=True)
        found = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(found, device=input_ids.device)


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
