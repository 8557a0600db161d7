"""Prompts read by the fused kernels: as the modules read them. In Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1 (make test-kernels), or on a GPU", allow_module_level=True)

from tessellm.engine.cuda.fused import layers, products, prompts
from tessellm.engine.cuda.fused.decoder import fuse
from tessellm.engine.cuda.fused.library import multiply
from tessellm.engine.cuda.slot_pass import TokenBatch, member_logits
from tessellm.engine.engine import Engine
from tessellm.engine.members import groups
from tessellm.engine.sampling import Sampling
from tessellm.model.variants import with_rule

from decoding_cases import prompts as texts
from decoding_cases import stacking
from fused_cases import composition, feed, grouped


def rows_of(starts: list[int], counts: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of rows that begin behind earlier cells, padded on the left."""
    token_BT = torch.randint(4, 60, (len(starts), width), generator=torch.Generator().manual_seed(5))
    position_BT = torch.full((len(starts), width), -1)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        position_BT[row, width - count :] = torch.arange(start, start + count)
    return token_BT, position_BT


@pytest.mark.parametrize("own_rows", [0, 4096])
@pytest.mark.parametrize(
    ("kind", "starts", "counts", "width", "keep"),
    [
        ("llama", [0, 20, 9], [19, 11, 0], 24, 7),  # padding, behind earlier cells, padding alone
        ("qwen2", [0, 5], [9, 13], 13, 1),
        ("gemma2", [30, 0], [13, 3], 16, 9),  # windows of 16
        ("adapters", [0, 12], [15, 9], 16, 16),
    ],
)
@torch.no_grad()
def test_prompts_equal_the_modules(
    kind: str, starts: list[int], counts: list[int], width: int, keep: int, own_rows: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Products by our kernels and by the library; no length is a multiple of a block."""
    monkeypatch.setattr(products, "OWN_WIDE_ROWS", own_rows)
    monkeypatch.setattr(prompts, "OWN_LOGIT_ROWS", own_rows)
    monkeypatch.setattr(layers, "SHORTEST_SUM", 32)
    group, fused = grouped(composition(kind, tmp_path, layers=2 if kind == "gemma2" else 1), 4, 60)
    feed(group, [1])
    token_BT, position_BT = rows_of(starts, counts, width)
    slot_B = torch.tensor([2, 0, 1])[: len(starts)]
    for start, slot in zip(starts, slot_B.tolist(), strict=True):
        text = torch.randint(4, 60, (1, max(start, 1)), generator=torch.Generator().manual_seed(slot))
        read = max(start, 1)
        member_logits([group], TokenBatch(text, torch.arange(read)[None], torch.tensor([slot]), read, 1))
    cells = int(position_BT.max()) + 1
    found_MBTV = fused.read(token_BT.expand(3, -1, -1), position_BT, slot_B, keep)
    buffers = [*group.cache.key_RHCD.values(), *group.cache.value_RHCD.values()]
    written = [buffer[:, :, :-1].clone() for buffer in buffers]
    wanted_MBTV = torch.stack(member_logits([group], TokenBatch(token_BT, position_BT, slot_B, cells, keep)))
    assert found_MBTV.shape == wanted_MBTV.shape
    real_BT = position_BT[:, -keep:] >= 0
    torch.testing.assert_close(found_MBTV[:, real_BT], wanted_MBTV[:, real_BT], atol=2e-4, rtol=1e-4)
    assert found_MBTV.isfinite().all()
    for buffer, mine in zip(buffers, written, strict=True):
        torch.testing.assert_close(mine, buffer[:, :, :-1], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_half_precision_reads_the_same(tmp_path: Path) -> None:
    """Large blocks of rows with deltas, and blocks of queries; up to rounding."""
    composed = composition("adapters", tmp_path, layers=1).half()
    group, fused = grouped(composed, 2, 80)
    feed(group, [3])
    token_BT, position_BT = rows_of([3], [50], 64)
    found = fused.read(token_BT.expand(3, -1, -1), position_BT, torch.tensor([0]), 9)
    wanted = torch.stack(member_logits([group], TokenBatch(token_BT, position_BT, torch.tensor([0]), 53, 9)))
    torch.testing.assert_close(found, wanted.float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("large", [True, False])
@torch.no_grad()
def test_products_with_deltas_in_large_blocks(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all members in blocks of 128, part of the last one; gate and up, and their reader."""
    from random_models import with_deltas

    from conftest import build_model

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    base = build_model("llama", **sizes).half()
    members = [base, *(with_deltas(base, 8) for _ in range(2))]
    monkeypatch.setattr(layers, "LARGE_DELTA_ROWS", 64 if large else 1 << 20)
    own: list[Any] = [member.model.layers[0].mlp for member in members]
    mlp = layers.FusedLinear([[each.gate_proj, each.up_proj] for each in own], glu=1)
    down = layers.FusedLinear([[each.down_proj] for each in own], splits=True)
    x_MBK = torch.randn(3, 50, 128, dtype=torch.float16)
    made = mlp.low_for(down, 3, 50)
    assert (made is None) == large
    found = mlp(x_MBK, None, made)[0]
    layout = layers.layout_of(mlp.weights, layers.LaunchRows(1, 150, 3))
    assert (layout.settings["BLOCK_R"] == layers.LARGE) == large
    wanted = torch.stack([each.act_fn(each.gate_proj(x)) * each.up_proj(x) for each, x in zip(own, x_MBK, strict=True)])
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
    torch.testing.assert_close(multiply(mlp, x_MBK), wanted, atol=0.02, rtol=0.02)
    wanted = torch.stack([each.down_proj(x) for each, x in zip(own, found, strict=True)])
    torch.testing.assert_close(down(found, made).float().sum(0), wanted.float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(multiply(down, found), wanted, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("kind", "rule"), [("gemma2", "product"), ("adapters", "mixture")])
def test_an_engine_reads_prompts_by_the_kernels(
    kind: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts at once, in pieces, and behind what another left; the modules read none of them."""
    composed = with_rule(composition(kind, tmp_path, layers=1), rule)
    given = [text[:12] for text in texts(2, 40)]
    given.append(given[0] + given[1])
    asked = Sampling(2, ignore_end=True)
    expected = Engine(composed, slots=2).generate(given, asked)
    monkeypatch.setattr(groups, "_fused", fuse)
    with stacking():
        engine = Engine(composed, slots=2)
    engine.controller.chunk = 8
    calls: list[Any] = []
    (group,) = engine.executor.groups
    monkeypatch.setattr(group.module, "forward", lambda *given, **named: calls.append(named))
    found = engine.generate(given, asked)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert not calls
