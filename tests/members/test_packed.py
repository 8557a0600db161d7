"""Members in 8 or 4 bits: packs and the weights that they stand for compute the same, grids are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tessellm
from tessellm.errors import MemberError
from tessellm.members.packed import FEW_ROWS, GROUP, JoinedLinear, PackedLinear, is_packed

from conftest import save_lora


def linear(outputs: int, inputs: int, seed: int = 0, bias: bool = False) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_and_many_read_the_same_weights(precision: str, bias: bool):
    layer = PackedLinear(linear(128, 96, bias=bias), precision)
    x = torch.randn(2 * FEW_ROWS[precision], 96).bfloat16()
    many, few = layer(x), torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(few, many, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("precision", "error"), [("int8", 0.01), ("int4", 0.12)])
def test_rounding_is_small(precision: str, error: float):
    layer = linear(64, 64)
    rounded = PackedLinear(layer, precision).weight.float()
    assert ((rounded - layer.weight).norm() / layer.weight.norm()).item() < error


def test_weights_of_a_4_bit_file_are_kept():
    """As Q4_1 stores them: levels 0 to 15 in groups of 32, times a scale, plus a minimum."""
    level = torch.randint(0, 16, (64, 96 // GROUP, GROUP))
    level[::3] = level[::3].clamp(4, 9)
    scale, low = torch.rand(64, 3, 1) * 0.1 + 0.01, torch.randn(64, 3, 1)
    layer = linear(64, 96)
    layer.weight.data = (level * scale + low).flatten(1)
    rounded = PackedLinear(layer, "int4").weight.float()
    assert ((rounded - layer.weight).norm() / layer.weight.norm()).item() < 0.006  # scales are bfloat16


def test_joined_layers_equal_each():
    layers = [PackedLinear(linear(outputs, 96, seed), "int4") for seed, outputs in enumerate((128, 64, 64))]
    assert JoinedLinear.fits(layers)
    x = torch.randn(3, 96).bfloat16()
    assert torch.equal(JoinedLinear(layers)(x), torch.cat([layer(x) for layer in layers], -1))
    shared = JoinedLinear(layers).packed.untyped_storage().data_ptr()
    assert {layer.packed.untyped_storage().data_ptr() for layer in layers} == {shared}
    assert not JoinedLinear.fits([layers[0], PackedLinear(linear(48, 96), "int4")])


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_packed_composition_is_saved_and_loaded(members_dir, tmp_path, precision: str):
    model = tessellm.compose(members_dir / "base", {"math": members_dir / "lora_math"}, rule="product", dtype=precision)
    assert is_packed(model.member("base"))
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "out")
    again = tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
    assert is_packed(again.member("base")) == is_packed(model.member("base"))
    ids = torch.arange(4, 30)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_an_adapter_that_is_merged_leaves_no_old_packs(members_dir, tmp_path):
    adapter = save_lora(members_dir / "base", tmp_path / "own", modules_to_save=["lm_head"])
    model = tessellm.compose(members_dir / "base", {"own": adapter}, rule="product", dtype="int4")
    assert is_packed(model.base)
    assert is_packed(model.member("own")) is None
    ids = torch.arange(4, 30)[None]
    few, many = (model.member_logits("own", each, None, 0, {})[:, :1] for each in (ids[:, :1], ids))
    torch.testing.assert_close(few, many, rtol=0.02, atol=0.05)


def test_a_quantization_beside_it_is_refused(members_dir):
    base = {"source": str(members_dir / "base"), "dtype": "int8", "quantization": "bnb-8bit"}
    with pytest.raises(MemberError, match="either the dtype int8 or a quantization"):
        tessellm.compose(base, {"math": members_dir / "math"}, rule="product")
