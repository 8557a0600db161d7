"""From a request to its answer without HTTP: what is served by which path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tessellm
from draft_distribution import draft_always
from tessellm.engine.speculation import Speculation
from tessellm.serve import server
from tessellm.serve.refusals import Refusal
from tessellm.serve.schema import CompletionRequest
from tessellm.serve.service import Service
from tessellm.serve.settings import Settings

import decoding_cases
from conftest import build_model, character_tokenizer, perturbed
from planted import composition as planted

PROMPT = "what is 2+2?"


bloom = pytest.fixture(scope="module")(decoding_cases.bloom)


def in_rounds(service: Service, *rounds: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """To all of a round at once; what a request is refused with stands in its place."""

    async def one(request: CompletionRequest) -> Any:
        return await service.whole(await service.complete(request))

    async def main() -> list[list[Any]]:
        service.scheduler.start(asyncio.get_running_loop())
        try:
            return [
                await asyncio.gather(*(one(CompletionRequest(**each)) for each in asked), return_exceptions=True)
                for asked in rounds
            ]
        finally:
            service.scheduler.stop()

    return asyncio.run(main())


def answers(service: Service, *asked: dict[str, Any]) -> list[Any]:
    """To all of them at once; none is refused."""
    (found,) = in_rounds(service, asked)
    assert not any(isinstance(each, Exception) for each in found), found
    return found


def test_what_the_fast_path_refuses_is_served_plainly(bloom: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tessellm.serve"):
        service = Service(bloom, "bloom", Settings(slots=2))
    assert "BloomForCausalLM" in caplog.text
    assert "serving members as they are" in caplog.text
    options = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    trace = {"tessellm": {"trace": True}}
    composed, traced, alone = answers(
        service,
        {"model": "bloom", **options},
        {"model": "bloom", **options, **trace},
        {"model": "bloom:math", **options},
    )
    ids = torch.tensor([bloom.tokenizer(PROMPT)["input_ids"]])
    for answer, model in ((composed, bloom), (alone, bloom.member("math"))):
        written = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert answer.choices[0].text == bloom.tokenizer.decode(written, skip_special_tokens=True)
    assert traced.choices[0].text == composed.choices[0].text
    assert "".join(token.text for token in traced.choices[0].tessellm.trace) == composed.choices[0].text


def test_members_as_they_are_write_what_the_fast_path_writes(composed: tuple[Any, Any]) -> None:
    options = {"model": "tiny", "prompt": [PROMPT, "abc"], "n": 2, "max_tokens": 12, "temperature": 0.7, "seed": 5}
    texts = [
        [choice.text for choice in answers(Service(composed[0], "tiny", settings), options)[0].choices]
        for settings in (Settings(slots=3), Settings(slots=3, plain=True))
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4


@pytest.mark.parametrize("plain", [False, True])
def test_a_request_that_meets_a_broken_member_fails_alone(plain: bool) -> None:
    base = build_model("llama", tie_word_embeddings=False)
    model = tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")
    model.tokenizer = character_tokenizer()
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    clean = [{**options, "prompt": f"abc {n}"} for n in range(12)]
    expected = [answer.choices[0].text for answer in answers(Service(model, "tiny", Settings(slots=2)), *clean)]
    letter = next(each for each in "ABCDEFG" if each not in "".join(expected))
    with torch.no_grad():
        model.member("b").get_input_embeddings().weight[model.tokenizer.convert_tokens_to_ids(letter)] = torch.nan
    bad = {**options, "prompt": "abc " * 9 + letter + " abc"}
    service = Service(model, "tiny", Settings(slots=2, plain=plain))
    for first, *others in in_rounds(service, [bad, *clean], [bad], [bad, *clean]):
        assert isinstance(first, Refusal)
        assert "member 'b' computes NaN" in str(first)
        assert [answer.choices[0].text for answer in others] == expected[: len(others)]


def test_the_command_line_can_ask_for_members_as_they_are(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr(server, "serve", lambda load, name, settings, tell: asked.append(settings))
    for engine in ("tessellm", "plain"):
        assert cli("serve", "out", "--engine", engine).code == 0
    assert [settings.plain for settings in asked] == [False, True]


def test_settings_of_the_model_that_are_not_honoured_are_told(caplog: pytest.LogCaptureFixture) -> None:
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    model.tokenizer = character_tokenizer()
    model.generation_config.repetition_penalty = 1.5
    with caplog.at_level(logging.WARNING, "tessellm.serve"):
        Service(model, "tiny", Settings(slots=1))
    assert "sets repetition_penalty, which this server does not know" in caplog.text


def test_drafts_as_the_command_line_says(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr(server, "serve", lambda load, name, settings, tell: asked.append(settings))
    assert cli("serve", "out", "--speculate", "none").code == 0
    assert asked[0].speculation == Speculation("none")
    refused = cli("serve", "out", "--speculate", "belief")
    assert (refused.code, len(asked)) == (2, 1)
    assert "expected lookup or none for speculate; got 'belief'" in refused.err


def test_drafts_are_counted_and_traced() -> None:
    composition = planted("three", "six", rule="product")
    composition.tokenizer = character_tokenizer()
    service = Service(composition, "tiny", Settings(slots=2, speculate="lookup"))
    speculator = service.engine.speculator
    assert speculator is not None
    draft_always(service.engine, 4)
    options = {"model": "tiny", "prompt": "abc3defghabc3defghab", "max_tokens": 12, "temperature": 0}
    (answer,) = answers(service, {**options, "tessellm": {"trace": True}})
    assert len(answer.choices[0].tessellm.trace) == answer.usage.completion_tokens
    page = service.metrics.text(2, 0, 0, 0, (speculator.drafted, speculator.accepted))
    assert f"tessellm_drafted_tokens_total {speculator.drafted}\n" in page
    assert f"tessellm_accepted_tokens_total {speculator.accepted}\n" in page
    assert speculator.drafted >= speculator.accepted > 0
