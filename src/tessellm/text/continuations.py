"""New tokens for rows of token ids, by the fast path or the reference model, with engines that have room for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from transformers import TextStreamer

from ..decoding.engine import Engine
from ..decoding.sampling import Sampling
from ..decoding.speculation import Speculation
from ..errors import EngineError, GenerationError
from ..model import ComposedForCausalLM
from .requests import Request
from .stops import StopTexts, stop_at_text

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
        stopping = [StopTexts(model.tokenizer, request.stop, ids_BT.shape[1])] if request.stop else None
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
