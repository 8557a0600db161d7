"""The reference: Hugging Face's `generate` on the composed model, for rows of token ids. Slow, and knows every setting
of a generation config. What `--engine reference` means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from ..model import ComposedForCausalLM
from .options import TextOptions
from .stops import StopTexts
from .stream import Streamer


def by_reference(
    model: ComposedForCausalLM,
    rows: Sequence[Sequence[int]],
    options: TextOptions,
    batch_size: int,
    streamer: Streamer | None = None,
) -> Iterator[list[int]]:
    """Yield the new tokens of each row, in order; padding may follow the end."""
    torch.manual_seed(options.seed)
    generate = cast(Any, model).generate
    for start in range(0, len(rows), batch_size):
        ids_BT, mask_BT = left_padded(rows[start : start + batch_size], model)
        stopping = [StopTexts(model.tokenizer, options.stop, ids_BT.shape[1])] if options.stop else None
        output_BT = generate(
            ids_BT,
            attention_mask=mask_BT,
            stopping_criteria=stopping,
            streamer=streamer,
            **settings_of(model, options),
        )
        yield from output_BT[:, ids_BT.shape[1] :].tolist()


def settings_of(model: ComposedForCausalLM, options: TextOptions) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "do_sample": options.temperature > 0,
    }
    if options.temperature > 0:
        settings.update(temperature=options.temperature, top_p=options.top_p, top_k=0)
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
