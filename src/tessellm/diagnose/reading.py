"""Texts of a diagnosis, traced batch by batch: prompts are continued, texts are read as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..model import ComposedForCausalLM
from ..text.options import TextOptions
from ..text.prompts import encode_examples, encode_prompt
from ..text.reference import left_padded, settings_of
from .kept import KeptRows
from .prompts import Example
from .trace import Trace, trace, trace_generation


def batches(examples: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """In order; prompts to be continued and texts to be read do not share a batch."""
    part: list[Example] = []
    for example in examples:
        if part and (len(part) == size or (part[0].text is None) != (example.text is None)):
            yield part
            part = []
        part.append(example)
    yield part


def traced(
    model: ComposedForCausalLM, examples: Sequence[Example], options: TextOptions, kept: KeptRows | None = None
) -> list[Trace]:
    """One trace per text, without padding; the prompt's tokens are there but not scored. What members say of texts that
    are read as they are is kept in `kept`."""
    if examples[0].text is None:
        rows = [encode_prompt(model, example.prompt, "the prompt", options.chat) for example in examples]
        starts = [len(row) for row in rows]
        ids_BT, mask_BT = left_padded(rows, model)
        _, written = trace_generation(model, ids_BT, mask_BT, **settings_of(model, options))
        mask_BT = torch.cat([mask_BT.bool().cpu(), written.scored[:, ids_BT.shape[1] :]], 1)
    else:
        encoded = encode_examples(model, [(example.prompt, example.text or "") for example in examples], options.chat)
        starts = [start for _, start in encoded]
        ids_BT, mask_BT = left_padded([row for row, _ in encoded], model)
        written = trace(model, ids_BT, mask_BT, also=kept and kept.begin())
        mask_BT = mask_BT.bool().cpu()
    return [written.text(number, mask_BT[number], start) for number, start in enumerate(starts)]
