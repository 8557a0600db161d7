"""Members of every kind, linked or stored, weighted, with every policy for stopping; and what they cost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tessellm
from tessellm.inspect.planning import GIB, read_needs

from conftest import character_tokenizer, save_lora, save_member
from engines import (
    Composition,
    assert_same,
    chats,
    composition,
    engine,
    member,
    prompts,
    transformers_says,
    vllm_says,
)


def inner_model(llm: Any) -> Any:
    """The composed model inside an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def assert_equal(composed: Composition, **options: Any) -> None:
    asked = chats()
    with engine(composed.folder, **options) as llm:
        assert_same(vllm_says(llm, asked), transformers_says(composed.reference, asked))


@pytest.mark.parametrize("rule", ["product", "mixture"])
def test_self_contained_with_weights(rule: str, tmp_path: Path) -> None:
    """Tensors in common lie in files of their own; one expert is steered away from; the mean decides about stopping."""
    weights = {"math": 0.7, "coding": -0.4, "full": 0.5}
    composed = composition(tmp_path, "lora", rule, self_contained=True, weights=weights)
    shutil.rmtree(tmp_path / "members")
    assert_equal(composed)


def test_adapters_that_are_more_than_two_matrices_a_layer(tmp_path: Path) -> None:
    """DoRA, an adapter with a whole module, and plain LoRA of one base of another architecture."""
    base = save_member(member("qwen2", 0), tmp_path / "base", character_tokenizer())
    experts = {
        "dora": save_lora(base, tmp_path / "dora", 1, use_dora=True),
        "whole": save_lora(base, tmp_path / "whole", 2, modules_to_save=["lm_head"]),
        "plain": save_lora(base, tmp_path / "plain", 3, target_modules=["k_proj", "up_proj"]),
    }
    reference = tessellm.compose(str(base), {name: str(path) for name, path in experts.items()}, rule="product")
    reference.save_pretrained(tmp_path / "composed")
    asked = prompts()
    with engine(tmp_path / "composed") as llm:
        assert_same(vllm_says(llm, asked), transformers_says(reference, asked))
        assert [each.names for each in inner_model(llm).members] == [["base", "plain"], ["dora"], ["whole"]]


def test_adapters_share_one_base_and_caches_are_as_planned(tmp_path: Path) -> None:
    composed = composition(tmp_path, "lora", "mixture")
    needs = read_needs(str(composed.folder))
    with engine(composed.folder, block_size=32) as llm:
        model = inner_model(llm)
        assert [each.names for each in model.members] == [["base", "math", "coding"], ["full"]]
        base, full = (sum(p.numel() for p in each.model.parameters()) for each in model.members)
        assert base == full  # adapters are beside the parameters, in buffers as large as themselves
        most = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        ranges = model.members[0].config.compilation_config.get_compile_ranges()
        assert [each.end for each in ranges] == [most, 3 * most]  # adapters are rows of their base's batch
        caches = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        assert caches.num_blocks == GIB // (32 * needs.kv_bytes)


def test_states_are_carried_not_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule begins anew once a prompt, not once a token."""
    from tessellm.vllm.state import States

    looked, replay = [], States.replay

    def counted(self: States, step: Any, row: int, last: int) -> Any:
        looked.append(last)
        return replay(self, step, row, last)

    monkeypatch.setattr(States, "replay", counted)
    composed = composition(tmp_path, "llama", "mixture")
    asked = chats(20, longest=120)
    with engine(composed.folder, enable_prefix_caching=False) as llm:
        looked.clear()
        said = vllm_says(llm, asked, new=40)
    assert sorted(looked) == sorted(len(row) - 1 for row in asked)
    assert sum(len(each.tokens) for each in said) > 10 * len(asked)
