"""compose(): what it takes, what it refuses, and how members are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    T5Config,
    T5ForConditionalGeneration,
)

import tessellm
from tessellm.errors import MemberError, RecipeError
from tessellm.rules import BaseRule

from conftest import CONTEXT, build_model, character_tokenizer, logits, save_member


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(tessellm.TessellmError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_members_in_every_form(members_dir: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(members_dir / "coding")
    model = tessellm.compose(
        {"source": str(members_dir / "base")},
        {
            "folder": members_dir / "math",
            "text": str(members_dir / "math"),
            "mapping": {"source": members_dir / "math", "weight": 0.5},
            "spec": tessellm.MemberSpec(members_dir / "lora_math", weight=-0.5),
            "loaded": loaded,
        },
        weights={"text": 2},
    )
    assert model.config.weights == (1.0, 2.0, 0.5, -0.5, 1.0)
    assert torch.equal(logits(model.member("loaded")), logits(loaded))
    assert model.member("folder").lm_head.weight is not model.base.lm_head.weight
    assert "source" not in model.config.members[5]


def test_the_smallest_context_and_the_end_tokens_are_the_members(members_dir: Path, tmp_path: Path) -> None:
    short = save_member(build_model("llama", 3, max_position_embeddings=48, eos_token_id=5), tmp_path / "short")
    model = tessellm.compose(members_dir / "base", {"math": members_dir / "math", "short": short})
    assert model.config.max_position_embeddings == 48
    assert model.config.eos_token_id == [2, 5]
    assert model.generation_config.eos_token_id == [2, 5]
    with pytest.raises(tessellm.TessellmError, match=r"49 tokens are too many: .* is 48"):
        logits(model, 49)


def test_weights(members_dir: Path) -> None:
    base, experts = members_dir / "base", {"math": members_dir / "math"}
    for weight in (math.nan, math.inf, "1", None, True):
        message = refusal(lambda weight=weight: tessellm.compose(base, experts, weights={"math": weight}))
        assert message == f"member 'math': a weight must be a number within ±1,000,000; got {weight!r}"
    message = refusal(lambda: tessellm.compose(base, experts, weights={"maths": 1.0}))
    assert message == "there is a weight for 'maths', but no such expert; did you mean 'math'? Known: math"
    assert "no such expert" in refusal(lambda: tessellm.compose(base, experts, weights={"base": 1.0}))
    assert "weights are a mapping" in refusal(lambda: tessellm.compose(base, experts, weights=[1.0]))  # type: ignore[arg-type]


def test_what_is_no_member(members_dir: Path) -> None:
    base, math_ = members_dir / "base", members_dir / "math"
    assert "at least one expert" in refusal(lambda: tessellm.compose(base, {}))
    assert "at least one expert" in refusal(lambda: tessellm.compose(base, [math_]))  # type: ignore[arg-type]
    assert "got int" in refusal(lambda: tessellm.compose(base, {"x": 3}))
    assert "did you mean 'weight'" in refusal(lambda: tessellm.compose(base, {"x": {"source": math_, "wieght": 1}}))
    assert "the key 'source' is missing" in refusal(lambda: tessellm.compose(base, {"x": {"weight": 1}}))
    for name in ("base", "composed", "keys", "1st", "a/b", "", 3, "a.b"):
        assert "cannot be an expert's name" in refusal(lambda name=name: tessellm.compose(base, {name: math_}))


def test_rules_and_options_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    def attempt(**options: Any) -> Any:
        return tessellm.compose(tmp_path / "nowhere", {"x": tmp_path / "nowhere"}, **options)

    assert "unknown rule 'prodct'; did you mean 'product'?" in refusal(lambda: attempt(rule="prodct"))
    assert "unknown parameter 'strength' of the rule 'product'" in refusal(
        lambda: attempt(rule={"name": "product", "strength": 2})
    )
    assert "device_map names 'y'" in refusal(lambda: attempt(device_map={"y": "cpu"}))
    with pytest.raises(TypeError, match="unexpected argument 'dtpe'; did you mean 'dtype'"):
        attempt(dtpe="float32")
    assert "unknown dtype 'float23'; did you mean 'float32'?" in refusal(lambda: attempt(dtype="float23"))
    assert "there is no folder" in refusal(attempt)


def test_models_that_are_no_decoders_are_refused(members_dir: Path, tmp_path: Path) -> None:
    base = members_dir / "base"
    small = {"vocab_size": 64, "num_hidden_layers": 1}
    bert = BertLMHeadModel(
        BertConfig(hidden_size=8, num_attention_heads=1, intermediate_size=8, is_decoder=True, **small)
    )
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_heads=1, num_layers=1, vocab_size=64))
    assert "T5ForConditionalGeneration cannot be composed" in refusal(lambda: tessellm.compose(base, {"x": t5}))
    save_member(t5, tmp_path / "t5")
    assert "member 'x': " in refusal(lambda: tessellm.compose(base, {"x": tmp_path / "t5"}))
    tessellm.compose(bert, {"x": bert})  # a decoder, if an old one
    composition = tessellm.compose(base, {"x": members_dir / "math"})
    assert "is itself a composition" in refusal(lambda: tessellm.compose(composition, {"x": members_dir / "math"}))
    composition.save_pretrained(tmp_path / "out")
    assert "is itself a composition" in refusal(lambda: tessellm.compose(base, {"x": tmp_path / "out"}))


def test_checkpoints_that_lack_tensors_are_refused(own_members: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = own_members / "math" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    message = refusal(lambda: tessellm.compose(own_members / "base", {"math": own_members / "math"}))
    assert "lacks 1 tensors of a LlamaForCausalLM, first model.layers.1.mlp.up_proj.weight" in message


def test_broken_configs_and_tokenizers_are_named(own_members: Path) -> None:
    config = own_members / "math" / "config.json"
    whole = config.read_text()
    for text in ("{", '{"model_type": "no-such-model"}', "[]"):
        config.write_text(text)
        message = refusal(lambda: tessellm.compose(own_members / "base", {"math": own_members / "math"}))
        assert message.startswith(f"member 'math': {own_members / 'math'}")
        assert "damaged" in message or "cannot be loaded" in message
    config.write_text(whole)
    (own_members / "math" / "tokenizer.json").write_text("{")
    message = refusal(lambda: tessellm.compose(own_members / "base", {"math": own_members / "math"}))
    assert f"the tokenizer in {own_members / 'math'} cannot be loaded" in message


def test_dtype_and_device_of_each_member(members_dir: Path) -> None:
    experts: dict[str, Any] = {
        "math": {"source": members_dir / "math", "dtype": torch.float64},
        "x": members_dir / "coding",
    }
    model = tessellm.compose(members_dir / "base", experts, dtype="bfloat16", device_map={"": "cpu", "x": "cpu"})
    dtypes = [model.member(name).dtype for name in ("base", "math", "x")]
    assert dtypes == [torch.bfloat16, torch.float64, torch.bfloat16]
    assert logits(model).dtype == torch.float64  # the best that any member has
    assert "meta" in refusal(lambda: tessellm.compose(members_dir / "base", experts, device_map="metal"))


def test_what_cannot_be_said_of_a_loaded_model(members_dir: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(members_dir / "math")
    for option in ({"dtype": "float16"}, {"revision": "main"}, {"quantization": "bnb-4bit"}):
        given = {"source": loaded, **option}
        message = refusal(lambda given=given: tessellm.compose(members_dir / "base", {"x": given}))
        assert f"'x' is a loaded model; {next(iter(option))} cannot be set any more" in message


def test_the_users_tokenizer_is_left_alone(members_dir: Path) -> None:
    plain = character_tokenizer(chat_template=None)
    base, other = build_model("llama", 0), members_dir / "math"
    model = tessellm.compose(base, {"x": other}, tokenizer=plain)
    assert plain.chat_template is None
    assert model.tokenizer.chat_template is not None  # the expert's: the only one there is


def test_a_chat_template_of_the_users_is_kept_with_the_composition(members_dir: Path, tmp_path: Path) -> None:
    template = "Q: {{ messages[-1]['content'] }}\nA:"
    model = tessellm.compose(members_dir / "base", {"x": members_dir / "math"}, chat_template=template)
    model.save_pretrained(tmp_path / "saved")
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        asked = each.tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False)
        assert asked == "Q: 1+1\nA:"
    for wrong, why in (
        ("A:", "leaves out what the user says"),
        ("{{ nobody.said }}", "cannot be run"),
        ("{% if", "cannot"),
        ("{{ 1 / 0 }}{{ messages[-1]['content'] }}", "cannot be run: division by zero"),
        ({"default": template}, "expected text; got dict"),
    ):
        given = {"experts": {"x": members_dir / "math"}, "chat_template": wrong}
        assert why in refusal(lambda given=given: tessellm.compose(members_dir / "base", **given))
    loaded = build_model("llama", 0)
    assert "needs a tokenizer" in refusal(lambda: tessellm.compose(loaded, {"x": loaded}, chat_template=template))


def test_notes_say_whose_chat_template_it_is(members_dir: Path) -> None:
    members = (members_dir / "base", {"x": members_dir / "math"})
    assert "The chat template is that of 'base'." in tessellm.compose(*members).notes
    marked = tessellm.compose(*members, chat_template="Q: {{ messages[-1]['content'] }}\nA:").notes
    open_ended = tessellm.compose(*members, chat_template="Q: {{ messages[-1]['content'] }}").notes
    assert [note for note in marked if "template" in note] == ["The chat template is the one given."]
    assert [note for note in open_ended if "template" in note] == ["The chat template is the one given."]


def test_mixed_architectures_compose_and_a_model_may_not_say_its_context(members_dir: Path, tmp_path: Path) -> None:
    gpt2 = save_member(build_model("gpt2", 4), tmp_path / "gpt2", character_tokenizer())
    model = tessellm.compose(members_dir / "base", {"x": gpt2, "y": build_model("gemma2", 2)})
    assert torch.isfinite(logits(model)).all()
    assert model.config.max_position_embeddings == CONTEXT
    from transformers import BloomConfig, BloomForCausalLM

    ids = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    bloom = BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, **ids)).eval()
    assert tessellm.compose(bloom, {"x": bloom}).config.max_position_embeddings == 0


def test_a_rule_of_ones_own_runs_but_is_not_saved(members_dir: Path, tmp_path: Path) -> None:
    class First(BaseRule):
        name = "first"

        def __call__(self, logp_MBTV: Any, tokens_BT: Any, mask_BT: Any, state: Any) -> Any:
            return logp_MBTV[1], None

    model = tessellm.compose(members_dir / "base", {"x": members_dir / "math"}, rule=First())
    expected = logits(AutoModelForCausalLM.from_pretrained(members_dir / "math")).log_softmax(-1)
    torch.testing.assert_close(logits(model), expected)
    with pytest.raises(tessellm.TessellmError, match="'first' is not in tessellm's table"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert RecipeError.__mro__[1] is tessellm.TessellmError


def test_a_window_of_one_token_is_refused() -> None:
    """Transformers decodes something else with a cache than without: if this fails, it was mended, and so can we."""
    base = build_model("gemma2", 0, sliding_window=1)
    ids, cache = torch.tensor([[5, 6, 7, 8, 9]]), DynamicCache(config=base.config)
    with torch.no_grad():
        stepped = torch.cat([base(ids[:, t : t + 1], past_key_values=cache).logits for t in range(5)], 1)
        assert not torch.allclose(base(ids).logits, stepped, atol=1e-2)
    with pytest.raises(MemberError, match="member 'base' has a sliding window of one token"):
        tessellm.compose(base, {"math": build_model("gemma2", 1, sliding_window=1)})
    tessellm.compose(build_model("gemma2", 0, sliding_window=2), {"math": build_model("gemma2", 1, sliding_window=2)})
