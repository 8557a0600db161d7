"""Requests with rules of their own on the same slots: each gets what a composition with that rule would write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.decoding.voices import Voice
from tessellm.errors import GenerationError
from tessellm.rules import Explanation, Product, make_rule

from conftest import build_model, perturbed
from decoding_cases import prompts, reference_rows, unexcused

WINDOW = 128


@pytest.fixture(scope="module")
def model() -> Any:
    base = build_model("llama", eos_token_id=None)
    return tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")


def under(model: Any, rule: Any, weights: Any = None) -> Any:
    """The same members under another rule."""
    other = copy.copy(model)
    other.config = copy.deepcopy(model.config)
    other.set_rule(rule, weights, "rule")
    return other


RULES = [("evidence", (1.0, 1.0)), ("evidence", (0.5, 2.0)), ("belief", (1.0, 1.0)), ("product", (0.3, -0.2))]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_voice_writes_what_it_would_alone(model: Any, temperature: float) -> None:
    engine = Engine(model, slots=4, window=WINDOW)
    voices = [None, *(Voice(make_rule(name, weights), frozenset()) for name, weights in RULES)]
    texts = prompts(10, longest=90, seed=5)
    samplings = [Sampling(max_new_tokens=6 + n, temperature=temperature, seed=n) for n in range(10)]
    asked = [engine.submit(text, s, voices[n % 5]) for n, (text, s) in enumerate(zip(texts, samplings, strict=True))]
    while engine.busy:
        engine.step()
    for number, (name, weights) in enumerate([("product", (1.0, 1.0)), *RULES]):
        alone = under(model, name, weights)
        own = asked[number::5]
        if temperature:
            expected = Engine(alone, slots=1).generate([r.prompt for r in own], [r.sampling for r in own])
            assert [r.tokens for r in own] == [r.tokens for r in expected]
        else:
            assert not unexcused(alone, own)
        for request in own:
            torch.testing.assert_close(
                torch.tensor(request.logprobs),
                reference_rows(alone, request).gather(-1, torch.tensor(request.tokens)[:, None])[:, 0],
                atol=1e-4,
                rtol=0,
            )


def test_a_member_alone_is_a_voice(model: Any) -> None:
    engine = Engine(model, slots=3, window=WINDOW)
    (text,) = prompts(1, seed=2)
    laws = [("base", (0.0, 0.0)), ("a", (1.0, 0.0)), ("b", (0.0, 1.0))]
    asked = {
        name: engine.submit(text, Sampling(max_new_tokens=12), Voice(make_rule("product", weights), frozenset()))
        for name, weights in laws
    }
    while engine.busy:
        engine.step()
    for name, request in asked.items():
        written = model.member(name).generate(torch.tensor([text]), max_new_tokens=12, do_sample=False)
        assert request.tokens == written[0, len(text) :].tolist()


def test_a_voice_ends_at_its_own_ends(model: Any) -> None:
    engine = Engine(model, slots=2, window=WINDOW)
    (text,) = prompts(1, seed=8)
    (free,) = engine.generate([text], Sampling(max_new_tokens=10))
    end = free.tokens[3]
    request = engine.submit(text, Sampling(max_new_tokens=10), Voice(model.rule, frozenset([end])))
    while engine.busy:
        engine.step()
    assert request.finish_reason == "stop"
    assert request.tokens == free.tokens[: free.tokens.index(end) + 1]


def test_observers_see_the_rows_that_tokens_were_chosen_from(model: Any) -> None:
    def observer(logp_MB1V: Tensor, token_B1: Tensor, composed_B1V: Tensor, why: Explanation) -> dict[str, Tensor]:
        said_MB = logp_MB1V.gather(-1, token_B1[None, ..., None].expand(len(logp_MB1V), -1, 1, 1))[:, :, 0, 0]
        return {"token": token_B1[:, 0], "best": composed_B1V[:, 0].amax(-1), "members": said_MB.T}

    engine = Engine(model, slots=3, window=WINDOW)
    texts = prompts(5, seed=11)
    asked = [engine.submit(text, Sampling(8), None, observer if n % 2 else None) for n, text in enumerate(texts)]
    while engine.busy:
        engine.step()
    assert [bool(r.seen) for r in asked] == [False, True, False, True, False]
    for request in asked[1::2]:
        text = torch.tensor([request.prompt + request.tokens])
        members = model(text, use_cache=False, output_member_logprobs=True).member_logprobs[:, 0]
        rows_MTV = members[:, len(request.prompt) - 1 : -1]
        at_MT1 = torch.tensor(request.tokens)[None, :, None].expand(3, -1, 1)
        assert [view["token"] for view in request.seen] == request.tokens
        torch.testing.assert_close(
            torch.tensor([view["members"] for view in request.seen]),
            rows_MTV.gather(-1, at_MT1)[..., 0].T,
            atol=1e-4,
            rtol=0,
        )
        torch.testing.assert_close(
            torch.tensor([view["best"] for view in request.seen]), torch.tensor(request.logprobs), atol=1e-5, rtol=0
        )


def test_observers_are_told_why(model: Any) -> None:
    def observer(logp_MB1V: Tensor, token_B1: Tensor, composed_B1V: Tensor, why: Explanation) -> dict[str, Tensor]:
        return {"owner": why.owner_BT[:, 0]} | {
            name: why.more[name][:, 0] for name in ("evidence_BTM",) if name in why.more
        }

    engine = Engine(model, slots=5, window=WINDOW)
    voices = [None, *(Voice(make_rule("evidence", (weight, 1.0)), frozenset()) for weight in (1.0, 0.5))]
    places = (2, 0, 1, 2, 1)
    asked = [
        engine.submit(text, Sampling(8), voices[place], observer)
        for place, text in zip(places, prompts(5, seed=12), strict=True)
    ]
    while engine.busy:
        engine.step()
    for place, request in zip(places, asked, strict=True):
        if place == 0:
            assert all("evidence_BTM" not in view and "owner" in view for view in request.seen)
            continue
        tokens_1T = torch.tensor([request.prompt + request.tokens])
        logp_MBTV = model(tokens_1T, use_cache=False, output_member_logprobs=True).member_logprobs
        rule = voices[place].rule  # type: ignore[union-attr]
        why = rule.explain(logp_MBTV, tokens_1T, torch.ones_like(tokens_1T), None)[2]
        found = torch.tensor([view["evidence_BTM"] for view in request.seen])
        at = slice(len(request.prompt) - 1, -1)
        torch.testing.assert_close(found, why.more["evidence_BTM"][0, at], atol=1e-3, rtol=0)
        assert found.abs().max() > 0.1


def test_nobody_is_told_why_who_does_not_look(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To say why costs as much as the rule itself, or more."""
    told: list[Any] = []
    explain = Product.explain
    monkeypatch.setattr(Product, "explain", lambda *given: (told.append(given), explain(*given))[1])
    engine = Engine(model, slots=2)
    plain = engine.generate(prompts(3, 20), Sampling(5, ignore_end=True))
    assert not told
    seen = engine.submit(plain[0].prompt, Sampling(5, ignore_end=True), observer=lambda *given: None)
    while engine.busy:
        engine.step()
    assert len(told) == 5
    assert seen.tokens == plain[0].tokens


def test_what_is_refused(model: Any) -> None:
    far = Voice(make_rule("evidence"), frozenset())
    with pytest.raises(GenerationError, match="looks back 64 tokens, this engine 0"):
        Engine(model, slots=1).submit([5], Sampling(4), far)
    with pytest.raises(GenerationError, match="no other voices"):
        Engine(model, slots=1, speculation=Speculation("lookup"), window=WINDOW).submit([5], Sampling(4), far)
