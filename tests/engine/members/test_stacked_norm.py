"""One norm around the gains of all members computes what each member's norm computes, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tessellm.engine.members.segments import Segments
from tessellm.engine.members.stacked_norm import StackedNorm
from tessellm.engine.members.stacking import PerMember


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 5, 16), (3, 4, 2, 16)])  # after a layer; of heads
@pytest.mark.parametrize("kind", [Gemma2RMSNorm, LlamaRMSNorm])
@torch.inference_mode()
def test_equals_the_members(kind: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norms = [kind(16).to(dtype) for _ in range(3)]
    for norm in norms:
        norm.get_parameter("weight").normal_()
    assert StackedNorm.fits(norms)
    x = torch.randn(shape).to(dtype)
    stacked = StackedNorm(norms, Segments())
    for _ in range(2):
        torch.testing.assert_close(stacked(x), PerMember(norms, Segments())(x), rtol=0, atol=0)


def test_other_norms_are_left_apart() -> None:
    assert not StackedNorm.fits([nn.LayerNorm(8), nn.LayerNorm(8)])
    assert not StackedNorm.fits([nn.RMSNorm(8), nn.RMSNorm(8)])
