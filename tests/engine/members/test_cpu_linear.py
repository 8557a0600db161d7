"""A layer asked for in another way is the same layer: every number of rows, wide and narrow, copied and not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tessellm.engine.engine import Engine
from tessellm.engine.members import cpu_linear
from tessellm.engine.members.cpu_linear import CpuLinear, MemberModules, quicken
from tessellm.engine.sampling import Sampling

from decoding_cases import composition, prompts, unexcused


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inner", "outer"), [(24, 56), (56, 24), (32, 32)])
@torch.inference_mode()
def test_computes_what_the_layer_computes(
    inner: int, outer: int, bias: bool, copied: bool, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if onednn and not cpu_linear.HAS_ONEDNN:
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(cpu_linear, "HAS_ONEDNN", onednn)
    torch.manual_seed(0)
    layer = nn.Linear(inner, outer, bias=bias)
    ours = CpuLinear(layer, copied)
    for shape in [(1, 1), (2, 1), (1, 3), (4, 1), (8, 1), (3, 3), (5, 40)]:
        x = torch.randn(*shape, inner)
        torch.testing.assert_close(ours(x), functional.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
        strided = torch.randn(*shape, 2 * inner)[..., ::2]
        torch.testing.assert_close(ours(strided), layer(strided), atol=1e-5, rtol=1e-5)


def test_keeps_no_more_weights_twice_than_it_may_and_the_output_layer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"up": nn.Linear(8, 16, bias=False), "out": nn.Linear(8, 32, bias=False)})
    monkeypatch.setattr(cpu_linear, "COPIED_BYTES", 32 * 8 * 4)
    monkeypatch.setattr(cpu_linear, "SMALL", 0)
    quicken(model, model["out"])
    assert all(isinstance(layer, CpuLinear) for layer in model.values())
    assert model["out"].transposed is not None
    assert model["up"].transposed is None


def test_leaves_small_layers_half_precision_and_what_belongs_to_members_alone() -> None:
    theirs = nn.Sequential(nn.Linear(512, 512))
    model = nn.ModuleDict(
        {
            "large": nn.Linear(512, 256),
            "small": nn.Linear(512, 255),
            "short": nn.Linear(512, 512, dtype=torch.bfloat16),
            "members": MemberModules([theirs]),
        }
    )
    quicken(model, None)
    assert type(model["large"]) is CpuLinear
    assert type(model["small"]) is type(model["short"]) is type(theirs[0]) is nn.Linear


@pytest.mark.parametrize("kind", ["llama", "gpt2", "both"])
def test_an_engine_of_such_layers_equals_the_reference(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "SMALL", 0)
    model = composition(kind, tmp_path)
    engine = Engine(model, slots=3)
    layers = [
        layer for group in engine.executor.groups for layer in group.module.modules() if isinstance(layer, CpuLinear)
    ]
    assert layers
    assert unexcused(model, engine.generate(prompts(7), Sampling(12, ignore_end=True))) == []
