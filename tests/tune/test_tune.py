"""Tuning: weights that made the texts are found again, and the likelihood never falls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tessellm
from tessellm.errors import PromptError, RecipeError
from tessellm.tune import likelihood
from tessellm.tune.likelihood import Tuning, tune
from tessellm.tune.texts import DevelopmentText, hold_out


@pytest.fixture(scope="module")
def model(members_dir: Path) -> Any:
    experts = {"math": members_dir / "math", "lora": members_dir / "lora_math"}
    return tessellm.compose(members_dir / "base", experts, rule="product")


def texts_of(rows: Iterable[Sequence[int]], prompt: int = 0) -> list[DevelopmentText]:
    return [DevelopmentText(tuple(row), prompt) for row in rows]


def sample(model: Any, weights: list[float], count: int, length: int = 40) -> list[DevelopmentText]:
    """Texts that the composition writes with those weights."""
    model.set_rule(weights=weights)
    torch.manual_seed(0)
    start = torch.randint(4, 64, (count, 1))
    out = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=length,
        do_sample=True,
        top_k=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model.set_rule(weights=[1.0, 1.0])
    return texts_of(out.tolist())


@pytest.mark.parametrize("truth", [[0.5, 0.9], [1.4, -0.4]])
def test_weights_that_wrote_the_texts_are_found(model: Any, truth: list[float]) -> None:
    seen: list[tuple[str, int, int]] = []
    tuning = tune(model, sample(model, truth, 120), progress=lambda *told: seen.append(told))
    assert list(tuning.weights.values()) == pytest.approx(truth, abs=0.1)
    assert tuning.after > tuning.before
    assert tuning.held_out_before is not None
    assert tuning.held_out_after is not None
    assert tuning.held_out_after > tuning.held_out_before  # texts that it did not see
    assert (tuning.tokens, tuning.held_out_tokens, tuning.texts_too_short) == (90 * 40, 30 * 40, 0)
    assert tuning.kept == "found"
    done = {what: (count, total) for what, count, total in seen}
    assert done == {"reading": (90, 90), "climbing": (40, 40), "judging": (30, 30)}  # each to its end
    assert model.config.weights == (1.0, 1.0)  # the model itself is left as it was


def test_the_likelihood_reported_is_the_models_own(model: Any) -> None:
    examples = sample(model, [0.5, 0.5], 3)
    texts = [list(text.ids) for text in examples]
    tuning = tune(model, examples, held_out=0.0)
    total = 0.0
    for text in texts:
        ids = torch.tensor([text])
        with torch.no_grad():
            logp = model(ids).logits[0, :-1].log_softmax(-1)
        total += logp.gather(-1, ids[0, 1:, None]).sum().item()
    assert tuning.before == pytest.approx(total / 120, abs=1e-5)
    assert tuning.held_out_after is None
    model.set_rule(weights=list(tuning.weights.values()))
    with torch.no_grad():
        after = [model(torch.tensor([text]), labels=torch.tensor([text])).loss.item() for text in texts]
    model.set_rule(weights=[1.0, 1.0])
    assert tuning.after == pytest.approx(-sum(after) / 3, abs=1e-4)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(st.integers(4, 63), min_size=2, max_size=12), min_size=1, max_size=4))
def test_the_likelihood_never_falls(model: Any, texts: list[list[int]]) -> None:
    tuning = tune(model, texts_of(texts))
    assert tuning.after >= tuning.before
    assert all(torch.isfinite(torch.tensor(list(tuning.weights.values()))))


def test_another_rule_is_refused(model: Any) -> None:
    texts = texts_of([[5, 9, 13, 17, 4]])
    model.set_rule("mixture")
    with pytest.raises(RecipeError, match=r"this composition's is mixture\. Give --rule product"):
        tune(model, texts)
    model.set_rule("product")
    assert tune(model, texts).tokens == 4


def test_texts_that_are_too_short_are_refused(model: Any) -> None:
    with pytest.raises(PromptError, match="at least two tokens"):
        tune(model, [*texts_of([[5], []]), *texts_of([[5, 6]], prompt=2)])
    assert tune(model, texts_of([[5], [5, 6]])).texts_too_short == 1


def test_texts_past_the_memory_are_drawn_from_every_skill(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [DevelopmentText((5, 6, 7 + n), 0, skill) for skill in ("a", "b") for n in range(8)]
    monkeypatch.setattr("tessellm.tune.likelihood.KEPT_BYTES", 6 * 2 * 3 * 64 * 4)
    seen: list[DevelopmentText] = []
    read = likelihood.read

    def watched(model: Any, text: DevelopmentText) -> Any:
        seen.append(text)
        return read(model, text)

    monkeypatch.setattr("tessellm.tune.likelihood.read", watched)
    assert tune(model, texts, held_out=0.0).texts_not_drawn == 10
    assert [text.skill for text in seen].count("a") == len(seen) // 2 == 3


def test_prompts_do_not_count(model: Any) -> None:
    ids = [5, 9, 13, 17, 4, 30, 31]
    tuning = tune(model, texts_of([ids], prompt=4), held_out=0.0)
    assert tuning.tokens == 3
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert tuning.before == pytest.approx(sum(logp[t - 1, ids[t]].item() for t in (4, 5, 6)) / 3, abs=1e-5)


def found_instead(weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessellm.tune.likelihood.climb", lambda *_: weights)


def held_out_under(model: Any, tuning: Tuning, weights: Sequence[float], texts: Sequence[DevelopmentText]) -> float:
    """Of the model itself, over the texts that tuning held out."""
    judges = hold_out(texts, 0.25, 0)[1]
    assert sum(text.counted for text in judges) == tuning.held_out_tokens
    model.set_rule(weights=weights)
    with torch.no_grad():
        losses = [model(ids, labels=ids).loss.item() for ids in (torch.tensor([text.ids]) for text in judges)]
    model.set_rule(weights=[1.0, 1.0])
    return -sum(losses) / len(losses)


def test_what_is_kept_is_never_worse_held_out_than_equal_weights(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = sample(model, [0.5, 0.5], 24)
    model.set_rule(weights=[3.0, -2.0])  # and the weights there were are no better
    found_instead((2.5, -1.5), monkeypatch)
    tuning = tune(model, texts)
    model.set_rule(weights=[1.0, 1.0])
    assert tuning.kept == "1/k each"
    assert list(tuning.weights.values()) == [0.5, 0.5]
    assert tuning.held_out_after == pytest.approx(held_out_under(model, tuning, [0.5, 0.5], texts), abs=1e-4)
    for other in ([1.0, 1.0], [3.0, -2.0], [2.5, -1.5]):
        assert tuning.held_out_after > held_out_under(model, tuning, other, texts)


def test_the_climb_returns_the_best_that_it_met(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.LBFGS, "step", astray)
    for held_out in (0.0, 0.5):
        tuning = tune(model, texts_of([[5, 9, 13, 17, 4], [9, 5, 4, 13]]), held_out)
        assert all(abs(weight) <= 1 for weight in tuning.weights.values())
        assert tuning.after >= tuning.before


def astray(optimiser: Any, closure: Any) -> None:
    for bad in (50.0, torch.nan):
        optimiser.param_groups[0]["params"][0].data.fill_(bad)
        closure()
