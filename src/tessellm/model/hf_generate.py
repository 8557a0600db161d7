"""What Hugging Face's `generate` asks of a composition: how long a text may get, a cache for each member."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import GenerationMixin

from ..rules import ComposedRule
from .cache import ComposedCache
from .temperature import check_temperature


class ComposedGenerationMixin(GenerationMixin):
    """`GenerationMixin` for a model of several members, and named so: by the name Hugging Face knows what generates."""

    config: Any  # a ComposedConfig
    members: nn.ModuleDict
    rule: ComposedRule
    markers: Any  # ChatMarks

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As of any Hugging Face model. The answer begins behind the prompt, or goes on in a cache that holds one."""
        if self.rule.routed is not None and kwargs.get("answer_start") is None:
            ids_BT = inputs if inputs is not None else kwargs.get("input_ids")
            kwargs["answer_start"] = self._answer_start(ids_BT, kwargs.get("past_key_values"), kwargs)
        return GenerationMixin.generate(cast(Any, self), inputs, *args, **kwargs)

    def _answer_start(self, ids_BT: Tensor | None, cache: Any, given: dict[str, Any]) -> int | Tensor:
        """Return the column at which the answer to these prompts begins: behind them, unless they go on an answer."""
        length = 1 if ids_BT is None else ids_BT.shape[1]
        if not isinstance(cache, ComposedCache):
            return length
        mask_BT = given.get("attention_mask")
        whole = length if mask_BT is None else mask_BT.shape[1]  # with the cached tokens, which the ids may leave out
        begun, mark = cache.transcript.answer_start, self.markers.answer
        asked = ids_BT is not None and bool(mark) and ids_BT[:, -len(mark) :].tolist() == [list(mark)] * len(ids_BT)
        return whole if begun is None or asked else begun

    def _prepare_generated_length(  # type: ignore[override]
        self, generation_config: Any, has_default_max_length: bool, input_ids_length: int, **kwargs: Any
    ) -> Any:
        """How many tokens `generate` may write; more than the context holds are refused before the first."""
        if has_default_max_length and not self.config.max_position_embeddings:  # no limit; read there as one of 0
            generation_config.max_new_tokens = generation_config.max_new_tokens or generation_config.max_length
        prepared = GenerationMixin._prepare_generated_length(
            cast(Any, self),
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            input_ids_length=input_ids_length,
            **kwargs,
        )
        self.config.check_room(input_ids_length, max(1, prepared.max_length - input_ids_length))
        return prepared

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict,
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """What `generate` needs for one model, prepared for each member by itself."""
        if generation_config.do_sample and generation_config.temperature is not None:
            check_temperature(generation_config.temperature)
        arguments = (generation_mode, batch_size, max_cache_length)
        start = model_kwargs.get("answer_start")
        if isinstance(given := model_kwargs.get("past_key_values"), ComposedCache):
            given.transcript.answer_start = model_kwargs.pop("answer_start", None)
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            GenerationMixin._prepare_cache_for_generation(cast(Any, self), generation_config, model_kwargs, *arguments)
            return
        caches = []
        for member in self.members.values():
            prepared: dict[str, Any] = {}
            cast(Any, member)._prepare_cache_for_generation(generation_config, prepared, *arguments)
            caches.append(prepared["past_key_values"])
        cache = model_kwargs["past_key_values"] = ComposedCache(caches, self.rule, start)
        model_kwargs.pop("answer_start", None)  # which the cache knows now; an assistant would not
        if generation_config.is_assistant:  # what it drafts may be taken back
            cache.activate_past_recording()
