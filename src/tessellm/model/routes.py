"""What the router says of prompts: `model.route`. Only the base runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PromptError, RecipeError
from ..routing.route import Route, RoutedPrompt
from ..vocabulary.chats import encode_chat

if TYPE_CHECKING:
    from .composed import ComposedForCausalLM

EXPECTED = "a text, messages (mappings with role and content), token ids, or a list of these"


def route(model: ComposedForCausalLM, prompts: Any) -> Route | list[Route]:
    """Return the route of one prompt, or of each in a list. A text is one user message of the chat template."""
    if _is_one(prompts):
        return route_rows(model, [encode_prompt(model, prompts, "the prompt")])[0]
    if not isinstance(prompts, Sequence):
        raise PromptError(f"expected {EXPECTED}; got {type(prompts).__name__}")
    return route_rows(model, [encode_prompt(model, prompt, f"prompt {n}") for n, prompt in enumerate(prompts, 1)])


def route_rows(model: ComposedForCausalLM, rows: Sequence[Sequence[int]]) -> list[Route]:
    """Return the routes of prompts given as token ids."""
    read = read_rows(model, rows)
    assert model.routing is not None
    return model.routing.routes(read)


@torch.inference_mode()
def read_rows(model: ComposedForCausalLM, rows: Sequence[Sequence[int]]) -> list[RoutedPrompt]:
    """Read prompts given as token ids by the base, those of about one length together."""
    from ..routing.calibration import batches  # later: it brings tessellm.members, which brings this

    routing = model.routing
    if routing is None:
        raise RecipeError(f"the rule {model.rule.name!r} routes nothing; the rule mixture does")
    if routing.router is None:
        raise RecipeError(
            "this composition has no router: its notes say why (tessellm inspect). Without one, the prior of all "
            "prompts is the same"
        )
    found: dict[int, RoutedPrompt] = {}
    with routing.router.tap(model.base) as tap:
        for batch in batches(rows):
            longest = max(len(rows[place]) for place in batch)
            ids_BT = torch.tensor([[*rows[place], *[0] * (longest - len(rows[place]))] for place in batch])
            base: Any = model.base.base_model
            base(input_ids=model.alignments["base"].to_member(ids_BT).to(model.base.device), use_cache=False)
            for place, energy_TK in zip(batch, tap.take(), strict=True):  # padding comes last: no token before sees it
                ids = list(rows[place])
                found[place] = RoutedPrompt(ids, model.markers.read(ids).user, energy_TK[: len(ids)])
    return [found[place] for place in range(len(rows))]


def _is_one(prompt: Any) -> bool:
    if isinstance(prompt, Tensor):
        return prompt.ndim == 1
    return isinstance(prompt, str) or (
        isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping | int)
    )


def encode_prompt(model: ComposedForCausalLM, prompt: Any, what: str) -> list[int]:
    """Return the token ids of one prompt that nothing is wrong with."""
    if not _is_one(prompt):
        raise PromptError(f"{what}: expected {EXPECTED}; got {'nothing' if prompt == [] else type(prompt).__name__}")
    is_text = isinstance(prompt, str) or isinstance(prompt[0], Mapping)
    ids = _encode_text(model, prompt, what) if is_text else [int(token) for token in prompt]
    if not ids:
        raise PromptError(f"{what} is empty")
    wrong = next((token for token in ids if not 0 <= token < model.config.vocab_size), None)
    if wrong is not None:
        raise PromptError(f"{what}: there is no token {wrong}; the vocabulary has {model.config.vocab_size}")
    model.config.check_room(len(ids), 0, what)
    return ids


def _encode_text(model: ComposedForCausalLM, prompt: str | Sequence[Mapping[str, str]], what: str) -> list[int]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise PromptError("no member came with a tokenizer, so text cannot be read. Give token ids")
    if isinstance(prompt, str) and not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not tokenizer.chat_template:
        raise PromptError("no member has a chat template, which messages need. Give a text")
    if any(not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn) for turn in turns):
        raise PromptError(f"{what}: a message is a mapping with the keys role and content")
    try:
        return encode_chat(tokenizer, turns)
    except Exception as error:  # a template raises what it likes
        raise PromptError(f"{what}: the chat template does not take these messages: {error}") from error
