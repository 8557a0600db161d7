"""What cannot be served is refused at load, in words, and nothing hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

import tessellm
from tessellm.checkpoint import read_config
from tessellm.errors import TessellmError
from tessellm.vllm import adapters, config, server, tap
from tessellm.vllm.versions import TESTED, check_version

from engines import Composition, alike, composition, engine, vllm_says


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return composition(tmp_path_factory.mktemp("saved"), "llama", "mixture")


@pytest.fixture
def own(saved: Composition, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved.folder.parent, tmp_path / "tree")) / "composed"


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refusal(folder: Path, **options: Any) -> str:
    """What vLLM says when it loads this; it must say it in our words."""
    with pytest.raises(Exception) as caught, engine(folder, **options):  # noqa: PT011 - vLLM may wrap ours
        pass
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, TessellmError):
        error = error.__cause__ or error.__context__
    assert error is not None, caught.value
    return str(error)


def test_missing_member(own: Path) -> None:
    shutil.rmtree(own.parent / "members" / "math")
    assert "member 'math' is missing" in refusal(own)


def test_changed_member(own: Path) -> None:
    shutil.copy(own.parent / "members" / "coding" / "model.safetensors", own.parent / "members" / "math")
    assert "member 'math' has changed" in refusal(own)


def test_damaged_member(own: Path) -> None:
    file = own.parent / "members" / "math" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "cut off or damaged" in refusal(own)


def test_tensors_that_are_not_there(tmp_path: Path) -> None:
    folder = composition(tmp_path, "llama", "product", self_contained=True).folder
    file = folder / "members" / "math" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    assert "member 'math'" in refusal(folder)


def test_exchanged_vocabulary(own: Path, tmp_path: Path) -> None:
    change_config(own.parent / "members" / "math", vocab_size=60)
    assert "member 'math' has changed" in refusal(own)
    whole = composition(tmp_path / "whole", "llama", "product", self_contained=True).folder
    change_config(whole / "members" / "math", vocab_size=60)
    assert "member 'math' has 60 token rows" in refusal(whole)


def test_other_rules(own: Path) -> None:
    change_config(own, rule={"name": "evidence"})
    assert "the rule 'evidence' belongs to the lab" in refusal(own)


def test_unknown_rule(own: Path) -> None:
    change_config(own, rule={"name": "median"})
    message = refusal(own)
    assert "unknown rule 'median'" in message
    assert "product" in message


def test_a_router_whose_layers_vllm_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = composition(tmp_path, "lora", "routed").folder
    with monkeypatch.context() as patch:
        patch.setattr(tap, "place", lambda model, name: (f"{name}.elsewhere", None))
        assert "vLLM's LlamaForCausalLM has no such layer" in refusal(folder)
    monkeypatch.setattr(tap.TappedLinear, "apply", lambda self, layer, x, bias=None: self.inner.apply(layer, x, bias))
    with engine(folder) as llm, pytest.raises(TessellmError, match="vLLM did not run that layer"):
        vllm_says(llm, [[5, 6, 7]])


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [("adapters", {}, None),
     ("adapters", {"rule": {"name": "mixture", "alone": 0.9}}, "its rule is not the default"),
     ("adapters", {"rule": "product"}, "its rule is not the default"),
     ("adapters", {"weights": {"math": 0.5}}, "its experts have weights"),
     ("adapters", {"router": False}, "it has no router"),
     ("lora", {}, "expert 'full' is a full model")],
)  # fmt: skip
def test_what_one_adapter_a_request_can_serve(
    family: str, options: dict[str, Any], reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = composition(tmp_path, family, "default", **options).folder
    own = read_config(folder)
    places = config.member_sources(own, folder)
    assert adapters.obstacle(own, folder, places) == reason
    monkeypatch.setattr(adapters, "largest_rank", lambda: 3)
    if reason is None:
        assert "has rank" in str(adapters.obstacle(own, folder, places))
    for name in own.member_names[1:]:
        file = places[name].directory / "adapter_config.json"
        if family == "adapters":
            file.write_text(json.dumps({**json.loads(file.read_text()), "use_dora": True}))
    if reason is None:
        assert "is more than LoRA of linear layers" in str(adapters.obstacle(own, folder, places))


@pytest.mark.parametrize("option", ["--pipeline-parallel-size=2", "--pipeline_parallel_size", "--speculative-config"])
def test_options_that_routing_cannot_go_along_with(option: str) -> None:
    server.check_options(["--tensor-parallel-size", "2"])
    with pytest.raises(TessellmError, match="cannot be used where requests are routed"):
        server.check_options([option, "2"])


def test_a_router_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = composition(tmp_path, "lora", "routed").folder
    told: list[str] = []
    monkeypatch.setattr(config.logger, "warning", lambda text, *values: told.append(text % values))
    for _ in range(2):
        config.set_sizes(read_config(folder), folder)
        (folder / "router.safetensors").unlink(missing_ok=True)
    assert len(told) == 1
    assert "holds no router.safetensors, so all prompts have one prior" in told[0]


def test_heads_without_a_kernel(tmp_path: Path) -> None:
    places = alike(tmp_path, "llama", head_dim=16)
    base = places.pop("base")
    tessellm.compose(base, places, rule="product").save_pretrained(tmp_path / "composed")
    message = refusal(tmp_path / "composed")
    assert "heads are 16 wide" in message
    assert "leave out --engine vllm" in message


def test_what_vllm_cannot_do_with_a_composition(saved: Composition) -> None:
    assert "--speculative-config" in refusal(
        saved.folder, speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    )
    assert "--enable-lora" in refusal(saved.folder, enable_lora=True)
    assert "--kv-transfer-config" in refusal(
        saved.folder, kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    )


def test_pipeline_parallelism(saved: Composition) -> None:
    with (
        pytest.raises(Exception, match="Pipeline parallelism is not supported"),
        engine(saved.folder, pipeline_parallel_size=2, distributed_executor_backend="mp"),
    ):
        pass


def test_other_versions_are_named() -> None:
    assert check_version(f"{TESTED}.1") is None
    assert f"tested with vLLM {TESTED}; this is 0.33.0" in str(check_version("0.33.0"))


def test_a_crashed_worker_ends_the_engine(saved: Composition) -> None:
    """An engine process that dies while it is needed: an error, soon, and no process left."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(here / "crash.py"), str(saved.folder)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode != 0
    assert "EngineDeadError" in done.stderr, done.stderr[-3000:]
    children = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert children
    for _ in range(100):
        if not any(alive(pid) for pid in children):
            return
        time.sleep(0.1)
    raise AssertionError(children)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
