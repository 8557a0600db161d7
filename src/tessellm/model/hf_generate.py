"""What Hugging Face's `generate` asks of a composition: how long a text may get, a cache for each member, particles."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import GenerationMixin

from ..rules import Rule
from .cache import ComposedCache
from .temperature import check_temperature


class ComposedGenerationMixin(GenerationMixin):
    """`GenerationMixin` for a model of several members, and named so: by the name Hugging Face knows what generates."""

    config: Any  # a ComposedConfig
    members: nn.ModuleDict
    rule: Rule

    def generate(self, *args: Any, particles: int | None = None, **kwargs: Any) -> Any:
        """As of any Hugging Face model. With `particles=N`, drawn from C by Monte Carlo: see particles.py."""
        if particles is None:
            return GenerationMixin.generate(cast(Any, self), *args, **kwargs)
        from .particle_generation import generate

        return generate(cast(Any, self), particles, *args, **kwargs)

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
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            GenerationMixin._prepare_cache_for_generation(cast(Any, self), generation_config, model_kwargs, *arguments)
            return
        caches = []
        for member in self.members.values():
            prepared: dict[str, Any] = {}
            cast(Any, member)._prepare_cache_for_generation(generation_config, prepared, *arguments)
            caches.append(prepared["past_key_values"])
        cache = model_kwargs["past_key_values"] = ComposedCache(caches, self.rule)
        if generation_config.is_assistant:  # what it drafts may be taken back
            cache.activate_past_recording()
