"""Plans: needs by hand and by measurement, what fits where, what is refused."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import tessellm
from tessellm.errors import RecipeError
from tessellm.inspect.planning import (
    DEVICES,
    GIB,
    USABLE,
    Device,
    device_named,
    largest_batch,
    plan,
    read_needs,
    speed_limit,
)
from tessellm.load import load_model
from tessellm.members.shared_tensors import unique_bytes
from tessellm.vllm import server

from conftest import save_lora, save_member

GEMMA_2B = 2_614_341_888  # parameters, by its model card


def write_without_weights(folder: Path, config: Gemma2Config) -> None:
    """A checkpoint whose weight file has its header and its size, and no blocks on disk."""
    with torch.device("meta"):
        model = Gemma2ForCausalLM(config)
    header, offset = {}, 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    folder.mkdir()
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


@pytest.fixture(scope="module")
def gemma_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members of Gemma 2 2B's shape, in a recipe."""
    folder = tmp_path_factory.mktemp("gemma")
    for name in ("base", "math", "coding"):
        write_without_weights(folder / name, Gemma2Config())
    recipe = folder / "recipe.yaml"
    recipe.write_text("base: ./base\nexperts: {math: ./math, coding: ./coding}\nrule: product\n")
    return recipe


def test_needs_of_three_gemmas(gemma_recipe: Path) -> None:
    needs = read_needs(str(gemma_recipe))
    assert [member.parameters for member in needs.members] == [GEMMA_2B] * 3
    assert needs.weight_bytes == 3 * 2 * GEMMA_2B
    assert needs.kv_bytes == 3 * 2 * (2 * 26 * 4 * 256)  # members × bytes × (k and v, layers, heads, head size)
    assert needs.request_bytes == 3 * 256000 * 4
    assert read_needs(str(gemma_recipe), "float32").weight_bytes == 2 * needs.weight_bytes


def test_speed_limit_against_a_measured_floor(gemma_recipe: Path) -> None:
    """One H200 at 4.29 TB/s, as measured: reading the three models once took 3.66 ms."""
    limit = speed_limit(read_needs(str(gemma_recipe)), Device("measured", 139, 4290), context=0, size=1, requests=1)
    assert 1000 / limit == pytest.approx(3.66, abs=0.01)


def test_a_plan_is_the_least_that_fits(gemma_recipe: Path) -> None:
    needs = read_needs(str(gemma_recipe))
    h100 = plan(needs, DEVICES["h100"], 4096)
    assert h100.devices == 1
    room = 80 * GIB * USABLE - needs.weight_bytes
    assert h100.batch == int(room // (needs.kv_bytes * 4096 + needs.request_bytes))
    small = Device("small", 8, 272)
    assert largest_batch(needs, small, 4096, 2) == 0
    assert plan(needs, small, 4096).devices == 4
    assert plan(needs, Device("tiny", 1, 10), 4096).devices == 0  # 8 heads: no more than 8 devices
    assert plan(needs, Device("alone", 8, 272, most=1), 4096).devices == 0
    assert needs.device_kv_bytes(4) * 4 == needs.kv_bytes
    assert needs.device_kv_bytes(8) == needs.device_kv_bytes(4)  # 4 key-value heads a member


def test_rules_with_state_need_more(members_dir: Path, tmp_path: Path) -> None:
    experts = {"math": str(members_dir / "math"), "lora": str(members_dir / "lora_math")}
    for rule in ("product", "mixture"):
        tessellm.compose(str(members_dir / "base"), experts, rule=rule).save_pretrained(tmp_path / rule)
    plain, stateful = read_needs(str(tmp_path / "product")), read_needs(str(tmp_path / "mixture"))
    assert stateful.kv_bytes - plain.kv_bytes == 3 * 32 * 4  # members × hidden size × float32
    assert stateful.request_bytes == 2 * plain.request_bytes
    loaded = load_model(str(tmp_path / "product"))
    assert plain.weight_bytes == pytest.approx(unique_bytes(loaded.members.values()), rel=1e-3)  # which has buffers too


def test_merged_adapters_count_as_models(members_dir: Path, tmp_path: Path) -> None:
    save_member(load_model_of(members_dir / "base"), tmp_path / "base")
    whole = save_lora(tmp_path / "base", tmp_path / "whole", 1, modules_to_save=["lm_head"])
    tessellm.compose(str(tmp_path / "base"), {"whole": str(whole)}).save_pretrained(tmp_path / "out")
    base, member = read_needs(str(tmp_path / "out")).members
    assert (member.kind, member.weight_bytes) == ("full", base.weight_bytes)


def load_model_of(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_own_hardware() -> None:
    assert device_named("24@936") == Device("24 GiB, 936 GB/s", 24, 936)
    for name in ("h10", "24", "24@", "@24", "0@10"):
        with pytest.raises(RecipeError):
            device_named(name)


def test_command_line(cli, gemma_recipe: Path, tmp_path: Path) -> None:
    ran = cli(
        "inspect", gemma_recipe, "--plan", "--hardware", "h200", "--context", 8192, "--json", tmp_path / "plan.json"
    )
    assert ran.code == 0
    assert "h200" in ran.out
    assert ran.out.endswith("\n")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["kv_bytes_a_token"] == 319488
    assert written["plans"][0]["devices"] == 1
    assert len(cli("inspect", gemma_recipe, "--plan").out.splitlines()) > len(DEVICES)
    refused = cli("inspect", gemma_recipe, "--plan", "--hardware", 24)
    assert (refused.code, "such as 24@1008" in refused.err) == (2, True)


def test_serve_names_what_is_there(cli, gemma_recipe: Path) -> None:
    refused = cli("serve", "out", "--engine", "vlm")
    assert refused.code == 2
    assert "vllm" in refused.err
    refused = cli("serve", "--engine", "vllm", gemma_recipe)
    assert refused.code == 2
    assert "tessellm compose" in refused.err


def test_what_is_asked_of_the_other_engine_is_not_dropped(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option, value, instead in (
        ("--slots", 4, "--max-num-seqs"),
        ("--dtype", "float16", "--dtype"),
        ("--queue", 1, "Leave it out"),
    ):
        refused = cli("serve", "--engine", "vllm", "out", option, value)
        assert (refused.code, option in refused.err, instead in refused.err) == (2, True, True)
    asked: list[object] = []
    monkeypatch.setattr(server, "serve", lambda *arguments: asked.extend(arguments))
    assert cli("serve", "--engine", "vllm", "out", "--api-key", "secret", "--", "--seed", 3).code == 0
    assert asked == ["out", "127.0.0.1", 8000, ["--seed", "3"], "secret"]
    (tmp_path / "key").write_text("of a file")
    assert cli("serve", "--engine", "vllm", "out", "--api-key-file", tmp_path / "key").code == 0
    assert asked[-1] == "of a file"


def test_a_taken_port_and_an_empty_key_are_said_at_once(cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = cli("serve", "--engine", "vllm", "out", "--port", taken.getsockname()[1])
    assert (refused.code, "cannot listen at 127.0.0.1" in refused.err) == (2, True)
    refused = cli("serve", "--engine", "vllm", "out", "--port", 0, "--api-key", "")
    assert (refused.code, "the API key is empty" in refused.err) == (2, True)


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "1e300"])
def test_odd_hardware(cli, gemma_recipe: Path, number: str) -> None:
    for numbers in ((number, "100"), ("100", number)):
        refused = cli("inspect", gemma_recipe, "--plan", "--hardware", "@".join(numbers))
        assert (refused.code, "must be above 0 and at most" in refused.err) == (2, True)


def test_what_to_plan_for_needs_a_plan(cli, gemma_recipe: Path) -> None:
    refused = cli("inspect", gemma_recipe, "--hardware", "h100")
    assert (refused.code, "give --plan too" in refused.err) == (2, True)
