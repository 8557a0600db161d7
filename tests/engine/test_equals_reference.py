"""The engine writes what the reference would, whatever is active and whatever else is in the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from draft_distribution import draft_always
from routing_cases import route_of, routed, wrong_places
from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling
from tessellm.engine.speculation import Speculation
from tessellm.routing.route import Route

from conftest import build_model, character_tokenizer, perturbed
from decoding_cases import KINDS, composition, disagreements, prompts, reference_rows, stacked_engine

LOOKUP = Speculation("lookup")
CASES = [
    *((kind, path) for kind in KINDS for path in ("apart", "lookup")),
    *((kind, "stacked") for kind in ("llama", "gemma2", "gpt2", "qwen2")),  # as on a GPU
]
EXPERTS = [None, {}, {"e0": 1.0}, {"e0": 1.0, "e1": 1.0}, {"e0": 0.6, "e1": -0.3}]


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_product(kind: str, path: str, tmp_path: Path) -> None:
    model = composition(kind, tmp_path, rule="product")
    engine = stacked_engine(model, path == "stacked", slots=4, speculation=LOOKUP if path == "lookup" else None)
    if path == "lookup":
        draft_always(engine, 3)
    requests = engine.generate(prompts(9, 60), Sampling(max_new_tokens=20))
    for request in requests:
        assert not disagreements(model, request)
        chosen = reference_rows(model, request).gather(-1, torch.tensor(request.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.logprobs), chosen, atol=1e-4, rtol=0)
    if engine.speculator is not None:
        assert engine.speculator.drafted > engine.speculator.accepted


@pytest.mark.parametrize("lookup", [False, True], ids=["plain", "lookup"])
@pytest.mark.parametrize("slots", [1, 4, 32])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixed", "adapters", "both"])
def test_routed_mixture(kind: str, slots: int, lookup: bool, tmp_path: Path) -> None:
    """Prompts routed to the base, to one expert and to several; some name their experts; one is cancelled."""
    model = routed(composition(kind, tmp_path, rule="mixture"))
    first = list(model.members)[1]
    engine = Engine(model, slots=slots, speculation=LOOKUP if lookup else None)
    if lookup:
        draft_always(engine, 3)
    requests = []
    for n, prompt in enumerate(prompts(16 if slots > 1 else 8, 60, seed=slots)):
        experts = (None, None, None, {}, {first: 1.0})[n % 5]
        requests.append(engine.submit(prompt, Sampling(3 + n, ignore_end=True), experts))
    while engine.busy:
        engine.step()
        if requests[-1].tokens:
            engine.cancel(requests[-1])
    active = set()
    for request in requests:
        route = None if request.experts is not None else route_of(model, request.prompt)
        assert not wrong_places(model, request, route), request.route
        assert request.components is not None
        assert request.components.members == tuple(request.branches)
        active.add(len(request.components.members))
    assert min(active) == 1 < max(active)
    assert requests[-1].finish_reason == "cancelled"


@pytest.mark.parametrize("experts", EXPERTS, ids=str)
@pytest.mark.parametrize("rule", ["product", "mixture"])
def test_named_experts(rule: str, experts: Any, tmp_path: Path) -> None:
    """Without a router; one member alone is that member, to the last bit of its log-probabilities' float."""
    model = composition("adapters", tmp_path, rule=rule, weights={"e0": 1.0, "e1": 1.0})
    engine = Engine(model, slots=3)
    requests = [engine.submit(prompt, Sampling(12), experts) for prompt in prompts(5, 40, seed=3)]
    run(engine)
    reference = composition("adapters", tmp_path / "again", rule="mixture")
    for request in requests:
        if experts is None and rule == "product":
            assert not disagreements(model, request)
        else:
            assert not wrong_places(reference, request, None)
    alone = {0: "base", 1: "e0"}.get(sum(experts.values()) if experts is not None else 9)
    if alone and len(experts) < 2:
        assert {tuple(r.branches) for r in requests} == {(list(model.members).index(alone),)}


def test_a_prompt_of_a_silenced_expert(tmp_path: Path) -> None:
    """The base and the other experts share what the router gave it; the base has all where that was everything."""
    model = routed(composition("adapters", tmp_path, rule="mixture"))
    model.set_rule(weights=[0.0] + [1.0] * (len(model.members) - 2))
    decide, silenced = model.router.decide, Route(dict.fromkeys(model.members, 0.0) | {"e0": 1.0}, "e0")
    model.router.decide = lambda energy_TK: silenced if len(energy_TK) % 2 else decide(energy_TK)
    engine = Engine(model, slots=3)
    requests = [engine.submit(prompt, Sampling(10, ignore_end=True)) for prompt in prompts(12, 40, seed=4)]
    run(engine)
    for request in requests:
        ids = torch.tensor([request.prompt])
        written: Any = model.generate(ids, max_new_tokens=10, min_new_tokens=10, do_sample=False, eos_token_id=None)
        assert request.tokens == written[0, len(request.prompt) :].tolist()
        if len(request.prompt) % 2:
            assert request.components is not None
            assert request.components.members == (0,)
    assert {len(request.prompt) % 2 for request in requests} == {0, 1}


@pytest.mark.parametrize("kind", ["adapters", "mixed"])
def test_sampled_texts_do_not_depend_on_the_batch(kind: str, tmp_path: Path) -> None:
    model = routed(composition(kind, tmp_path, rule="mixture"))
    given = prompts(12, 50, seed=6)
    asked = [Sampling(10, 0.9, (1.0, 0.8)[n % 2], seed=n, top_k=9 * (n % 3 == 1)) for n in range(12)]
    alone = [Engine(model, slots=1).generate([p], s)[0].tokens for p, s in zip(given, asked, strict=True)]
    for settings in ({"slots": 5}, {"slots": 12}, {"slots": 5, "speculation": LOOKUP}):
        engine = Engine(model, **settings)
        assert [r.tokens for r in engine.generate(given, asked)] == alone


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_requests_that_share_beginnings(seed: int, tmp_path: Path) -> None:
    """Prompts that begin alike, are routed apart, come and go: each text is the reference's, prefixes are reused."""
    base = build_model("llama", max_position_embeddings=256)
    experts = {f"e{i}": perturbed(base, i) for i in range(3)}
    model = routed(tessellm.compose(base, experts, rule="mixture"))
    draw, engine = random.Random(seed), Engine(model, slots=5, context=200, speculation=LOOKUP if seed == 2 else None)
    stems = [[draw.randrange(4, 60) for _ in range(70)] for _ in range(4)]
    requests: list[Request] = []
    while len(requests) < 120 or engine.busy:
        if len(requests) < 120 and draw.random() < 0.5:
            stem = draw.choice(stems)[: draw.choice([20, 40, 70])]
            tail = [draw.randrange(4, 60) for _ in range(draw.randrange(1, 30))]
            if requests and draw.random() < 0.3:  # another turn of a chat
                earlier = draw.choice(requests)
                stem = (earlier.prompt + earlier.tokens)[:150]
            named = draw.choice([None, None, None, {}, {"e1": 1.0}, {"e0": 1.0, "e2": 0.5}])
            requests.append(engine.submit(stem + tail, Sampling(draw.randrange(1, 12), ignore_end=True), named))
        if requests and draw.random() < 0.05:
            engine.cancel(draw.choice(requests))
        engine.step()
    assert engine.prefixes.reused_tokens > 1000
    assert sum(request.finish_reason == "length" for request in requests) > 80
    for request in requests:
        if request.tokens:
            route = None if request.experts is not None else route_of(model, request.prompt)
            assert not wrong_places(model, request, route)


def test_a_prompt_that_a_row_holds_is_routed_without_reading_it(tmp_path: Path) -> None:
    model = routed(composition("adapters", tmp_path, rule="mixture"))
    engine, (prompt,) = Engine(model, slots=2), prompts(1, 2)
    prompt = prompt * 60
    first, second = (engine.generate([prompt], Sampling(4))[0] for _ in range(2))
    assert first.tokens == second.tokens
    assert first.route == second.route
    assert engine.prefixes.reused_tokens >= len(prompt) - 1
    assert model.router.routed == [prompt, prompt]


def chats(model: Any, *messages: str) -> list[list[int]]:
    turns = [[{"role": "user", "content": message}] for message in messages]
    return model.tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]


def text_ids(model: Any, text: str) -> list[int]:
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def written(model: Any, request: Request) -> list[int]:
    """Return what the reference writes in its place."""
    ids, new = torch.tensor([request.prompt]), request.sampling.max_new_tokens
    text = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None)
    return text[0, len(request.prompt) :].tolist()


def test_an_answer_that_the_client_began_is_routed_by_what_comes_before(tmp_path: Path) -> None:
    model = routed(composition("llama", tmp_path, rule="mixture"))
    model.tokenizer = character_tokenizer()
    asked = chats(model, "sum of 3 and 4", "a", "what is it?")
    begun = [prompt + text_ids(model, supplied) for prompt in asked for supplied in ("", "it is ", "zzzz" * 9)]
    requests = Engine(model, slots=4).generate(begun, Sampling(8, ignore_end=True))
    for n, request in enumerate(requests):
        assert request.route == requests[n - n % 3].route
        assert request.tokens == written(model, request)
    assert len({request.route.selected for request in requests if request.route}) > 1


def test_a_conversation_is_routed_anew_at_every_turn(tmp_path: Path) -> None:
    """Members that join read the text; those that stay, and the base, read on."""
    model = routed(composition("adapters", tmp_path, rule="mixture"))
    model.tokenizer = character_tokenizer()
    engine, active = Engine(model, slots=3), []
    texts = chats(model, "one", "what is it?", "sum of 3 and 4")
    for turn in ("second", "and the third", "x = 1"):
        requests = engine.generate(texts, Sampling(7, ignore_end=True))
        active.append([tuple(request.branches) for request in requests])
        for request in requests:
            assert request.tokens == written(model, request)
        more = text_ids(model, f"\nu: {turn}\na: ")
        texts = [request.prompt + request.tokens + more for request in requests]
    assert any(len(set(turns)) > 1 for turns in zip(*active, strict=True))
    assert engine.prefixes.reused_tokens > 100
