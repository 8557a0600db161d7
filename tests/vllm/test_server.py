"""vLLM's own server on a composition, started by `tessellm serve`, asked by the official client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from conftest import character_tokenizer
from engines import CONTEXT, Composition, composition, server, transformers_says

pytestmark = pytest.mark.xdist_group("server")  # one worker, so that it is started once

KEY = "secret"
OPTIONS = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-logprobs", "5", "--enforce-eager"]


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return composition(tmp_path_factory.mktemp("served"), "lora", "routed")


@pytest.fixture(scope="module")
def client(composed: Composition, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with server(composed.folder, tmp_path_factory.mktemp("log") / "server.txt", OPTIONS, KEY) as api:
        yield api


def expected(composed: Composition, text: str) -> Any:
    (said,) = transformers_says(composed.reference, [character_tokenizer()(text)["input_ids"]])
    return said


def decoded(tokens: list[int]) -> str:
    return character_tokenizer().decode(tokens, skip_special_tokens=True)


def test_completions_with_logprobs(client: openai.OpenAI, composed: Composition) -> None:
    assert [model.id for model in client.models.list()] == ["composed"]
    for message in ("abc", "what is 2+2?", "x" * 90):
        text = f"u: {message}\na: "
        answer = client.completions.create(model="composed", prompt=text, max_tokens=16, temperature=0, logprobs=3)
        said = expected(composed, text)
        assert answer.choices[0].text == decoded(said.tokens)
        found = torch.tensor(answer.choices[0].logprobs.token_logprobs)
        torch.testing.assert_close(found, torch.tensor(said.logprobs), atol=1e-4, rtol=0)


def test_chat_and_streaming(client: openai.OpenAI, composed: Composition) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(
        model="composed", messages=messages, max_tokens=16, temperature=0, logprobs=True, top_logprobs=2
    )
    prompt = composed.reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    said = expected(composed, prompt)
    assert whole.choices[0].message.content == decoded(said.tokens)
    found = torch.tensor([entry.logprob for entry in whole.choices[0].logprobs.content])
    torch.testing.assert_close(found, torch.tensor(said.logprobs), atol=1e-4, rtol=0)
    pieces = client.chat.completions.create(
        model="composed", messages=messages, max_tokens=16, temperature=0, stream=True
    )
    texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(texts) == decoded(said.tokens)
    assert len([text for text in texts if text]) > 1


def test_a_wrong_request_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="composed", prompt="a" * 300, max_tokens=16)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a", max_tokens=1)


def test_only_who_has_the_key_is_let_in(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="none").models.list()


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [("--gpu-memory-utilization", "7", "gpu_memory_utilization: Input should be less than or equal to 1"),
     ("--max-model-len", "999999", "greater than the derived max_model_len")],
)  # fmt: skip
def test_options_of_vllm_that_it_refuses_are_said_in_one_message(
    composed: Composition, option: str, value: str, reason: str
) -> None:
    command = [sys.executable, "-m", "tessellm.cli", "serve", "--engine", "vllm", str(composed.folder), "--port", "0"]
    ran = subprocess.run(
        [*command, "--", *OPTIONS, option, value], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 2, ran.stderr[-2000:]
    assert "Traceback" not in ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert "vLLM cannot start" in said
    assert reason in said
