"""`tessellm serve --engine vllm` on a base and adapters: routed requests beside named ones, by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from conftest import character_tokenizer
from engines import CONTEXT, Composition, chats, composition, server

pytestmark = pytest.mark.xdist_group("routed server")  # one worker, so that it is started once

OPTIONS = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager"]


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return composition(tmp_path_factory.mktemp("served"), "adapters", "default")


@pytest.fixture(scope="module")
def client(composed: Composition, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with server(composed.folder, tmp_path_factory.mktemp("log") / "server.txt", OPTIONS) as api:
        yield api


@pytest.fixture(scope="module")
def selected(composed: Composition) -> dict[str, str]:
    """A message for each member, which the reference's router leaves to it."""
    tokenizer = character_tokenizer()
    found = {}
    for message in (tokenizer.decode(row) for row in chats(300, 40)):
        text = message.removeprefix("u: ").removesuffix("\na: ")
        chat: Any = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        (route,) = composed.reference.route([ids])
        found.setdefault(route.selected, text)
    assert set(found) == {"base", "math", "coding"}
    return found


def ask(client: openai.OpenAI, model: str, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, **more)


def route_of(choice: Any) -> Any:
    return (choice.to_dict().get("tessellm") or {}).get("route")


def test_models(client: openai.OpenAI) -> None:
    listed = {model.id: model.to_dict().get("parent") for model in client.models.list()}
    assert listed == {"composed": None, "base": None, "math": "base", "coding": "base"}
    assert next(iter(listed)) == "composed"


def test_routed_is_what_the_chosen_member_writes(client: openai.OpenAI, selected: dict[str, str]) -> None:
    texts = set()
    for name, text in selected.items():
        routed, named = ask(client, "composed", text), ask(client, name, text)
        assert routed.choices[0].message.content == named.choices[0].message.content
        assert routed.model == "composed"
        about = route_of(routed.choices[0])
        assert about["selected"] == name
        assert next(iter(about["prior"])) == name
        assert sum(about["prior"].values()) == pytest.approx(1, abs=1e-3)
        assert route_of(named.choices[0]) is None
        by_experts = ask(client, "composed", text, extra_body={"tessellm": {"experts": name}})
        assert by_experts.choices[0].message.content == named.choices[0].message.content
        assert route_of(by_experts.choices[0]) is None
        texts.add(named.choices[0].message.content)
    assert len(texts) > 1


def test_streams_and_lists_of_prompts(client: openai.OpenAI, selected: dict[str, str]) -> None:
    for name, text in selected.items():
        pieces = list(ask(client, "composed", text, stream=True))
        whole = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert whole == ask(client, name, text).choices[0].message.content
        (told,) = [route for piece in pieces for choice in piece.choices if (route := route_of(choice))]
        assert told["selected"] == name
    written = [f"u: {text}\na: " for text in selected.values()]
    answer = client.completions.create(model="composed", prompt=written, max_tokens=8, n=2)
    found = [(choice.index, route_of(choice)["selected"]) for choice in answer.choices]
    assert found == list(enumerate(name for name in selected for _ in range(2)))


@pytest.mark.parametrize(
    ("model", "own", "error", "message"),
    [("other", None, openai.NotFoundError, "The model `other` does not exist"),
     ("composed", {"experts": "other"}, openai.NotFoundError, "there is no expert 'other'"),
     ("composed", {"experts": {"math": 1, "coding": 1}}, openai.BadRequestError, "vLLM runs one adapter for each"),
     ("composed", {"experts": {"math": 0.5}}, openai.BadRequestError, "expected the name of one member"),
     ("composed", {"experts": 3}, openai.BadRequestError, "expected the name of one member"),
     ("composed", {"weights": {"math": 1}}, openai.BadRequestError, "vLLM's server takes nothing else there"),
     ("math", {"experts": "coding"}, openai.BadRequestError, "tessellm.experts is for the composition 'composed'")],
)  # fmt: skip
def test_what_is_refused(client: openai.OpenAI, model: str, own: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ask(client, model, "hello", extra_body={"tessellm": own})


def test_a_prompt_over_the_limit(client: openai.OpenAI) -> None:
    for model in ("composed", "base"):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            ask(client, model, "a" * 300)
