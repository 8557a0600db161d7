"""Two hundred adapters in one engine: weights are held once, and sequences of many of them are decoded together."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tessellm
from routing_cases import route_of, routed, wrong_places
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling

from conftest import build_model, save_lora, save_member
from decoding_cases import prompts

COUNT, WEIGHTS = 200, "adapter_model.safetensors"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """A base and folders of adapters of several ranks; most are copies with noise."""
    home = tmp_path_factory.mktemp("many")
    base = save_member(build_model("llama", eos_token_id=None), home / "base")
    trained = [save_lora(base, home / f"own{n}", n, r=(4, 8, 16)[n], target_modules=TARGETS) for n in range(3)]
    found = {}
    for number in range(COUNT):
        source, place = trained[number % 3], home / f"e{number}"
        place.mkdir()
        (place / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
        noise = torch.Generator().manual_seed(number)
        weights = load_file(source / WEIGHTS)
        noisy = {path: w + 0.1 * torch.randn(w.shape, generator=noise) for path, w in weights.items()}
        save_file(noisy, place / WEIGHTS, metadata={"format": "pt"})
        found[place.name] = str(place)
    return str(base), found


def held_bytes() -> int:
    """Return the bytes of all tensors that are alive, each storage once."""
    gc.collect()
    whole = (torch.Tensor, torch.nn.Parameter)  # other tests leave tensors without storage
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in whole]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_memory_is_the_adapters_and_little_more(adapters: tuple[str, dict[str, str]]) -> None:
    base, folders = adapters
    model: Any = routed(tessellm.compose(base, folders, rule="mixture", router=False))
    own = {id(p): p for name in folders for path, p in model.member(name).named_parameters() if "lora_" in path}
    before = held_bytes()
    engine = Engine(model, slots=32, context=128)
    draw = random.Random(0)
    given = [None if n % 2 else {draw.choice(list(folders)): 1.0} for n in range(32)]
    requests = [engine.submit(prompt, Sampling(4), each) for prompt, each in zip(prompts(32, 30), given, strict=True)]
    while engine.busy:
        engine.step()
    assert len({member for request in requests for member in request.branches}) > 25
    for request in requests[:2]:
        route = None if request.experts is not None else route_of(model, request.prompt)
        assert not wrong_places(model, request, route)
    caches = [group.cache for group in engine.executor.groups]
    cells = sum(b.nbytes for cache in caches for kind in (cache.key_RHCD, cache.value_RHCD) for b in kind.values())
    adapters_bytes = sum(parameter.nbytes for parameter in own.values())
    assert held_bytes() - before - cells < 0.15 * adapters_bytes
