"""A member that computes NaN fails the requests that meet it, by name, and no other request, on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling

from conftest import VOCAB, build_model, perturbed, save_lora, save_member
from decoding_cases import prompts, stacked_engine, stacking, unexcused
from speculation_cases import agreeing, drafting

DAMAGED = 7  # the token whose embedding is NaN in one member
NEW = Sampling(max_new_tokens=6, ignore_end=True)


def plant(model: Any, name: str, token: int = DAMAGED) -> Any:
    """Put NaN into one row of a member's embeddings, and nowhere else: output layers are not tied."""
    with torch.no_grad():
        model.member(name).get_input_embeddings().weight[token] = torch.nan
    return model


def damaged(kind: str, rule: str, folder: Path) -> Any:
    """Three members, one of which computes NaN where it reads one token."""
    base = build_model("llama" if kind == "adapters" else kind, max_position_embeddings=1024, tie_word_embeddings=False)
    if kind == "adapters":
        home = save_member(base, folder / "base")
        paths = {name: str(save_lora(home, folder / name, seed)) for seed, name in enumerate(("a", "b"))}
        model = tessellm.compose(str(home), paths, rule=rule)
        return plant(model, "base")
    return plant(tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule=rule), "b")


def clean_prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    return [[token if token != DAMAGED else 8 for token in row] for row in prompts(count, longest, seed)]


def spoilt(row: list[int], place: int = -1) -> list[int]:
    row = list(row)
    row.insert(place % (len(row) + 1), DAMAGED)
    return row


def check_clean(model: Any, requests: list[Any]) -> None:
    """Those that met the token themselves were told so; all others are right."""
    fine = []
    for request in requests:
        if DAMAGED in request.tokens[:-1]:
            assert "computes NaN" in (request.error or "")
        else:
            assert request.error is None
            fine.append(request)
    assert len(fine) >= len(requests) / 2
    assert not unexcused(model, [request for request in fine if DAMAGED not in request.tokens])


@pytest.mark.parametrize(("stacked", "rule"), [(False, "product"), (True, "product")], ids=["apart", "stacked"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "adapters"])
def test_nothing_of_a_broken_sequence_is_read_again(kind: str, stacked: bool, rule: str, tmp_path: Path) -> None:
    """Requests of all lengths after it in the same slots, beside it in the same pass, and as it fails halfway."""
    if kind == "gpt2":
        base = build_model("gpt2", tie_word_embeddings=False)
        model = plant(tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule=rule), "b")
    else:
        model = damaged(kind, rule, tmp_path)
    engine = stacked_engine(model, stacked, slots=2, context=100)
    for place in (0, 20, -1):
        [failed] = engine.generate([spoilt(clean_prompts(1, 2)[0] * 40, place)], NEW)
        name = "base" if kind == "adapters" else "b"
        assert failed.finish_reason == "error"
        assert failed.error == f"member {name!r} computes NaN: its weights are damaged, or overflow in torch.float32"
        check_clean(model, engine.generate(clean_prompts(12, 40, seed=place + 5), NEW))
    together = clean_prompts(8, 60, seed=9)
    mixed = [row if n % 3 else spoilt(row, n) for n, row in enumerate(together)]
    requests = engine.generate(mixed, NEW)
    assert all(request.error for request in requests[::3])
    check_clean(model, [request for n, request in enumerate(requests) if n % 3])


@pytest.mark.parametrize("at", [30, 290])
def test_a_beginning_shared_with_a_broken_prompt_is_fed_anew(at: int, tmp_path: Path) -> None:
    """Tokens before the broken one in its pass are spoilt with it; whole chunks before that pass are not."""
    model = damaged("llama", "product", tmp_path)
    shared = [8 + n * n % (VOCAB - 8) for n in range(at)]
    engine = Engine(model, slots=3)
    texts = [[*shared, DAMAGED, *[9] * 400], [*shared, *[10] * 40], [*shared, *[11] * 90]]
    failed, *fine = engine.generate(texts, NEW)
    assert "member 'b' computes NaN" in (failed.error or "")
    assert engine.prefixes.reused_tokens >= (256 if at > 256 else 0)
    check_clean(model, fine)
    check_clean(model, engine.generate([[*shared, *[12] * 30]], NEW))


def test_a_request_that_does_not_run_the_broken_member_goes_on(tmp_path: Path) -> None:
    """A member by itself writes its text although another is broken there, and leaves nothing behind."""
    model = damaged("llama", "product", tmp_path)
    engine = Engine(model, slots=2)
    text = spoilt(clean_prompts(1, 60)[0] * 3, 30)
    request = engine.submit(text, NEW, {"a": 1.0})
    while engine.busy:
        engine.step()
    written = model.member("a").generate(torch.tensor([text]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert request.tokens == written[0, len(text) :].tolist()
    check_clean(model, engine.generate([*clean_prompts(8, 40), text[:30] + [9] * 30], NEW))
    cancelled = engine.submit(text, NEW, {"a": 1.0})
    while not cancelled.tokens:
        engine.step()
    engine.cancel(cancelled)
    check_clean(model, engine.generate([*clean_prompts(8, 40), text[:30] + [9] * 30], NEW))


def test_a_draft_that_a_member_cannot_read_changes_no_text() -> None:
    """The damaged token is often drafted, since texts repeat it, and written by few."""
    model = agreeing(0.03)
    given = [row * 3 for row in clean_prompts(12, 16)]
    asked = Sampling(max_new_tokens=24, ignore_end=True)
    expected = Engine(model, slots=4).generate(given, asked)
    drafted = [token for request in expected for token in request.tokens]
    token = max(set(drafted), key=drafted.count)
    plain = Engine(plant(model, "e0", token), slots=4).generate(given, asked)
    found = drafting(model, 4).generate(given, asked)
    for one, other in zip(found, plain, strict=True):
        assert one.tokens == other.tokens or torch.isnan(torch.tensor(one.logprobs[-1]))
        assert one.error == other.error
    assert any(request.error for request in found)
    assert any(request.error is None for request in found)


def test_as_the_reference_runs_them(tmp_path: Path) -> None:
    model = damaged("llama", "product", tmp_path)
    engine = Engine(model, slots=2, plain=True)
    [failed] = engine.generate([spoilt(clean_prompts(1, 2)[0] * 40, 20)], NEW)
    assert "member 'b' computes NaN" in str(failed.error)
    check_clean(model, engine.generate(clean_prompts(6, 40), NEW))


@pytest.mark.parametrize("kind", ["llama", "adapters"])
@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_overflow_in_half_precision_is_told_and_forgotten(stacked: bool, kind: str, tmp_path: Path) -> None:
    """A row of embeddings so large that float16 overflows inside the member."""
    base: Any = build_model("llama", tie_word_embeddings=False)
    if kind == "adapters":
        home = save_member(base, tmp_path / "base")
        paths = {name: str(save_lora(home, tmp_path / name, seed)) for seed, name in enumerate(("a", "b"))}
        model, name = tessellm.compose(str(home), paths, rule="product").half(), "base"
    else:
        base, name = base.half(), "a"
        model = tessellm.compose(base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")
    with torch.no_grad():
        model.member(name).get_input_embeddings().weight[DAMAGED] = 65504  # the largest number there is
        model.member(name).get_submodule("model.layers.0.mlp.down_proj").weight *= 20
    engine = stacked_engine(model, stacked, slots=2)
    [failed] = engine.generate([spoilt(clean_prompts(1, 2)[0] * 40, 20)], NEW)
    assert failed.error == f"member {name!r} computes NaN: its weights are damaged, or overflow in torch.float16"
    requests = engine.generate(clean_prompts(12, 40), NEW)
    assert all(request.error is None or DAMAGED in request.tokens for request in requests)
    assert sum(request.error is None for request in requests) >= 9


def test_padding_reads_no_token_of_its_own() -> None:
    """Shorter rows of a pass are padded; with NaN in every row of the table that no prompt has, nothing changes."""
    base = build_model("llama", tie_word_embeddings=False)
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    for token in range(4):
        plant(model, "a", token)
    with stacking():
        engine = Engine(model, slots=4)
    requests = engine.generate(clean_prompts(9, 60), Sampling(1))
    assert [request.error for request in requests] == [None] * 9
