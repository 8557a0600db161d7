"""The vLLM plugin: a composition's folder, served by vLLM as one model.

vLLM finds `register` by its entry point (`vllm.general_plugins`) in every process that it starts. The rest is imported
only where a composition is loaded.

    config.py     what vLLM must know of a composition before it starts; what cannot be served is refused here
    members.py    one inner vLLM model a member; members that are LoRA adapters are rows of their base's batch
    lora.py       an adapter's matrices on the base's linear layers, sharded as those are
    model.py      ServedComposition: members, vocabulary, rule
    tap.py        the stored router, and the energies that it reads from the base's layers
    memory.py     the members' last hidden states and the energies, kept in the engine's own paged cache
    state.py      what `mixture` remembers, a request; rebuilt from that cache whenever it is not there
    server.py     `tessellm serve --engine vllm`
    versions.py   which vLLM this is written for
"""

from __future__ import annotations

ARCHITECTURE = "ComposedForCausalLM"


def register() -> None:
    """Make compositions known to vLLM. May be called more than once."""
    from .config import EngineLimits, SizedConfig
    from .versions import _CONFIG_REGISTRY, MODELS_CONFIG_MAP, ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:ServedComposition")
    _CONFIG_REGISTRY[SizedConfig.model_type] = SizedConfig
    MODELS_CONFIG_MAP[ARCHITECTURE] = EngineLimits
