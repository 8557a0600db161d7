"""Engines for rows of token ids: large enough for them, and only where they write what the reference would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..engine.engine import Engine
from ..engine.speculation import Speculation
from ..errors import EngineError
from ..model import ComposedForCausalLM

WORTH_COMPILING = 5_000  # steps; for fewer, compiling takes longer than it saves
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
    """List what the generation config asks for and only the reference can do."""
    return sorted(key for key, plain in PLAIN.items() if getattr(model.generation_config, key, None) not in plain)


def engine_for(
    model: ComposedForCausalLM,
    sizes: Sequence[tuple[int, int]],
    batch_size: int = 8,
    speculation: Speculation | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Engine | None:
    """Make an engine with room for texts of these sizes: tokens of the prompt, and new ones. None: only the reference
    can write them, and `note` is told why."""
    try:
        if unknown := unusual_settings(model):
            raise EngineError(f"the generation config sets {', '.join(unknown)}, which the fast path does not know")
        slots = max(1, min(batch_size, len(sizes)))
        longest = max((prompt + new for prompt, new in sizes), default=1)
        compiled = sum(new for _, new in sizes) >= WORTH_COMPILING * slots
        return Engine(model, slots, longest, compiled=compiled, speculation=speculation)
    except EngineError as error:
        note(str(error))
        return None
