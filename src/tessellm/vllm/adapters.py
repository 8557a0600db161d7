"""Which compositions vLLM serves by its own multi-LoRA, one adapter for each request, and the options that it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ..checkpoint import read_own_tensors, saved_alignment
from ..members.sources import Source
from ..model import ComposedConfig
from ..routing import BASE
from ..rules import Mixture
from .config import has_router, make_rule
from .decision import FOLDER
from .lora import plain_ranks
from .versions import MaxLoRARanks

AT_ONCE = 8  # adapters in one batch, unless the user says otherwise
BLOCK = 32  # tokens: prompts are read twice, and what the base has read of a prompt is found by whole blocks
WORKER = "tessellm.vllm.worker.RoutedWorker"
MIDDLEWARE = "tessellm.vllm.requests.RoutedRequests"


def obstacle(config: ComposedConfig, folder: Path, places: Mapping[str, Source]) -> str | None:
    """Why a composition cannot be served by one adapter for each request; None: it can."""
    rule = make_rule(config).routed
    if rule is None or replace(rule, weights=None) != Mixture():
        return "its rule is not the default"
    if set(config.weights) != {1.0}:
        return "its experts have weights"
    if not has_router(config, folder) or not config.routing.get("enabled", True):
        return "it has no router"
    if folder.name in config.member_names:
        return "its folder has the name of a member"
    tensors = read_own_tensors(folder)
    for entry in config.members[1:]:
        name = entry["name"]
        if entry["kind"] != "adapter":
            return f"expert {name!r} is a full model"
        ranks = plain_ranks(places[name])
        if ranks is None:
            return f"expert {name!r} is more than LoRA of linear layers"
        if max(ranks) > largest_rank():
            return f"expert {name!r} has rank {max(ranks)}, and vLLM takes {largest_rank()} at most"
        if saved_alignment(tensors, name, config.vocab_size).member_id_V is not None:
            return f"expert {name!r} has token ids of its own"
    return None


def largest_rank() -> int:
    return max(get_args(MaxLoRARanks))


def engine_options(config: ComposedConfig, folder: Path, places: Mapping[str, Source]) -> dict[str, Any]:
    """What `LLM(**options)` and the server are given."""
    experts = config.member_names[1:]
    rank = max(max(plain_ranks(places[name]) or [1]) for name in experts)
    return {
        "model": str(places[BASE].directory),
        "tokenizer": str(folder),
        "enable_lora": True,
        "max_lora_rank": min(size for size in get_args(MaxLoRARanks) if size >= rank),
        "max_loras": min(len(experts), AT_ONCE),
        "max_cpu_loras": len(experts),
        "block_size": BLOCK,
        "worker_cls": WORKER,
        "additional_config": {FOLDER: str(folder)},
    }


def server_arguments(config: ComposedConfig, folder: Path, places: Mapping[str, Source]) -> list[str]:
    """The same as words of a command line, with the adapters, and what routes requests."""
    words = []
    for name, value in engine_options(config, folder, places).items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    modules = [
        json.dumps({"name": name, "path": str(places[name].directory), "base_model_name": BASE})
        for name in config.member_names[1:]
    ]
    return [*words, "--served-model-name", BASE, "--lora-modules", *modules, "--middleware", MIDDLEWARE]
