"""Saved compositions: linked, self-contained and of adapters; loaded everywhere; whole or not there at all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

import tessellm
from tessellm.errors import CheckpointError, MemberError
from tessellm.shared_tensors import unique_bytes

from conftest import (
    CHAT_TEMPLATE,
    build_model,
    character_tokenizer,
    logits,
    perturbed,
    press_ctrl_c,
    save_lora,
    save_member,
)

KINDS = ["linked", "self-contained", "adapters linked", "adapters self-contained"]


def composed(members: Path, adapters: bool = False, **options: Any) -> Any:
    prefix = "lora_" if adapters else ""
    experts = {name: members / f"{prefix}{name}" for name in ("math", "coding")}
    return tessellm.compose(members / "base", experts, weights={"math": 0.7}, **options)


def tokens(model: Any) -> list[int]:
    ids = torch.arange(4, 10)[None]
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[0].tolist()


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def size(folder: Path, pattern: str = "*") -> int:
    return sum(file.stat().st_size for file in folder.rglob(pattern) if file.is_file())


def save(kind: str, members: Path, target: Path) -> Any:
    model = composed(members, adapters="adapters" in kind)
    model.save_pretrained(target, self_contained="self-contained" in kind)
    return model


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
    model = tessellm.compose(base, experts)
    model.save_pretrained(tmp_path / "out", self_contained=True)
    model.save_pretrained(tmp_path / "linked")
    assert size(tmp_path / "out") < 1.2 * size(base)
    assert unique_bytes(model.members.values()) < 1.2 * unique_bytes([model.base])
    assert size(tmp_path / "linked") < 0.02 * size(base)


def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    base = save_member(build_model("gemma2", 0), tmp_path / "base", character_tokenizer())
    expert = save_member(build_model("gemma2", 1), tmp_path / "expert", character_tokenizer())
    model = tessellm.compose(base, {"x": expert})
    model.save_pretrained(tmp_path / "out", self_contained=True)
    assert size(tmp_path / "out", "*.safetensors") < size(base, "*.safetensors") * 2 + 2000
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name in ("base", "x"):
        member = again.member(name)
        assert member.get_output_embeddings().weight is member.get_input_embeddings().weight
    assert tokens(again) == tokens(model)


def test_tensors_that_fine_tunes_share_are_kept_once_on_disk_and_in_memory(members_dir: Path, tmp_path: Path) -> None:
    model = composed(members_dir)  # coding differs from the base in one layer of two
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


def test_dtypes_of_members_come_back_unless_another_is_asked_for(members_dir: Path, tmp_path: Path) -> None:
    experts = {"math": {"source": members_dir / "math", "dtype": "float32"}, "coding": members_dir / "coding"}
    model = tessellm.compose(members_dir / "base", experts, dtype="bfloat16")
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


def test_a_member_that_changed_is_named_and_one_that_was_only_touched_is_not(own_members: Path, tmp_path: Path) -> None:
    save("linked", own_members, tmp_path / "out")
    weights = own_members / "math" / "model.safetensors"
    weights.touch()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = own_members / "math" / "config.json"
    plain = config.read_text()
    config.write_text(plain.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))
    assert config.read_text() != plain
    with pytest.raises(CheckpointError, match="member 'math' has changed since it was composed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config.write_text(plain)
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(CheckpointError, match="member 'math' has changed since it was composed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights.write_bytes(changed[:-5])
    with pytest.raises(MemberError, match=r"member 'math': .*model.safetensors is cut off"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights.unlink()
    with pytest.raises(MemberError, match=r"member 'math': .* holds no weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_checkpoints_cut_off_half_way(members_dir: Path, tmp_path: Path) -> None:
    save("self-contained", members_dir, tmp_path / "out")
    for file in [path for path in (tmp_path / "out").rglob("*") if path.name.endswith((".safetensors", "x.json"))]:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(tessellm.TessellmError, match="is cut off"):
            tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
        file.unlink()
        with pytest.raises(tessellm.TessellmError, match=r"missing|holds no weights"):
            tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
        file.write_bytes(whole)
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text()[:100])
    with pytest.raises(CheckpointError, match=r"config\.json is cut off or damaged"):
        tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
    config.unlink()
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError, match="a model of type 'llama'"):
        tessellm.ComposedForCausalLM.from_pretrained(members_dir / "base")


def test_resaving_replaces_a_composition_and_nothing_else(members_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    model = save("self-contained", members_dir, target)
    model.set_rule(weights=[0.2, 0.3])
    model.save_pretrained(target)
    assert "members" not in listing(target)
    assert AutoConfig.from_pretrained(target).weights == (0.2, 0.3)
    assert listing(tmp_path) == sorted(["out", *(f"out/{name}" for name in listing(target))])
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"also notes\.txt, which would be lost"):
        model.save_pretrained(target)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and holds something else"):
        model.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="exists and is a file"):
        model.save_pretrained(target / "notes.txt")
    with pytest.raises(CheckpointError, match=r"cannot be made in .*notes\.txt: that is a file"):
        model.save_pretrained(target / "notes.txt" / "deeper")
    assert (tmp_path / "other" / "thesis.tex").read_text() == (target / "notes.txt").read_text() == "mine"


def test_links_into_the_folder_that_is_replaced_are_refused(members_dir: Path, tmp_path: Path) -> None:
    save("self-contained", members_dir, tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=r"member 'base' is inside .*out, which would be replaced"):
        model.save_pretrained(tmp_path / "out")
    assert listing(tmp_path) == before
    model.save_pretrained(tmp_path / "out", self_contained=True)
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)


def test_what_cannot_be_saved(members_dir: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(members_dir / "base")
    model = tessellm.compose(base, {"x": perturbed(base, 3)}, tokenizer=character_tokenizer())
    with pytest.raises(CheckpointError, match=r"member 'base' was given as a loaded model, .*self_contained=True"):
        model.save_pretrained(tmp_path / "deep" / "out")
    assert listing(tmp_path) == []
    model.save_pretrained(tmp_path / "deep" / "out", self_contained=True)
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "out")) == tokens(model)


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """As on a disk with no more room: no file may grow past the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [60_000, 1_000])  # inside the weights; inside config.json
def test_a_full_disk_leaves_nothing_behind(members_dir: Path, tmp_path: Path, limit: int) -> None:
    model = composed(members_dir)
    with pytest.raises(CheckpointError, match=r"could not be written: .*File too large.*Nothing was changed"):  # noqa: SIM117
        with largest_file(limit):
            model.save_pretrained(tmp_path / "new" / "out", self_contained=True)
    assert listing(tmp_path) == []
    model.save_pretrained(tmp_path / "out")
    before = listing(tmp_path)
    with pytest.raises(CheckpointError), largest_file(limit):
        model.save_pretrained(tmp_path / "out", self_contained=True)
    assert listing(tmp_path) == before
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)


KILLED_WHILE_SAVING = """
import os, sys, tessellm, tessellm.checkpoint
model = tessellm.compose(f"{sys.argv[1]}/base", {"math": f"{sys.argv[1]}/math"})
tessellm.checkpoint.model_card = lambda *_: os.kill(os.getpid(), 9)  # the last thing that is written
model.save_pretrained(sys.argv[2], self_contained=True)
"""


def test_a_process_killed_while_saving_leaves_the_old_composition(members_dir: Path, tmp_path: Path) -> None:
    model = save("linked", members_dir, tmp_path / "out")
    before = listing(tmp_path)
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, members_dir, tmp_path / "out"]
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == -signal.SIGKILL
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)
    [left] = [path for path in tmp_path.iterdir() if path.name != "out"]
    assert left.name.startswith(".out.")
    assert (left / "members" / "base").is_dir()
    model.save_pretrained(tmp_path / "out")  # clears what the killed process left
    assert listing(tmp_path) == before


def test_ctrl_c_while_saving_leaves_nothing(members_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = composed(members_dir)
    monkeypatch.setattr("tessellm.checkpoint.model_card", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "new" / "out", self_contained=True)
    assert listing(tmp_path) == []


def test_a_swap_that_was_cut_off_is_undone(members_dir: Path, tmp_path: Path) -> None:
    model = save("linked", members_dir, tmp_path / "out")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "out").rename(tmp_path / f".out.{dead.pid}.old.tmp")  # killed between two renames
    running = tmp_path / f".out.{os.getppid()}.tmp"  # another process is still at work
    running.mkdir()
    with pytest.raises(CheckpointError), largest_file(1_000):
        model.save_pretrained(tmp_path / "out", self_contained=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [running.name, "out"]
    assert tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == tokens(model)


def test_aligned_vocabularies_are_saved(members_dir: Path, tmp_path: Path) -> None:
    padded = AutoModelForCausalLM.from_pretrained(members_dir / "math")
    padded.resize_token_embeddings(80, mean_resizing=False)
    save_member(padded, tmp_path / "padded", character_tokenizer())
    model = tessellm.compose(members_dir / "base", {"x": tmp_path / "padded"})
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.vocab_size == 64
    assert torch.equal(logits(again), logits(model))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_tensor("weights").tolist() == [1.0]
