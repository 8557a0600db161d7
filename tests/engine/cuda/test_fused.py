"""The fused step computes what the modules do. Its Triton kernels run here in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import build_model, perturbed, save_lora, save_member

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1 (make test-kernels), or on a GPU", allow_module_level=True)

import tessellm
from tessellm.engine.cuda.fused import decoder, layers, low, products
from tessellm.engine.cuda.fused.decoder import FusedDecoder, fuse
from tessellm.engine.cuda.slot_pass import TokenBatch, member_logits
from tessellm.engine.engine import Engine
from tessellm.engine.members import groups
from tessellm.engine.members.attention import SlotCache
from tessellm.engine.sampling import Sampling
from tessellm.members.adapters import share

from decoding_cases import stacking
from fused_cases import SIZES, by_modules, composition, feed, grouped
from speculation_cases import drafting


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of ours, however many rows there are."""
    monkeypatch.setattr(products, "OWN_WIDE_ROWS", 4096)


@pytest.mark.parametrize(
    ("kind", "lengths", "shortest_sum"),
    [("llama", [9, 40, 1], 512), ("qwen2", [9, 2], 512), ("gemma2", [33], 16), ("adapters", [9, 40], 16)],
)  # fmt: skip
@torch.no_grad()
def test_equals_the_modules(
    kind: str, lengths: list[int], shortest_sum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows and one, with sums in one piece and in several, cells in one piece and in several."""
    monkeypatch.setattr(layers, "SHORTEST_SUM", shortest_sum)
    composed = composition(kind, tmp_path, layers=2 if kind == "gemma2" else 1)
    group, fused = grouped(composed, 4, 120)
    slots = len(lengths)
    feed(group, lengths)
    token_B, position_B = torch.tensor([5, 6, 7])[:slots], torch.tensor(lengths)
    for step in range(2):
        cells = int(position_B.max()) + 1
        kept = [buffer.clone() for buffer in group.cache.key_RHCD.values()]
        found = fused(token_B.expand(3, -1)[..., None], position_B[:, None], 130 if step else cells)[:, :, 0]
        for buffer, old in zip(group.cache.key_RHCD.values(), kept, strict=True):
            assert not torch.equal(buffer, old)  # it wrote the cache itself
        wanted = by_modules(group, token_B[:, None], position_B[:, None], cells, 1)
        torch.testing.assert_close(found, torch.stack(wanted)[:, :, 0], atol=2e-4, rtol=1e-4)
        token_B, position_B = found[0].argmax(-1), position_B + 1


@pytest.mark.parametrize(("few_rows", "columns"), [(16, 16), (16, 128), (2, 32)])
@torch.no_grad()
def test_who_makes_an_input_makes_what_deltas_need_of_it(
    few_rows: int, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first layer needs a launch of its own, or each with many rows; members' columns in chunks."""
    monkeypatch.setattr(decoder, "FEW_ROWS", few_rows)
    monkeypatch.setattr(low, "MOST_COLUMNS", columns)
    composed = composition("adapters", tmp_path)
    group, fused = grouped(composed, 4, 200)
    feed(group, [150, 3])
    own_launches: list[int] = []
    alone = layers.FusedLinear._low

    def counting(self: Any, x_MBK: Any, deltas: Any) -> Any:
        own_launches.append(deltas.width)
        return alone(self, x_MBK, deltas)

    monkeypatch.setattr(layers.FusedLinear, "_low", counting)
    token_B, position_B = torch.tensor([5, 6]), torch.tensor([150, 3])
    found = fused(token_B.expand(3, -1)[..., None], position_B[:, None], 160)[:, :, 0]
    wanted = by_modules(group, token_B[:, None], position_B[:, None], 160, 1)
    torch.testing.assert_close(found, torch.stack(wanted)[:, :, 0], atol=2e-4, rtol=1e-4)
    assert len(own_launches) == (1 if few_rows == 16 else 4)  # queries, keys and values; gates in either layer


@pytest.mark.parametrize(
    ("rows_apart", "parts_apart", "least_parts", "pieces"),
    [(16, 32, 8, 7), (16, 1, 8, 9), (0, 32, 1, 6), (0, 32, 2, 6)],
)  # fmt: skip
@torch.no_grad()
def test_deltas_are_added_beside_the_sums_or_with_them(
    rows_apart: int, parts_apart: int, least_parts: int, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one program or several of their own, by all splits, by some, and by the first one."""
    monkeypatch.setattr(layers, "SHORTEST_SUM", 16)
    monkeypatch.setattr(layers, "ROWS_APART", rows_apart)
    monkeypatch.setattr(layers, "PARTS_APART", parts_apart)
    monkeypatch.setattr(layers, "LEAST_PARTS", least_parts)
    composed = composition("adapters", tmp_path, layers=1)
    group, fused = grouped(composed, 2, 64)
    feed(group, [9, 40])
    token_B, position_B = torch.tensor([5, 6]), torch.tensor([9, 40])
    launched, launch = [], layers.launch

    def counting(layout: Any, weights: Any, rows: Any, x: Any, y: Any, *given: Any) -> None:
        launched.append((layout.splits, len(y)))
        launch(layout, weights, rows, x, y, *given)

    monkeypatch.setattr(layers, "launch", counting)
    found = fused(token_B.expand(3, -1)[..., None], position_B[:, None], 64)[:, :, 0]
    wanted = by_modules(group, token_B[:, None], position_B[:, None], 64, 1)
    torch.testing.assert_close(found, torch.stack(wanted)[:, :, 0], atol=2e-4, rtol=1e-4)
    assert (6, pieces) in launched  # sums over the 96 inputs of down, whose three parts of low gate and up have made


@torch.no_grad()
def test_cells_in_splits_that_are_no_whole_blocks() -> None:
    """More cells than the most splits of a block each: of 96 cells here, in half precision read in blocks of 64."""
    settings = {"num_key_value_heads": 1, "max_position_embeddings": 2600, "num_hidden_layers": 1}
    base = build_model("llama", **SIZES, **settings).half()
    composed = tessellm.compose(base, {"e1": perturbed(base, 1)}, rule="product")
    group, fused = grouped(composed, 1, 2600)
    feed(group, [2500])
    found = fused(torch.tensor([[[5]], [[5]]]), torch.tensor([[2500]]), 2600)
    wanted = torch.stack(by_modules(group, torch.tensor([[5]]), torch.tensor([[2500]]), 2501, 1))
    torch.testing.assert_close(found, wanted.float(), atol=0.05, rtol=0)


@torch.no_grad()
def test_one_row_of_an_expert_that_drafts_has_its_deltas(tmp_path: Path) -> None:
    composed = composition("adapters", tmp_path, layers=1)
    group = groups.make_group(composed, (list(composed.members).index("e2"),), SlotCache(1, 1, 50))
    fused = fuse([composed.member("e2")], group.cache)
    assert fused is not None
    feed(group, [9])
    found = fused(torch.tensor([[[5]]]), torch.tensor([[9]]), 50)
    (wanted,) = by_modules(group, torch.tensor([[5]]), torch.tensor([[9]]), 10, 1)
    torch.testing.assert_close(found[0], wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("odd", [{"intermediate_size": 72}, {"mlp_bias": True}, {"transposed": True}])
def test_weights_that_kernels_would_misread_are_left_to_the_modules(odd: dict[str, Any]) -> None:
    """Rows that fill no block, biases inside an activation, rows that do not follow one another."""
    base = build_model("llama", **{**SIZES, **odd})
    if "transposed" in odd:
        projection = base.model.layers[0].mlp.down_proj
        projection.weight = torch.nn.Parameter(projection.weight.T.contiguous().T)
    assert fuse([base], SlotCache(1, 1, 50)) is None


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("odd", [{"use_dora": True}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_adapters_that_kernels_do_not_know_are_left_to_the_modules(odd: dict[str, Any], tmp_path: Path) -> None:
    home = save_member(build_model("llama", **SIZES), tmp_path / "base")
    composed = tessellm.compose(str(home), {"e1": str(save_lora(home, tmp_path / "e1", **odd))})
    assert fuse([composed.base], SlotCache(1, 1, 50)) is not None
    assert fuse([composed.member("e1")], SlotCache(1, 1, 50)) is None


@torch.no_grad()
def test_members_that_share_weights_have_biases_of_their_own() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    base = build_model("qwen2", **{**sizes, "num_attention_heads": 2, "num_key_value_heads": 1})
    other = share(base)
    for layer in other.model.layers:
        layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.randn(32))
    composed = tessellm.compose(base, {"e1": other}, rule="product")
    group, fused = grouped(composed, 2, 50)
    feed(group, [9, 4])
    token_BT, position_BT = torch.tensor([[5], [6]]), torch.tensor([[9], [4]])
    found = fused(token_BT.expand(2, -1, -1), position_BT, 50)
    wanted = torch.stack(by_modules(group, token_BT, position_BT, 10, 1))
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("own_rows", [16, 4096])
@torch.no_grad()
def test_a_step_of_many_texts_equals_the_modules(
    own_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than one block has, by a base and two adapters; products of the library, and of ours."""
    monkeypatch.setattr(products, "OWN_WIDE_ROWS", own_rows)
    composed = composition("adapters", tmp_path)
    group, fused = grouped(composed, 24, 20)
    assert fused.takes(24, 1)
    feed(group, lengths := [1 + n % 7 for n in range(24)])
    token_BT, position_BT = torch.arange(10, 34)[:, None], torch.tensor(lengths)[:, None]
    found = fused(token_BT.expand(3, -1, -1), position_BT, 20)
    wanted = torch.stack(by_modules(group, token_BT, position_BT, 10, 1))
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_an_empty_slot_changes_nothing(tmp_path: Path) -> None:
    composed = composition("llama", tmp_path)
    group, fused = grouped(composed, 2, 50)
    member_logits([group], TokenBatch(torch.tensor([[5, 6, 7]]), torch.arange(3)[None], torch.tensor([1]), 3, 1))
    before = group.cache.key_RHCD[0][:, :, :50].clone()
    for tokens in (1, 3, 16):
        fused(torch.full((3, 2, tokens), 9), torch.full((2, tokens), -1), 50)
    torch.testing.assert_close(group.cache.key_RHCD[0][:, :, :50], before, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("kind", "lengths", "counts", "cells"),
    [("llama", [9, 40, 1], [9, 1, 0], 130), ("gemma2", [30, 13], [5, 2], 40), ("adapters", [9, 40], [5, 3], 50),
     ("gemma2", [40, 3], [16, 9], 60), ("llama", [7], [32], 50), ("adapters", [20, 5], [16, 0], 40)],
)  # fmt: skip
@torch.no_grad()
def test_several_tokens_equal_the_modules(
    kind: str, lengths: list[int], counts: list[int], cells: int, tmp_path: Path
) -> None:
    """Rows with drafts of different lengths, none at all, and padding; in blocks of rows; windows of 16."""
    composed = composition(kind, tmp_path, layers=2 if kind == "gemma2" else 1)
    group, fused = grouped(composed, 4, 120)
    slots, tokens = len(lengths), max(counts)
    assert fused.takes(slots, tokens)
    feed(group, lengths)
    token_BT = torch.randint(4, 60, (slots, tokens), generator=torch.Generator().manual_seed(9))
    index_T = torch.arange(tokens)
    position_BT = torch.where(
        index_T < torch.tensor(counts)[:, None], torch.tensor(lengths)[:, None] + index_T, torch.tensor(-1)
    )
    found_MBTV = fused(token_BT.expand(3, -1, -1), position_BT, cells)
    buffers = [*group.cache.key_RHCD.values(), *group.cache.value_RHCD.values()]
    written = [buffer[:, :, :-1].clone() for buffer in buffers]
    wanted_MBTV = torch.stack(by_modules(group, token_BT, position_BT, min(cells, 120), tokens))
    real_BT = position_BT >= 0
    torch.testing.assert_close(found_MBTV[:, real_BT], wanted_MBTV[:, real_BT], atol=2e-4, rtol=1e-4)
    assert found_MBTV.isfinite().all()
    for buffer, mine in zip(buffers, written, strict=True):
        torch.testing.assert_close(mine, buffer[:, :, :-1], atol=1e-5, rtol=1e-4)


def test_passes_that_are_too_large_are_left_to_the_modules(tmp_path: Path) -> None:
    composed = composition("adapters", tmp_path)
    _, fused = grouped(composed, 4, 120)
    assert fused.takes(85, 1)  # 255 rows of one weight
    assert not fused.takes(86, 1)
    assert fused.takes(9, 9)
    assert not fused.takes(10, 9)
    assert fused.takes(1, 32)
    assert not fused.takes(1, 33)


def test_speculation_on_fused_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole engine as on a GPU but for its graphs: steps, drafts and verification all by the kernels."""
    composed = composition("adapters", tmp_path, layers=1)
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 4, 30, 9, 4]]
    asked = [Sampling(6, ignore_end=True), Sampling(4, 1.0, seed=3, ignore_end=True)]
    expected = Engine(composed, slots=2).generate(prompts, asked)
    monkeypatch.setattr(groups, "_fused", fuse)
    passes: list[int] = []
    plain = FusedDecoder.__call__

    def counting(self: Any, token_MBT: Any, *rest: Any) -> Any:
        passes.append(token_MBT.shape[-1])
        return plain(self, token_MBT, *rest)

    monkeypatch.setattr(FusedDecoder, "__call__", counting)
    with stacking():
        engine = drafting(composed, 2, 2)
    found = engine.generate(prompts, asked)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert max(passes) > 1


@pytest.mark.parametrize(("rows", "out", "splits"), [(130, 256, 2), (100, 128, 1), (65, 192, 1), (64, 128, 1)])
@torch.no_grad()
def test_many_rows_equal_the_modules(rows: int, out: int, splits: int) -> None:
    """Large blocks, a part of one, and sizes that have none; the interpreter has no products in bfloat16."""
    torch.manual_seed(0)
    own = [torch.nn.Linear(1088, out, dtype=torch.float16) for _ in range(3)]
    x_MBK = torch.randn(3, rows, 1088, dtype=torch.float16)
    found = layers.FusedLinear([[layer] for layer in own], splits=splits > 1)(x_MBK)
    assert len(found) == splits
    expected = torch.stack([layer(x) for layer, x in zip(own, x_MBK, strict=True)])
    torch.testing.assert_close(found.sum(0).half(), expected, rtol=0.01, atol=0.01)


@torch.no_grad()
def test_a_token_that_a_member_cannot_read_spoils_none_before_it(tmp_path: Path) -> None:
    """Nor what an earlier sequence left behind in the slot's cells."""
    composed = composition("llama", tmp_path, layers=2)
    group, fused = grouped(composed, 2, 64)
    feed(group, [9, 9])
    composed.member("e1").get_input_embeddings().weight[7] = torch.nan
    alone = fused(torch.tensor([[[5]]]).expand(3, 2, 1), torch.tensor([[9], [9]]), 64)
    for buffer in (*group.cache.key_RHCD.values(), *group.cache.value_RHCD.values()):
        buffer[:, :, 12:] = torch.nan
    found = fused(torch.tensor([[[5, 7], [5, 8]]]).expand(3, 2, 2), torch.tensor([[9, 10], [9, 10]]), 64)
    torch.testing.assert_close(found[:, :, :1], alone, atol=2e-4, rtol=1e-4)
    assert found[1, 0, 1].isnan().all()
    assert found[[0, 2], 0, 1].isfinite().all()
    assert found[:, 1].isfinite().all()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # the interpreter's arrays
@torch.no_grad()
def test_a_token_over_which_a_member_overflows_spoils_no_other_row(tmp_path: Path) -> None:
    composed = composition("llama", tmp_path, layers=2).half()
    group, fused = grouped(composed, 2, 64)
    feed(group, [9, 9])
    broken = composed.member("e1")
    broken.get_input_embeddings().weight[7] = 65504  # the largest number there is
    broken.model.layers[0].mlp.down_proj.weight *= 400
    found = fused(torch.tensor([[[7], [8]]]).expand(3, 2, 1), torch.tensor([[9], [9]]), 64)
    assert not found[1, 0, 0].isfinite().all()
    assert found[[0, 2]].isfinite().all()
    after = fused(torch.tensor([[[5], [5]]]).expand(3, 2, 1), torch.tensor([[9], [10]]), 64)  # in the same cells
    assert after[[0, 2]].isfinite().all()
    assert after[1, 0].isfinite().all()
