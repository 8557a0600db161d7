"""The CPU's decoder computes what the group's module computes: deltas, windows, biases, packs, any mix of members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import tessellm
from tessellm.engine.cpu.decoder import SKEW, runs_of
from tessellm.engine.members.branches import BranchTokens, branch_logp
from tessellm.engine.members.groups import make_groups
from tessellm.rules import normalised

from conftest import COMMON, VOCAB, perturbed
from decoding_cases import composition

SLOTS, CONTEXT = 3, 40


def prefilled(model: Any) -> Any:
    """The group of the base, with branches of all its members in all slots."""
    group = make_groups(model, SLOTS, CONTEXT, False)[0]
    ids = [5 + (7 * n) % 50 for n in range(20)]
    for slot in range(SLOTS):
        for member in group.members:
            branch_logp([group], [BranchTokens(member, slot, ids[: 12 + slot], 0)])
    return group


def both(group: Any, branches: list[BranchTokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same step by the decoder and by the module."""
    fast = torch.cat(branch_logp([group], branches))
    decoder, group.decoder = group.decoder, None
    slow = torch.cat(branch_logp([group], branches))
    group.decoder = decoder
    return fast, slow


@pytest.mark.parametrize("kind", ["llama", "qwen2", "adapters"])
def test_a_step_equals_the_module(kind: str, tmp_path: Any):
    group = prefilled(composition(kind, tmp_path))
    assert group.decoder is not None
    branches = [BranchTokens(member, slot, [9 + slot], 12 + slot) for slot in range(SLOTS) for member in group.members]
    for some in (branches[:1], branches[-1:], branches[::2], branches):
        fast, slow = both(group, some)
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


FAR = 11 + SKEW


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("kv_rows", "positions", "runs"),
    [
        ([4], [10], 1),
        ([1, 3, 5], [10, 12, 10], 1),
        ([0, 1], [10, 10], 1),
        ([0, 1, 3], [9, 9, 10], 3),
        ([3, 1], [9, 9], 2),
        ([0, 1], [10, FAR], 2),
    ],
)
def test_rows_attend_together_where_they_lie_and_end_alike(
    kv_rows: list[int], positions: list[int], runs: int, window: int | None
):
    found = runs_of(kv_rows, positions, window)
    assert len(found) == runs
    for run in found:
        own, cells = range(len(kv_rows))[run.rows], torch.arange(FAR + 1)[run.cells]
        assert list(range(6))[run.kv] == [kv_rows[row] for row in own]
        for place, row in enumerate(own):
            seen = cells if run.seen_R11C is None else cells[run.seen_R11C[place, 0, 0]]
            first = 0 if window is None else positions[row] - window + 1
            assert seen.tolist() == list(range(first, positions[row] + 1))


def test_a_sliding_window_is_kept():
    config = transformers.MistralConfig(
        vocab_size=VOCAB, sliding_window=8, head_dim=8, **{**COMMON, "max_position_embeddings": CONTEXT}
    )
    torch.manual_seed(0)
    base = transformers.MistralForCausalLM(config).eval()
    group = prefilled(tessellm.compose(base, {"e": perturbed(base, 1)}, rule="product"))
    assert group.decoder is not None
    fast, slow = both(group, [BranchTokens(0, slot, [9], 12 + slot) for slot in range(SLOTS)])
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_packed_members_equal_their_modules(members_dir: Any, dtype: str):
    model = tessellm.compose(members_dir / "base", {"math": members_dir / "lora_math"}, rule="product", dtype=dtype)
    group = prefilled(model)
    assert group.decoder is not None
    fast, slow = both(group, [BranchTokens(member, slot, [9], 12) for slot in range(2) for member in (0, 1)])
    torch.testing.assert_close(fast, slow, rtol=0.05, atol=0.08)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_other_architectures_run_by_their_modules(kind: str, tmp_path: Any):
    group = prefilled(composition(kind, tmp_path))
    assert group.decoder is None
    assert normalised(torch.stack(branch_logp([group], [BranchTokens(0, 0, [9], 12)]))).isfinite().any()
