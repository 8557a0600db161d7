"""What a composition's router says of prompts: texts, messages, token ids, alone and many at once."""

from __future__ import annotations

import pytest
import torch
from test_routed_generation import prompts, routed

from tessellm.errors import PromptError, RecipeError
from tessellm.routing.route import RoutedPrompt


@pytest.fixture(scope="module")
def model():
    return routed()


@torch.no_grad()
def by_hand(model, ids: list[int]):
    with model.router.tap(model.base) as tap:
        model.base(torch.tensor([ids]))
    return model.router.route([RoutedPrompt(ids, model.markers.read(ids).user, tap.take()[0])])[0]


def test_a_text_is_a_user_message_and_only_the_base_runs(model):
    ran = []
    hooks = [
        model.member(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name)) for name in ("one", "two")
    ]
    found = model.route("what is it?")
    for hook in hooks:
        hook.remove()
    assert not ran
    ids = prompts(model, "what is it?")[0]
    expected = by_hand(model, ids)
    assert found.selected == expected.selected
    assert found.prior == pytest.approx(expected.prior, abs=1e-5)
    assert sum(found.prior.values()) == pytest.approx(1)
    message = [{"role": "user", "content": "what is it?"}]
    for same in (message, ids, torch.tensor(ids)):
        assert model.route(same).prior == pytest.approx(found.prior, abs=1e-5)


def test_many_at_once_are_routed_as_each_alone(model):
    texts = ["a", "what is the sum of 3 and 4?", "b" * 40, "sort: 1 2"]
    for many in (texts, tuple(texts), [prompts(model, text)[0] for text in texts]):
        for text, found in zip(texts, model.route(many), strict=True):
            assert found.prior == pytest.approx(model.route(text).prior, abs=1e-5)
    assert model.route([]) == []


def test_experts_that_cannot_be_selected_have_no_part(model):
    model = routed(weights=[1.0, -0.5, 1.0])
    found = model.route("abc")
    assert set(found.prior) == {"base", "one", "three"}
    assert sum(found.prior.values()) == pytest.approx(1)
    assert set(found.scores) == {"one", "three"}


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (7, "expected a text, messages"),
        ([[]], "prompt 1: expected a text, messages"),
        ([{"content": "a"}], "keys role and content"),
        ([4, 5, 99], "the prompt: there is no token 99; the vocabulary has 64"),
        ([5] * 200, "has 200 tokens, but there is room for 128"),
    ],
)
def test_what_is_no_prompt_is_refused(model, prompt, told):
    with pytest.raises(PromptError, match=told):
        model.route(prompt)


def test_without_a_router_it_says_so(model):
    with pytest.raises(RecipeError, match="this composition has no router"):
        routed(router=False).route("a")
    with pytest.raises(RecipeError, match="the rule 'product' routes nothing"):
        routed(rule="product").route("a")
    model = routed(router=False)
    model.tokenizer = None
    with pytest.raises(PromptError, match="Give token ids"):
        model.route("a")
