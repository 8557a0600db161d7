"""Saved compositions: linked, self-contained and of adapters; loaded everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

import tessellm
from tessellm.errors import CheckpointError
from tessellm.members import precision
from tessellm.members.shared_tensors import unique_bytes

from checkpoints import composed, listing, save, size, tokens
from conftest import (
    CHAT_TEMPLATE,
    build_model,
    character_tokenizer,
    logits,
    save_lora,
    save_member,
)

KINDS = ["linked", "self-contained", "adapters linked", "adapters self-contained"]


@pytest.mark.parametrize("kind", KINDS)
def test_save_load_generate_gives_identical_tokens(members_dir: Path, tmp_path: Path, kind: str) -> None:
    model = save(kind, members_dir, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(again, tessellm.ComposedForCausalLM)
    assert torch.equal(logits(again), logits(model))
    assert tokens(again) == tokens(model)
    assert again.config.weights == (0.7, 1.0)
    assert unique_bytes(again.members.values()) == unique_bytes(model.members.values())
    assert again.notes == model.notes
    again.save_pretrained(tmp_path / "twice", self_contained=True)  # and once more, from what was loaded
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "twice")) == tokens(model)


@pytest.mark.parametrize("kind", ["linked", "adapters self-contained"])
def test_pipeline_runs_it_unchanged(members_dir: Path, tmp_path: Path, kind: str) -> None:
    model = save(kind, members_dir, tmp_path / "out")
    pipeline("text-generation", model=model, tokenizer=model.tokenizer, device="cpu")
    pipeline("text-generation", model=str(tmp_path / "out"), device_map="cpu")
    generate = pipeline("text-generation", model=str(tmp_path / "out"), device="cpu")
    settings = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    text = generate("abcdef", **settings)[0]["generated_text"]
    assert text == model.tokenizer.decode(tokens(model)[6:], skip_special_tokens=True)
    chat = generate([{"role": "user", "content": "hi"}], **settings)
    assert isinstance(chat[0]["generated_text"], str)


@pytest.mark.parametrize("kind", ["linked", "adapters self-contained"])
def test_lm_eval_runs_it_unchanged(members_dir: Path, tmp_path: Path, kind: str) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = save(kind, members_dir, tmp_path / "out")
    scores, texts = [], []
    for lm in (
        HFLM(pretrained=model, tokenizer=model.tokenizer),
        HFLM(pretrained=str(tmp_path / "out"), device="cpu", dtype="auto"),
    ):
        pairs = [("a+b", "=c"), ("hello ", "world")]
        requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        scores.append(lm.loglikelihood(requests, disable_tqdm=True))
        ask = ("abcdef", {"until": ["z"], "max_gen_toks": 8, "do_sample": False})
        texts.append(lm.generate_until([Instance("generate_until", {}, ask, 0)], disable_tqdm=True))
    assert scores[0] == scores[1]
    assert texts[0] == texts[1]
    ids = model.tokenizer("a+b=c", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logp = model(ids).logits[0].log_softmax(-1)
    expected = sum(logp[t - 1, ids[0, t]].item() for t in (3, 4))
    assert scores[0][0][0] == pytest.approx(expected, abs=1e-4)


def run_python(code: str, *arguments: object, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_trust_remote_code_loads_it_without_importing_tessellm(members_dir: Path, tmp_path: Path) -> None:
    model = save("adapters self-contained", members_dir, tmp_path / "out")
    code = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
assert config.model_type == "tessellm"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.arange(4, 10)[None]
mask = torch.ones_like(ids)
print(json.dumps(model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[0].tolist()))
"""
    assert "tessellm." not in code
    printed = run_python(code, tmp_path / "out", HF_HOME=str(tmp_path / "home"))
    assert json.loads(printed.splitlines()[-1]) == tokens(model)


def test_a_base_and_four_adapters_are_barely_larger_than_the_base(tmp_path: Path) -> None:
    wide = build_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    base = save_member(wide, tmp_path / "base", character_tokenizer())
    experts = {f"e{i}": save_lora(base, tmp_path / f"e{i}", i) for i in range(4)}
    model = tessellm.compose(base, experts, rule="product")
    model.save_pretrained(tmp_path / "out", self_contained=True)
    model.save_pretrained(tmp_path / "linked")
    assert size(tmp_path / "out") < 1.2 * size(base)
    assert unique_bytes(model.members.values()) < 1.2 * unique_bytes([model.base])
    assert size(tmp_path / "linked") < 0.02 * size(base)


def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    base = save_member(build_model("gemma2", 0), tmp_path / "base", character_tokenizer())
    expert = save_member(build_model("gemma2", 1), tmp_path / "expert", character_tokenizer())
    model = tessellm.compose(base, {"x": expert}, rule="product")
    model.save_pretrained(tmp_path / "out", self_contained=True)
    assert size(tmp_path / "out", "*.safetensors") < size(base, "*.safetensors") * 2 + 2000
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name in ("base", "x"):
        member = again.member(name)
        assert member.get_output_embeddings().weight is member.get_input_embeddings().weight
    assert tokens(again) == tokens(model)


def test_tensors_that_fine_tunes_share_are_kept_once_on_disk_and_in_memory(members_dir: Path, tmp_path: Path) -> None:
    model = composed(members_dir)  # coding differs from the base in one layer of two
    model.set_rule("product")  # no router is stored
    ours, theirs = (dict(model.member(name).named_parameters()) for name in ("base", "coding"))
    for name in ours:
        assert (ours[name] is theirs[name]) == ("layers.1" not in name)
    model.save_pretrained(tmp_path / "out", self_contained=True)
    apart = sum(size(members_dir / name, "*.safetensors") for name in ("base", "math", "coding"))
    shared = sum(p.nbytes for name, p in ours.items() if "layers.1" not in name)
    assert size(tmp_path / "out", "*.safetensors") < apart - shared + 8000
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert unique_bytes(again.members.values()) == unique_bytes(model.members.values())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "members" / "coding")  # each loads by itself
    assert torch.equal(logits(plain), logits(model.member("coding")))


def test_large_members_are_sharded(members_dir: Path, tmp_path: Path) -> None:
    model = composed(members_dir)
    model.set_rule("product")
    model.save_pretrained(tmp_path / "out", self_contained=True, max_shard_size="20KB")
    files = list((tmp_path / "out").rglob("*.safetensors"))
    assert len(files) > 6
    assert len(list((tmp_path / "out" / "shared").iterdir())) > 1
    assert max(file.stat().st_size for file in files) < 24_000
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)


def test_layout_and_what_is_copied_in(own_members: Path, tmp_path: Path) -> None:
    GenerationConfig(temperature=0.6, top_p=0.9, do_sample=True, eos_token_id=[2, 5], max_new_tokens=7).save_pretrained(
        own_members / "base"
    )
    save("self-contained", own_members, tmp_path / "out")
    top = {name.split("/")[0] for name in listing(tmp_path / "out")}
    assert {"config.json", "generation_config.json", "model.safetensors", "modeling_tessellm.py"} <= top
    assert {"README.md", "members", "shared", "tokenizer.json", "chat_template.jinja"} <= top
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.temperature, generation.max_new_tokens) == (0.6, 7)
    assert set(generation.eos_token_id) == {2, 5}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("hello")["input_ids"] == character_tokenizer()("hello")["input_ids"]
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.vocab_size, config.max_position_embeddings) == (64, 128)
    assert not any(str(tmp_path) in file.read_text() for file in (tmp_path / "out").glob("*.json"))


def test_sampling_settings_of_a_base_that_does_not_sample_can_be_saved(own_members: Path, tmp_path: Path) -> None:
    (own_members / "base" / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    save("linked", own_members, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_model_card(members_dir: Path, tmp_path: Path) -> None:
    save("adapters linked", members_dir, tmp_path / "pair")
    card = (tmp_path / "pair" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: tessellm\npipeline_tag: text-generation\n")
    assert "| math | adapter | 0.7 | `../" in card
    assert "arXiv 2605.28304" in card
    assert 'AutoModelForCausalLM.from_pretrained("pair")' in card
    assert str(tmp_path) not in card


def test_dtypes_of_members_come_back_unless_another_is_asked_for(
    members_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "fast_bfloat16", lambda: True)  # whatever processor this is
    experts = {"math": {"source": members_dir / "math", "dtype": "float32"}, "coding": members_dir / "coding"}
    model = tessellm.compose(members_dir / "base", experts, dtype="bfloat16", rule="product")
    for self_contained in (False, True):
        model.save_pretrained(tmp_path / "out", self_contained=self_contained)
        again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        dtypes = [again.member(name).dtype for name in ("base", "math", "coding")]
        assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
        assert torch.equal(logits(again), logits(model))
        half: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float16)
        assert {member.dtype for member in half.members.values()} == {torch.float16}


def test_device_maps(members_dir: Path, tmp_path: Path) -> None:
    save("linked", members_dir, tmp_path / "out")
    for device_map in ("cpu", {"": "cpu"}, {"base": "cpu", "math": "cpu"}, torch.device("cpu")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map=device_map)
        assert {str(member.device) for member in model.members.values()} == {"cpu"}
    with pytest.raises(tessellm.TessellmError, match="device_map names 'maths', but there is no such member"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map={"maths": "cpu"})


def test_options_of_hugging_face_that_mean_something_else_are_refused(members_dir: Path, tmp_path: Path) -> None:
    save("linked", members_dir, tmp_path / "out")
    with pytest.raises(TypeError, match="cannot be loaded with max_memory="):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", max_memory={0: "1GB"})
    with pytest.raises(TypeError, match="did you mean 'attn_implementation'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", attention_implementation="eager")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, low_cpu_mem_usage=True, revision="main", attn_implementation="eager"
    )
    assert report["missing_keys"] == set()
    assert model.base.config._attn_implementation == "eager"


def test_a_tree_with_links_can_be_moved(own_members: Path, tmp_path: Path) -> None:
    model = save("adapters linked", own_members, tmp_path / "tree" / "out")
    shutil.move(own_members, tmp_path / "tree" / "members")
    with pytest.raises(CheckpointError, match=r"member 'base' is missing: .*members/base, which is not there"):
        tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "tree" / "out")
    shutil.move(tmp_path / "tree" / "members", own_members)
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")
    shutil.rmtree(own_members)
    moved = AutoModelForCausalLM.from_pretrained(tmp_path.parent / f"{tmp_path.name}-copy" / "tree" / "out")
    assert tokens(moved) == tokens(model)
