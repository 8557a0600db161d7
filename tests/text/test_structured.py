"""Texts that are held to a JSON schema: whatever random members prefer, what is written parses and fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tessellm
from tessellm import checkpoint
from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation import Speculation
from tessellm.errors import GenerationError
from tessellm.text.generate import generate_texts
from tessellm.text.options import TextOptions
from tessellm.text.structured import Structures
from tessellm.text.writer import Writer

from conftest import VOCAB, build_model, character_tokenizer, perturbed, save_member
from servers import Running, serving

SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "bé", "c\n"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 6}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
        "required": ["who"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"const": 1.5}, {"type": "null"}]},
}
NEW = 160


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a few of several."""
    special = ["<pad>", "<s>", "</s>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("{", '"'), ('"', ":"), ("Ġ", '"'), ("t", "r"), ("u", "e"), ("tr", "ue")]
    words = [*special, *letters, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": special[3:]}
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home, tokenizer = tmp_path_factory.mktemp("structured"), byte_tokenizer()
    base = build_model("llama", vocab_size=len(tokenizer) + 3, eos_token_id=2, max_position_embeddings=256)
    members = {"base": base, "one": perturbed(base, 1), "two": perturbed(base, 2)}
    places = {name: str(save_member(member, home / name, tokenizer)) for name, member in members.items()}
    tessellm.compose(places.pop("base"), places, rule="product").save_pretrained(home / "out")
    return home / "out"


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return checkpoint.load(folder)


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with serving(folder, log, "--slots", "4", "--context", "256") as started:
        yield started


def check(text: str, finish_reason: str | None, schema: dict[str, Any]) -> None:
    assert finish_reason in ("stop", "length")
    if finish_reason == "stop":
        jsonschema_rs.validate(schema, json.loads(text))


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_what_is_written_fits_its_schema(model: Any, name: str, temperature: float) -> None:
    prompts = [f"{number} is" for number in range(6)]
    options = TextOptions(NEW, temperature, seed=3, schema=SCHEMAS[name])
    found = [*generate_texts(model, prompts, options, batch_size=4)]
    for each in found:
        check(each.text, each.finish_reason, SCHEMAS[name])
    assert any(each.finish_reason == "stop" for each in found)
    free = [*generate_texts(model, prompts, TextOptions(NEW, temperature, seed=3), batch_size=4)]
    assert [each.text for each in free] != [each.text for each in found]


def test_others_in_the_batch_write_what_they_write_alone(model: Any) -> None:
    engine = Engine(model, slots=4, context=256)
    prompts = [model.tokenizer(text)["input_ids"] for text in ("abc", "x = 1", "hello")]
    alone = [request.tokens for request in engine.generate(prompts, Sampling(24))]
    form = Structures(model.tokenizer, model.config.vocab_size, engine.ends).of(SCHEMAS["list"])
    held = [Request(ids, Sampling(NEW), form=form.another()) for ids in prompts]
    free = [Request(ids, Sampling(24)) for ids in prompts]
    for _ in Writer(engine).write([(request, None) for pair in zip(held, free, strict=True) for request in pair]):
        pass
    assert [request.tokens for request in free] == alone
    for request in held:
        text = model.tokenizer.decode(request.tokens, skip_special_tokens=True)
        check(text, request.finish_reason, SCHEMAS["list"])


def test_the_likeliest_token_that_is_allowed_is_chosen(model: Any) -> None:
    """Log-probabilities are those of the composition, whatever was excluded."""
    engine = Engine(model, slots=1, context=256)
    ids = model.tokenizer("abc")["input_ids"]
    form = Structures(model.tokenizer, model.config.vocab_size, engine.ends).of(SCHEMAS["object"])
    request = Request(ids, Sampling(NEW), form=form.another())
    for _ in Writer(engine).write([(request, None)]):
        pass
    with torch.no_grad():
        logp_TV = model(torch.tensor([ids + request.tokens])).logits[0].log_softmax(-1)
    for place, (token, logprob) in enumerate(zip(request.tokens, request.logprobs, strict=True), len(ids) - 1):
        allowed_V = form.allowed()
        best = logp_TV[place].masked_fill(~allowed_V, -torch.inf)
        assert token == int(best.argmax())
        assert logprob == pytest.approx(float(logp_TV[place, token]), abs=1e-3)
        form.accept(token)


def test_drafts_are_held_to_it_too(model: Any) -> None:
    texts = []
    for speculation in (None, Speculation("lookup")):
        engine = Engine(model, slots=2, context=256, speculation=speculation)
        form = Structures(model.tokenizer, model.config.vocab_size, engine.ends).of(SCHEMAS["object"])
        request = Request(model.tokenizer("[1, 2, 1, 2]")["input_ids"], Sampling(NEW), form=form)
        for _ in Writer(engine).write([(request, None)]):
            pass
        texts.append(request.tokens)
    assert texts[0] == texts[1]


def test_schemas_that_cannot_be_honoured_are_refused(model: Any) -> None:
    structures = Structures(model.tokenizer, model.config.vocab_size, model.config.eos_token_id)
    for wrong in ({"type": "no type"}, {"$ref": "#/nowhere"}, {"enum": []}, {"x": "a" * 70_000}):
        with pytest.raises(GenerationError, match="schema"):
            structures.of(wrong)
    with pytest.raises(GenerationError, match=r"it has no token '\{'"):
        Structures(character_tokenizer(), VOCAB, [2]).of(SCHEMAS["object"])
    with pytest.raises(GenerationError, match="declare no end token"):
        Structures(model.tokenizer, model.config.vocab_size, ()).of(None)


def test_a_vocabulary_without_the_characters_fails_alone(model: Any) -> None:
    engine = Engine(model, slots=2, context=256)
    structures = Structures(model.tokenizer, model.config.vocab_size, engine.ends)
    form = structures.of({"const": "a"})
    form.allowed = lambda: _none(form, model.config.vocab_size)  # type: ignore[method-assign]
    wrong, right = (Request(model.tokenizer("abc")["input_ids"], Sampling(4), form=each) for each in (form, None))
    for _ in Writer(engine).write([(wrong, None), (right, None)]):
        pass
    assert (wrong.finish_reason, wrong.error) == ("error", "none")
    assert right.finish_reason == "length"


def _none(form: Any, vocabulary: int) -> torch.Tensor:
    form.failure = "none"
    return torch.arange(vocabulary) == 2


def ask(running: Running, format_: Any, **options: Any) -> Any:
    body = {"model": "out", "messages": [{"role": "user", "content": "abc"}], "max_tokens": NEW, "seed": 1}
    return running.post("/v1/chat/completions", json={**body, "response_format": format_, **options})


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_server_holds_answers_to_a_schema(running: Running, name: str) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": SCHEMAS[name]}}
    answer = ask(running, format_, n=4)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        check(choice["message"]["content"], choice["finish_reason"], SCHEMAS[name])
    streamed = ask(running, format_, n=1, stream=True, seed=None)
    pieces = [json.loads(line[6:])["choices"][0] for line in streamed.text.split("\n") if line.startswith("data: {")]
    check("".join(piece["delta"].get("content") or "" for piece in pieces), pieces[-1]["finish_reason"], SCHEMAS[name])


def test_any_json_object(running: Running) -> None:
    reasons = []
    for seed in range(4):
        choice = ask(running, {"type": "json_object"}, seed=seed).json()["choices"][0]
        check(choice["message"]["content"], choice["finish_reason"], {"type": "object"})
        reasons.append(choice["finish_reason"])
    assert ask(running, {"type": "text"}).status_code == 200


@pytest.mark.parametrize(
    "format_",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no type"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
        {"type": "json_object", "json_schema": {"name": "x", "schema": {}}},
        {"type": "yaml"},
        "json_object",
    ],
)
def test_the_server_refuses_other_forms(running: Running, format_: Any) -> None:
    answer = ask(running, format_)
    assert answer.status_code == 400
    assert "response_format" in answer.json()["error"]["param"]


def test_the_command_line_holds_texts_to_a_file(cli: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMAS["object"]))
    options = ("--schema", tmp_path / "schema.json", "--max-new-tokens", NEW, "--json", tmp_path / "out.json")
    assert cli("generate", folder, "abc", "x", *options).code == 0
    for each in json.loads((tmp_path / "out.json").read_text()):
        check(each["text"], each["finish_reason"], SCHEMAS["object"])
    (tmp_path / "schema.json").write_text("[]")
    assert cli("generate", folder, "abc", *options).code == 2
    assert cli("generate", folder, "abc", "--schema", tmp_path / "none.json").code == 2
