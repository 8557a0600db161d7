"""`particles.generate(model, N, ...)`: `particles.sample`, in the arguments of Hugging Face's `generate`.

C says what is sampled, so only options that do not bend it are taken: how long, where to end, how many. Random numbers
come from torch's global generator, as for any `generate`: `torch.manual_seed` makes a run repeatable.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from tessellm.errors import GenerationError
from tessellm.model.composed import ComposedForCausalLM

from . import sampling as monte_carlo

TAKEN = ("max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "num_return_sequences")
NEUTRAL: dict[str, tuple[Any, ...]] = {  # said aloud, these change nothing
    "do_sample": (True,),
    "num_beams": (1,),
    "temperature": (1, None),
    "top_k": (0, None),
    "top_p": (1, None),
    "use_cache": (True, None),
}
DEFAULT_NEW_TOKENS = 20  # as Hugging Face's


def generate(
    model: ComposedForCausalLM,
    particles: int,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Token ids [prompts · num_return_sequences, prompt + new tokens]: N particles a prompt, drawn by their weights."""
    asked = generation_config.to_diff_dict() if generation_config is not None else {}
    asked = {key: value for key, value in asked.items() if key != "transformers_version"} | options
    _refuse_what_bends(asked)
    prompt = inputs if inputs is not None else input_ids
    if prompt is None:
        raise GenerationError("particles continue a prompt: expected input_ids of shape [batch, length]; got none")
    own = model.generation_config
    chosen = {key: asked[key] if asked.get(key) is not None else getattr(own, key, None) for key in TAKEN}
    steps = chosen["max_new_tokens"]
    if steps is None:
        steps = chosen["max_length"] - prompt.shape[1] if chosen["max_length"] else DEFAULT_NEW_TOKENS
    found = monte_carlo.sample(
        model,
        prompt,
        attention_mask,
        particles=particles,
        max_new_tokens=steps,
        tokens=monte_carlo.EndTokens(chosen["eos_token_id"], chosen["pad_token_id"]),
    )
    return found.draw(chosen["num_return_sequences"] or 1).flatten(0, 1)


def _refuse_what_bends(asked: dict[str, Any]) -> None:
    bent = {key: value for key, value in asked.items() if key not in TAKEN and value not in NEUTRAL.get(key, (None,))}
    if bent:
        given = ", ".join(f"{key}={value!r}" for key, value in bent.items())
        raise GenerationError(
            f"with particles, generate samples the members' joint law as it is, at temperature 1, and takes only "
            f"{', '.join(TAKEN)}; got {given}. Leave that out, or leave out particles to decode by the rule"
        )
