"""The official client against a real process on a real port."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that servers are started once
PROMPT = "what is 2+2?"
MESSAGES: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(composed: tuple[Any, Path]) -> Any:
    return composed[0]


def alone(model: Any, text: str, new: int, **sampling: Any) -> tuple[str, Request]:
    """What the engine writes when nobody else asks."""
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    (request,) = Engine(model, slots=1).generate([ids], Sampling(new, **sampling))
    return model.tokenizer.decode(request.tokens, skip_special_tokens=True), request


def test_models_are_the_composition_and_its_members(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "base", "math", "coding"]
    assert [model.parent for model in models] == [None, None, "base", "base"]
    assert [Path(model.root).name for model in models] == ["tiny", "base", "math", "coding"]
    assert client.models.retrieve("math").id == "math"
    about = models[0].tessellm
    assert about["rule"] == "product"
    assert [member["name"] for member in about["members"]] == ["base", "math", "coding"]


def test_a_completion_is_what_the_engine_writes_alone(client: openai.OpenAI, model: Any) -> None:
    text, request = alone(model, PROMPT, 24)
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, logprobs=3)
    choice = answer.choices[0]
    assert choice.text == text
    assert choice.finish_reason == request.finish_reason
    written = [token for token in request.tokens if token not in model.config.eos_token_id]
    assert choice.logprobs.tokens == [model.tokenizer.decode([token]) for token in written]
    found = torch.tensor(choice.logprobs.token_logprobs)
    torch.testing.assert_close(found, torch.tensor(request.logprobs[: len(written)]), atol=1e-4, rtol=0)
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs)
    for top, own in zip(choice.logprobs.top_logprobs, choice.logprobs.token_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(own, abs=1e-5)  # greedy
    assert choice.logprobs.text_offset == list(range(len(written)))
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(request.tokens)


def test_chat_goes_through_the_template(client: openai.OpenAI, model: Any) -> None:
    prompt = model.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    text, _ = alone(model, prompt, 20)
    assert text
    parts: Any = [{"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]}]
    for messages in (MESSAGES, [*parts, MESSAGES[1]]):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, temperature=0, logprobs=True, top_logprobs=2
        )
        choice = answer.choices[0]
        assert choice.message.content == text
        assert choice.message.role == "assistant"
        assert "".join(entry.token for entry in choice.logprobs.content) == text
        assert bytes(choice.logprobs.content[0].bytes).decode() == choice.logprobs.content[0].token
        assert choice.logprobs.content[0].top_logprobs[0].token == text[0]
        assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_a_message_cannot_end_its_turn(client: openai.OpenAI) -> None:
    for text in ("</s>", "a</s><s>b"):
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], max_tokens=1, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(f"u: {text}\na: ")  # a token for each character, as of any text


def test_streams_hold_the_same_text(client: openai.OpenAI, model: Any) -> None:
    text, request = alone(model, PROMPT, 24)
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    pieces = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == text
    assert pieces[-1].usage.completion_tokens == len(request.tokens)
    assert pieces[-1].choices == []
    assert pieces[-2].choices[0].finish_reason == request.finish_reason
    assert len(pieces) > 10
    assert len({piece.id for piece in pieces}) == 1
    assert all(piece.usage is None for piece in client.completions.create(**options, stream=True))


def test_the_clients_streaming_helper(client: openai.OpenAI, model: Any) -> None:
    prompt = model.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    text, _ = alone(model, prompt, 16)
    stop, text = text[9:12], text[: text.find(text[9:12])]
    options: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "logprobs": True, "stop": stop}
    with client.chat.completions.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert "".join(deltas) == whole.choices[0].message.content == text
    assert "".join(entry.token for entry in whole.choices[0].logprobs.content) == text


def test_penalties_and_the_likeliest_few(client: openai.OpenAI, model: Any) -> None:
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24}
    text, _ = alone(model, PROMPT, 24, frequency_penalty=1.0, presence_penalty=0.5)
    answer = client.completions.create(**options, temperature=0, frequency_penalty=1.0, presence_penalty=0.5)
    assert answer.choices[0].text == text != alone(model, PROMPT, 24)[0]
    few = client.completions.create(**options, temperature=2, extra_body={"top_k": 1})
    assert few.choices[0].text == alone(model, PROMPT, 24)[0]


def test_echo_gives_the_prompt_back(client: openai.OpenAI, model: Any) -> None:
    options: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0, "n": 2}
    text, _ = alone(model, PROMPT, 6)
    ids = model.tokenizer(PROMPT)["input_ids"]
    for prompt in (PROMPT, ids, [PROMPT, "abc"]):
        answer = client.completions.create(**options, prompt=prompt, echo=True)
        assert [choice.text for choice in answer.choices[:2]] == [PROMPT + text] * 2
    assert answer.choices[3].text.startswith("abc")
    streamed = ["", ""]
    for piece in client.completions.create(**options, prompt=PROMPT, echo=True, stream=True):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == [PROMPT + text] * 2


def test_forms_that_a_vocabulary_cannot_write_are_refused(client: openai.OpenAI) -> None:
    forms: list[Any] = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}]
    for form in forms:
        with pytest.raises(openai.BadRequestError, match="cannot write every JSON text") as caught:
            client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form)
        assert caught.value.body["param"] == "response_format"
    plain: Any = {"type": "text"}
    client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=plain, max_tokens=1)


def test_seeds_and_several_choices(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "n": 4}
    first = client.completions.create(**options, seed=7)
    again = client.completions.create(**options, seed=7)
    other = client.completions.create(**options, seed=8)
    texts = [[choice.text for choice in answer.choices] for answer in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert first.usage.prompt_tokens == len(PROMPT)
    streamed = ["", "", "", ""]
    for piece in client.completions.create(**options, seed=7, stream=True):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == texts[0]
    two = client.completions.create(**{**options, "n": 1, "prompt": [PROMPT, "abc"], "temperature": 0})
    ids: Any = [list(range(4, 9)), [4]]
    both = client.completions.create(**{**options, "n": 1, "prompt": ids, "temperature": 0})
    assert len(two.choices) == len(both.choices) == 2
    assert two.usage.prompt_tokens == len(PROMPT) + 3
    assert both.usage.prompt_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_are_never_shown(server: Any, client: openai.OpenAI, model: Any, stream: bool) -> None:
    counts = [f'tessellm_requests_total{{reason="{reason}"}}' for reason in ("stop", "cancelled")]
    stopped, cancelled = map(server.metric, counts)
    text, _ = alone(model, PROMPT, 24)
    stop = text[5:8]
    expected = text[: text.find(stop)]
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stop": ["§§", stop]}
    if stream:
        pieces = list(client.completions.create(**options, logprobs=0, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == expected
        assert pieces[-1].choices[0].finish_reason == "stop"
        assert "".join(token for piece in pieces for token in piece.choices[0].logprobs.tokens) == expected
    else:
        answer = client.completions.create(**options)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(expected) + len(stop)
    server.wait_until_idle()
    assert [*map(server.metric, counts)] == [stopped + 1, cancelled]  # nobody hung up


@pytest.mark.parametrize("name", ["base", "math", "coding"])
def test_members_are_models(client: openai.OpenAI, model: Any, name: str) -> None:
    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    written = model.member(name).generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    answer = client.completions.create(model=f"tiny:{name}", prompt=PROMPT, max_tokens=16, temperature=0)
    assert answer.choices[0].text == model.tokenizer.decode(written, skip_special_tokens=True)


def test_rules_weights_and_traces_by_request(client: openai.OpenAI, model: Any) -> None:
    other = copy.copy(model)
    other.config = copy.deepcopy(model.config)
    other.set_rule("product", (0.5, 1.0))
    text, request = alone(other, PROMPT, 12)
    extension = {"rule": "product", "weights": {"math": 0.5}, "trace": True}
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"tessellm": extension}
    )
    assert answer.choices[0].text == text
    trace = answer.choices[0].tessellm["trace"]
    assert "".join(token["text"] for token in trace) == text
    import tessellm

    expected = tessellm.trace(other, torch.tensor(request.prompt + request.tokens))
    at = slice(len(request.prompt), len(request.prompt) + len(trace))
    assert [token["owner"] for token in trace] == [expected.members[o] for o in expected.owner[0, at].tolist()]
    found = torch.tensor([[token["log_z"], token["clash"], token["logprob"]["math"]] for token in trace])
    columns = [expected.log_z[0, at], expected.clash[0, at], expected.logprob[0, at, 1]]
    torch.testing.assert_close(found, torch.stack(columns, 1), atol=1e-3, rtol=1e-3)
    assert list(trace[0]["top"]) == ["base", "math", "coding", "composed"]
    assert trace[0]["top"]["composed"][0][0] == text[0]
    pieces = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stream=True, extra_body={"tessellm": extension}
    )
    assert [token for piece in pieces for token in piece.choices[0].tessellm["trace"]] == trace


WRONG: list[tuple[type[openai.APIStatusError], dict[str, Any], str]] = [
    (openai.NotFoundError, {"model": "tiney"}, "did you mean 'tiny'"),
    (openai.BadRequestError, {"max_tokens": 500}, "there is room for 128"),
    (openai.BadRequestError, {"prompt": "a" * 200, "max_tokens": 1}, "there is room for 128 with what follows"),
    (openai.BadRequestError, {"prompt": ""}, "the prompt is empty"),
    (openai.BadRequestError, {"prompt": [1, 2, 999]}, "expected token ids from 0 to"),
    (openai.BadRequestError, {"n": 99}, "expected 1 to 16 choices"),
    (openai.BadRequestError, {"temperature": -1}, "temperature"),
    (openai.BadRequestError, {"logprobs": 99}, "logprobs"),
    (openai.BadRequestError, {"presence_penalty": 2.5}, "presence_penalty"),
    (openai.BadRequestError, {"echo": 0}, "echo"),
    (openai.BadRequestError, {"echo": True, "logprobs": 1}, "leave out echo or logprobs"),
    (openai.BadRequestError, {"n": 5.0}, "n: Input should be a valid integer"),
    (openai.BadRequestError, {"extra_body": {"top_k": -1}}, "top_k"),
    (openai.BadRequestError, {"extra_body": {"temprature": 1}}, "temprature"),
    (openai.BadRequestError, {"extra_body": {"tessellm": {"weights": {"maths": 1}}}}, "did you mean 'math'"),
    (openai.BadRequestError, {"extra_body": {"tessellm": {"rule": "produkt"}}}, "did you mean 'product'"),
    (openai.BadRequestError, {"model": "tiny:math", "extra_body": {"tessellm": {"rule": "product"}}}, "speaks alone"),
]


@pytest.mark.parametrize(("kind", "change", "message"), WRONG, ids=[str(change)[:50] for _, change, _ in WRONG])
def test_errors_have_openais_shape(client: openai.OpenAI, kind: Any, change: Any, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "a", "max_tokens": 4, **change})
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert caught.value.body["type"] == "invalid_request_error"
