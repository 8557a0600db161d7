"""One adapter for each request, chosen inside vLLM's engine: the same member as the reference's router."""

from __future__ import annotations

from typing import Any

import pytest

from tessellm.vllm.adapters import engine_options
from tessellm.vllm.config import member_sources

from engines import (
    Composition,
    assert_same,
    assert_same_routes,
    chats,
    composition,
    prompts,
    routed_engine,
    vllm_routes,
    vllm_says,
)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return composition(tmp_path_factory.mktemp("routed"), "adapters", "default")


def test_routes_are_the_references(composed: Composition) -> None:
    """In chunks, with and without a template, while other requests are answered, and when all were read before."""
    asked = [*chats(200), *prompts(200, 60)]
    expected = composed.reference.route(asked)
    assert len({route.selected for route in expected}) == 3
    members = composed.reference.config.member_names
    with routed_engine(composed.folder, max_num_batched_tokens=96, max_num_seqs=16) as llm:
        for _ in range(2):
            assert_same_routes(expected, vllm_routes(llm, members, asked))
        steps = watch_steps(llm)
        vllm_routes(llm, members, asked[:3])
        assert steps
        assert set(steps) == {(True, False)}
        steps.clear()
        alone = vllm_says(llm, asked[:20])
        assert set(steps) == {(False, True)}
        assert_same(vllm_says(llm, asked[:20]), alone, 20)


def watch_steps(llm: Any) -> list[tuple[bool, bool]]:
    """Of every step from now on: whether inputs are read, and whether CUDA graphs may be replayed."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    dispatcher, tap = worker.model_runner.cudagraph_dispatcher, worker.routes.tap
    dispatcher.keys_initialized = True
    dispatch, steps = dispatcher.dispatch, []

    def watched(*arguments: Any, **options: Any) -> Any:
        steps.append((tap.wanted, dispatcher.keys_initialized))
        return dispatch(*arguments, **options)

    dispatcher.dispatch = watched
    return steps


def test_options_name_a_rank_that_vllm_has(composed: Composition) -> None:
    config = composed.reference.config
    options = engine_options(config, composed.folder, member_sources(config, composed.folder))
    assert options["max_lora_rank"] == 8
    assert options["max_loras"] == options["max_cpu_loras"] == 2


def test_preempted_prompts_are_routed(composed: Composition) -> None:
    """With a cache too small for all, requests lose what was read of them and are read anew."""
    asked = chats(40)
    members = composed.reference.config.member_names
    with routed_engine(composed.folder, max_num_batched_tokens=64, kv_cache_memory_bytes=600_000) as llm:
        assert_same_routes(composed.reference.route(asked), vllm_routes(llm, members, asked))
