"""Directions and energies against their definitions, for LoRA of many kinds and for full fine-tunes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tessellm.errors import MemberError
from tessellm.members import Loading, MemberSpec, load_member
from tessellm.routing.directions import _of_factors, dense_weight, directions, linear_layers
from tessellm.routing.energy import Energies, plan_blocks, shared_inputs, stack_directions, tapped

from conftest import build_model, perturbed, save_lora

IDS = torch.arange(4, 24)[None]


def adapted(base: Any, **lora: Any) -> Any:
    """The base with an adapter that does something, as members are loaded."""
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], **lora}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **settings)).get_base_model()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn(parameter.shape)
    return model.eval()


def delta_of(base: Any, expert: Any, path: str) -> torch.Tensor:
    """ΔW by PEFT's own account, or by subtraction."""
    ours, theirs = base.get_submodule(path), expert.get_submodule(path)
    if hasattr(theirs, "get_delta_weight"):
        return theirs.get_delta_weight("default").detach()
    return dense_weight(theirs) - dense_weight(ours)


def slow_energies(base: Any, expert: Any, rank: int) -> torch.Tensor:
    """The mean over the adapted layers of ‖V x‖² / ‖x‖², a layer at a time: [T]."""
    inputs: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, given, path=path: inputs.update({path: given[0][0]}))
        for path, module in linear_layers(base).items()
    ]
    with torch.no_grad():
        base(IDS)
    for handle in handles:
        handle.remove()
    found = []
    for path, x in inputs.items():
        delta = delta_of(base, expert, path)
        if delta.abs().max() > 0:
            _, sigma, right = torch.linalg.svd(delta, full_matrices=False)
            rows = right[:rank][sigma[:rank] > 1e-5 * sigma[0]]
            found.append((x @ rows.T).square().sum(-1) / x.square().sum(-1))
    return torch.stack(found).mean(0)


def collect(base: Any, experts: list[Any], blocks: list[int], rows: int = 3) -> Energies:
    own = [directions(base, expert, f"e{n}", rows=rows, full_rows=rows) for n, expert in enumerate(experts)]
    groups = shared_inputs(base, sorted({path for each in own for path in each}))
    return Energies(stack_directions(groups, own, blocks), len(experts))


def run(base: Any, energies: Energies, ids: torch.Tensor = IDS) -> None:
    paths = list(energies._stacked)
    with tapped(base, energies, paths), torch.no_grad():
        base(ids)


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"r": 12, "use_rslora": True},
        {"r": 1},
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 20}},
        {"target_modules": "all-linear"},
    ],
)
def test_the_energies_of_lora_are_what_its_delta_does(lora: dict[str, Any]) -> None:
    base = build_model(num_hidden_layers=3)
    expert = adapted(base, **lora)
    energies = collect(base, [expert], [0, 1, 2])
    run(base, energies)
    torch.testing.assert_close(energies.take()[0, :, 0], slow_energies(base, expert, 3), rtol=1e-4, atol=1e-5)


def test_the_energies_of_several_experts_do_not_mix() -> None:
    base = build_model()
    experts = [adapted(base), perturbed(base, 1), adapted(base, target_modules=["o_proj"], r=9)]
    energies = collect(base, experts, [0, 1])
    run(base, energies)
    found = energies.take()[0]
    for number, expert in enumerate(experts):
        torch.testing.assert_close(found[:, number], slow_energies(base, expert, 3), rtol=1e-4, atol=1e-5)


def test_conv1d_layers_count_too() -> None:
    base = build_model("gpt2")
    expert = perturbed(base, 1)
    energies = collect(base, [expert], [0, 1])
    run(base, energies)
    torch.testing.assert_close(energies.take()[0, :, 0], slow_energies(base, expert, 3), rtol=1e-4, atol=1e-5)


def test_a_large_difference_is_decomposed_by_iteration() -> None:
    generator = torch.Generator().manual_seed(0)
    base = build_model(hidden_size=320, intermediate_size=640, num_hidden_layers=1)
    expert = perturbed(base, 1, scale=1e-4)
    with torch.no_grad():
        weight = expert.get_submodule("model.layers.0.mlp.up_proj").weight
        weight += torch.randn(640, 5, generator=generator) @ torch.randn(5, 320, generator=generator) / 10
    path = "model.layers.0.mlp.up_proj"
    found = directions(base, expert, "e", full_rows=5)[path]
    _, sigma, right = torch.linalg.svd(delta_of(base, expert, path), full_matrices=False)
    assert sigma[4] > 10 * sigma[5]
    torch.testing.assert_close(found.T @ found, right[:5].T @ right[:5], atol=1e-2, rtol=1e-2)


def test_dora_counts_by_its_direction() -> None:
    base = build_model()
    with_dora, without = (directions(base, adapted(base, use_dora=dora), "e") for dora in (True, False))
    assert with_dora.keys() == without.keys()


def test_other_adapters_are_merged_to_be_compared() -> None:
    from peft import LoHaConfig

    base = build_model()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False)
        expert = get_peft_model(copy.deepcopy(base), config).get_base_model()
    found = directions(base, expert, "e", full_rows=64)
    path = "model.layers.1.self_attn.q_proj"
    delta = expert.get_submodule(path).get_delta_weight("default")
    torch.testing.assert_close(delta @ found[path].T @ found[path], delta, rtol=1e-3, atol=1e-4)


def test_adapters_on_quantised_layers_are_read() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    base = build_model()
    expert = adapted(base, target_modules=["q_proj"])
    plain = directions(base, expert, "e")
    for path in plain:
        layer = expert.get_submodule(path)
        layer.base_layer = bnb.nn.Linear4bit(32, 32, bias=False)
        base.set_submodule(path, layer.base_layer)
    assert directions(base, expert, "e").keys() == plain.keys()


def test_modules_to_save_count_as_a_full_fine_tune(members_dir: Path, tmp_path: Path) -> None:
    save_lora(members_dir / "base", tmp_path / "saved", modules_to_save=["lm_head"])
    base = load_member("base", MemberSpec(str(members_dir / "base")), None, Loading())
    expert = load_member("saved", MemberSpec(str(tmp_path / "saved")), base, Loading())
    assert not expert.is_adapter
    assert {path.rpartition(".")[2] for path in directions(base.model, expert.model, "e")} == {"q_proj", "v_proj"}


def test_equal_weights_have_no_directions() -> None:
    base = build_model()
    assert directions(base, perturbed(base, 1, scale=0.0), "e") == {}
    assert directions(base, base, "e") == {}
    silent = adapted(base)
    for name, parameter in silent.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert directions(base, silent, "e") == {}


def rounded(weight: torch.Tensor, how: str) -> torch.Tensor:
    if how == "int8":
        step = weight.abs().amax(1, keepdim=True) / 127
        return (weight / step).round() * step
    return weight.to(getattr(torch, how)).float()


@pytest.mark.parametrize("how", ["float32", "bfloat16", "float16", "int8"])
def test_the_base_in_another_precision_has_no_directions(how: str) -> None:
    base = build_model()
    expert = copy.deepcopy(base)
    for layer in linear_layers(expert).values():
        layer.weight = torch.nn.Parameter(rounded(layer.weight.detach(), how))
    assert directions(base, expert, "e") == {}
    trained = torch.outer(torch.ones(32), torch.linspace(-1, 1, 32)) / 200
    layer = expert.get_submodule("model.layers.1.self_attn.q_proj")
    layer.weight.data += trained
    assert list(directions(base, expert, "e")) == ["model.layers.1.self_attn.q_proj"]


def test_an_adapter_that_changes_nothing_to_speak_of_has_no_directions() -> None:
    base = build_model()
    expert = adapted(base)
    for name, parameter in expert.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1e-6
    assert directions(base, expert, "e") == {}


def test_rank_zero_has_no_directions() -> None:
    assert len(_of_factors(torch.zeros(0, 32), torch.zeros(32, 0), 4)) == 0


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    base = build_model()
    with pytest.raises(MemberError, match=r"'odd'.*no linear layer in common"):
        directions(base, build_model("gpt2"), "odd")
    with pytest.raises(MemberError, match=r"'wide'.*shape"):
        directions(base, build_model(intermediate_size=128), "wide")
    broken = perturbed(base, 1)
    broken.get_submodule("model.layers.1.mlp.up_proj").weight.data[0, 0] = torch.nan
    with pytest.raises(MemberError, match=r"'broken'.*up_proj.*not finite"):
        directions(base, broken, "broken")


def test_layers_with_one_input_are_one_group() -> None:
    base = build_model()
    groups = shared_inputs(base, [path for path in linear_layers(base) if "layers.0" in path])
    short = sorted(sorted(path.rpartition(".")[2] for path in group) for group in groups)
    assert short == [["down_proj"], ["gate_proj", "up_proj"], ["k_proj", "q_proj", "v_proj"], ["o_proj"]]


def test_forward_passes_follow_one_another_until_they_are_taken() -> None:
    base, expert = build_model(), perturbed(build_model(), 1)
    energies = collect(base, [expert], [0, 1])
    run(base, energies)
    whole = energies.take()
    paths = list(energies._stacked)
    with tapped(base, energies, paths), torch.no_grad():
        cache = base(IDS[:, :8], use_cache=True).past_key_values
        base(IDS[:, 8:], past_key_values=cache)
    torch.testing.assert_close(energies.take(), whole, rtol=1e-4, atol=1e-6)
    assert energies.take().shape == (1, 0, 1)
    assert not any(module._forward_pre_hooks for module in base.modules())


def test_half_precision_inputs_do_not_overflow() -> None:
    base = build_model()
    energies = collect(base, [perturbed(base, 1)], [0, 1])
    path = next(iter(energies._stacked))
    energies._add(path, torch.full((1, 2, 32), 6e4, dtype=torch.float16))
    assert energies.take().isfinite().all()


def test_the_plan_begins_at_a_quarter_of_the_depth() -> None:
    assert plan_blocks(30, 20) == list(range(7, 30))
    assert plan_blocks(2, 1) == [0, 1]
    assert plan_blocks(30, 100) == list(range(7, 30, 2))
