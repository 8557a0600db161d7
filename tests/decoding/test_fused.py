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
from tessellm.decoding.fused import layers
from tessellm.decoding.fused.decoder import fuse
from tessellm.decoding.groups import make_groups

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 80}


def members(kind: str, folder: Path) -> list[Any]:
    if kind == "adapters":
        base = build_model("llama", **SIZES)
        home = save_member(base, folder / "base")
        everywhere = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        some = {"e1": ["q_proj", "up_proj"], "e2": everywhere}
        paths = {name: str(save_lora(home, folder / name, 3, target_modules=t)) for name, t in some.items()}
        model = tessellm.compose(str(home), paths)
        return [model.member(name) for name in model.members]
    settings = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    base = build_model(kind, **SIZES, **settings)
    if kind == "qwen2":
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    return [base, perturbed(base, 1), perturbed(base, 2)]


@pytest.mark.parametrize(
    ("kind", "lengths", "shortest_sum"),
    [("llama", [9, 40, 1], 512), ("qwen2", [9, 2], 512), ("gemma2", [9, 40, 1], 16), ("gemma2", [33], 512),
     ("adapters", [9, 40], 16), ("adapters", [7], 512)],
)  # fmt: skip
@torch.no_grad()
def test_equals_the_modules(
    kind: str, lengths: list[int], shortest_sum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows and one, with sums in one piece and in several, cells in one piece and in several."""
    monkeypatch.setattr(layers, "SHORTEST_SUM", shortest_sum)
    own = members(kind, tmp_path)
    if kind == "adapters":
        composed = tessellm.compose(str(tmp_path / "base"), {n: str(tmp_path / n) for n in ("e1", "e2")})
    else:
        composed = tessellm.compose(own[0], {"a": own[1], "b": own[2]})
    (group,) = make_groups(composed, slots=4, cells=120, stacked=True)
    fused = fuse([composed.member(name) for name in composed.members], group.cache)
    assert fused is not None
    slots = len(lengths)
    for slot, length in enumerate(lengths):
        text = torch.randint(4, 60, (1, length), generator=torch.Generator().manual_seed(slot))
        group.logits(text, torch.arange(length)[None], torch.tensor([slot]), length, 1)
    token_B, position_B = torch.tensor([5, 6, 7])[:slots], torch.tensor(lengths)
    for step in range(2):
        cells = int(position_B.max()) + 1
        kept = [buffer.clone() for buffer in group.cache.key_RHCD.values()]
        found = fused(token_B.expand(3, -1).contiguous(), position_B, 130 if step else cells)
        for buffer, old in zip(group.cache.key_RHCD.values(), kept, strict=True):
            assert not torch.equal(buffer, old)  # it wrote the cache itself
        wanted = group.logits(token_B[:, None], position_B[:, None], slots, cells, 1)
        torch.testing.assert_close(found, torch.stack(wanted)[:, :, 0], atol=2e-4, rtol=1e-4)
        token_B, position_B = found[0].argmax(-1), position_B + 1


@torch.no_grad()
def test_an_empty_slot_changes_nothing(tmp_path: Path) -> None:
    own = members("llama", tmp_path)
    composed = tessellm.compose(own[0], {"a": own[1], "b": own[2]})
    (group,) = make_groups(composed, slots=2, cells=50, stacked=True)
    fused = fuse(own, group.cache)
    group.logits(torch.tensor([[5, 6, 7]]), torch.arange(3)[None], torch.tensor([1]), 3, 1)
    before = group.cache.key_RHCD[0][:, :, :50].clone()
    fused(torch.full((3, 2), 9), torch.tensor([-1, -1]), 50)
    torch.testing.assert_close(group.cache.key_RHCD[0][:, :, :50], before, atol=0, rtol=0)
