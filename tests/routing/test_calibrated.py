"""The router that composing calibrates: of which experts, from which texts, kept where, and when there is none."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

import tessellm
from tessellm.errors import MemberError, RecipeError
from tessellm.routing import calibrated
from tessellm.routing.calibration import calibration_prompts
from tessellm.routing.router import DeltaRouter
from tessellm.routing.stored import cache_folder, cached_router, keep_router
from tessellm.rules.components import mix

from conftest import build_model, perturbed

FEW = [text for text in calibration_prompts() if len(text) < 60][:48]
TOLD = {"math": "Solves word problems.", "coding": "Writes programs."}


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrated, "calibration_prompts", lambda: FEW)
    monkeypatch.setenv("TESSELLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def measured(monkeypatch):
    """What the routers were calibrated with, in order."""
    found, calibrate = [], DeltaRouter.calibrate.__func__

    def spy(cls, base, tokenizer, experts, **options):
        found.append({"experts": experts, **options})
        return calibrate(cls, base, tokenizer, experts, **options)

    monkeypatch.setattr(DeltaRouter, "calibrate", classmethod(spy))
    return found


def composed(members: Path, told=TOLD, **options):
    experts = {
        name: {"source": members / f"lora_{name}", **({"description": told[name]} if name in told else {})}
        for name in ("math", "coding")
    }
    return tessellm.compose(members / "base", experts, **{"rule": "mixture", **options})


def test_a_second_start_measures_nothing(members_dir, measured):
    first, again = composed(members_dir), composed(members_dir)
    assert len(measured) == 1
    assert again.router.state()[1] == first.router.state()[1]
    assert again.route("what is 3 + 4?").prior == pytest.approx(first.route("what is 3 + 4?").prior, rel=1e-3)
    (kept,) = cache_folder().iterdir()
    kept.write_bytes(b"cut off")
    assert composed(members_dir).router.limits.threshold == first.router.limits.threshold
    assert len(measured) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"told": {"math": "Solves equations.", "coding": "Writes programs."}},
        {"base_retention": 0.8},
        {"dtype": "bfloat16"},
        {"chat_template": "{{ messages[-1]['content'] }}:"},
    ],
)
def test_what_the_router_depends_on_is_measured_anew(members_dir, measured, change):
    composed(members_dir)
    composed(members_dir, **change)
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_is_done_without(members_dir, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESSELLM_CACHE", str(tmp_path / "file"))
    assert composed(members_dir).router is not None


def test_many_may_keep_one_router_at_once(members_dir):
    model = composed(members_dir)
    threads = [threading.Thread(target=keep_router, args=("key", model.router)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in cache_folder().iterdir() if path.name.startswith(("key", "."))] == ["key.safetensors"]
    kept = cached_router("key", model.base, model.tokenizer)
    assert kept.limits.threshold == model.router.limits.threshold


def test_descriptions_examples_and_progress_reach_the_router(members_dir, measured, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 2"}\n"3 * 3"\n')
    (tmp_path / "prompts.txt").write_text("sort a list\n\nreverse a text\n")
    seen = []
    model = tessellm.compose(
        {"source": members_dir / "base", "examples": ["how are you?"]},
        {
            "math": {"source": members_dir / "lora_math", "examples": tmp_path / "prompts.jsonl"},
            "coding": {"source": members_dir / "lora_coding", "examples": str(tmp_path / "prompts.txt")},
        },
        rule="mixture",
        base_retention=0.9,
        progress=lambda done, total: seen.append((done, total)),
    )
    (given,) = measured
    assert given["experts"]["math"].examples == ("2 + 2", "3 * 3")
    assert given["experts"]["coding"].examples == ("sort a list", "reverse a text")
    assert given["prompts"] == ["how are you?", *FEW]
    assert given["base_retention"] == 0.9
    assert seen[-1] == (len(FEW) + 1, len(FEW) + 1)
    assert not any("no description" in note for note in model.notes)


def test_the_card_beside_an_adapter_describes_it(members_dir, measured, tmp_path):
    folder = shutil.copytree(members_dir / "lora_math", tmp_path / "told")
    (folder / "README.md").write_text("---\ndescription: Adds numbers.\n---\n")
    model = tessellm.compose(
        members_dir / "base", {"told": folder, "plain": members_dir / "lora_coding"}, rule="mixture"
    )
    assert measured[0]["experts"]["told"].description == "Adds numbers."
    assert model.config.members[1]["description"] == "Adds numbers."
    assert any(note.startswith("no description: plain. A line") for note in model.notes)


def test_styles_and_anti_experts_are_not_routed(members_dir, measured):
    model = tessellm.compose(
        members_dir / "base",
        {
            "math": members_dir / "lora_math",
            "loud": {"source": members_dir / "lora_coding", "style": True},
            "anti": {"source": members_dir / "lora_coding", "weight": -0.2},
        },
        rule="mixture",
    )
    assert list(measured[0]["experts"]) == ["math"]
    assert set(model.route("abc").prior) == {"base", "math"}


def test_a_rule_that_is_set_later_gets_its_router(members_dir, measured):
    model = composed(members_dir, rule="product")
    assert model.router is None
    assert not measured
    model.set_rule("mixture")
    assert model.route("abc").selected in ("base", "math", "coding")
    model.set_rule({"name": "mixture", "switch_prob": 0.1})
    assert len(measured) == 1


def test_without_a_router_all_prompts_have_one_prior(members_dir):
    off = composed(members_dir, router=False)
    assert off.router is None
    assert not any("router" in note for note in off.notes)
    base = build_model()
    bare = tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="mixture")
    assert any("no router, so all prompts have one prior: no member came with a tokenizer" in n for n in bare.notes)
    ids = torch.tensor([[5, 6, 7]])
    prior = bare.rule.routed.unrouted_prior(2)
    rows = bare(ids, answer_start=3, output_member_logprobs=True, logits_to_keep=1)
    expected = mix(rows.member_logprobs[:, :, -1], bare.rule.routed.component_weights(2), prior[None].log())
    torch.testing.assert_close(rows.logits[:, -1], expected)


def test_members_that_cannot_be_compared_are_not_routed(tiny_tokenizer):
    other = build_model("gpt2", 1)
    model = tessellm.compose(build_model(), {"other": other}, rule="mixture", tokenizer=tiny_tokenizer)
    assert model.router is None
    assert any("other has other layers than the base" in note for note in model.notes)


def test_a_short_context_leaves_too_few_prompts(tiny_tokenizer):
    base = build_model(max_position_embeddings=16)
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="mixture", tokenizer=tiny_tokenizer)
    assert model.router is None
    assert any("calibration prompts fit into the context of 16 and the vocabulary" in note for note in model.notes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"router": "yes"}, "router: expected true or false; got 'yes'"),
        ({"base_retention": 1}, "base_retention: expected a share between 0 and 1"),
        ({"base_retention": True}, "base_retention: expected a share between 0 and 1"),
        ({"embedder": 3}, "embedder: expected a sentence-transformers model"),
    ],
)
def test_settings_that_are_none_are_refused_before_anything_is_loaded(options, told, tmp_path):
    with pytest.raises(RecipeError, match=told):
        tessellm.compose(tmp_path / "missing", {"a": tmp_path / "missing"}, rule="mixture", **options)


@pytest.mark.parametrize(
    ("member", "told"),
    [
        ({"description": "  "}, "description: expected one line of at most 500 characters; got an empty text"),
        ({"description": "word " * 200}, "got 999 characters"),
        ({"examples": []}, "examples: expected at least one prompt"),
        ({"examples": ["a", ""]}, "examples: expected texts; number 2 is empty"),
        ({"examples": "nowhere.txt"}, "examples: nowhere.txt cannot be read: No such file"),
        ({"examples": 3}, "examples: expected a list of prompts, or a file that holds them; got 3"),
        ({"description": 3}, "description: expected one line that says what the expert is for; got 3"),
    ],
)
def test_words_that_say_nothing_are_refused(member, told, tmp_path):
    with pytest.raises(MemberError, match=told):
        tessellm.compose(tmp_path, {"a": {"source": tmp_path, **member}})
    if "description" in member:
        with pytest.raises(MemberError, match="member 'base': "):
            tessellm.compose({"source": tmp_path, "description": "All else."}, {"a": tmp_path})


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", "{", "is no valid JSON"),
        ("a.json", '{"prompt": "a"}', "holds no list of prompts"),
        ("a.jsonl", '{"text": "a"}', "number 1 is None"),
        ("a.txt", b"\xff\xfe\x00", "it is not UTF-8 text"),
    ],
)
def test_a_file_of_examples_that_is_none_is_refused(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MemberError, match=told):
        tessellm.compose(tmp_path, {"a": {"source": tmp_path, "examples": tmp_path / name}})
