"""Tuning: weights that made the texts are found again, and the likelihood never falls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tessellm
from tessellm.errors import PromptError
from tessellm.tune.likelihood import tune


@pytest.fixture(scope="module")
def model(members_dir: Path) -> Any:
    experts = {"math": members_dir / "math", "lora": members_dir / "lora_math"}
    return tessellm.compose(members_dir / "base", experts, rule="product")


def sample(model: Any, weights: list[float], count: int, length: int = 40) -> list[tuple[list[int], int]]:
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
    return [(row, 0) for row in out.tolist()]


@pytest.mark.parametrize("truth", [[0.5, 0.9], [1.4, -0.4]])
def test_weights_that_wrote_the_texts_are_found(model: Any, truth: list[float]) -> None:
    seen: list[tuple[int, int]] = []
    tuning = tune(model, sample(model, truth, 120), progress=lambda done, total: seen.append((done, total)))
    assert list(tuning.weights.values()) == pytest.approx(truth, abs=0.1)
    assert tuning.after > tuning.before
    assert tuning.held_out_before is not None
    assert tuning.held_out_after is not None
    assert tuning.held_out_after > tuning.held_out_before  # texts that it did not see
    assert (tuning.tokens, tuning.held_out_tokens, tuning.texts_left_out) == (90 * 40, 30 * 40, 0)
    assert seen[-1] == (120, 120)
    assert model.config.weights == (1.0, 1.0)  # the model itself is left as it was


def test_the_likelihood_reported_is_the_models_own(model: Any) -> None:
    examples = sample(model, [0.5, 0.5], 3)
    texts = [text for text, _ in examples]
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
    tuning = tune(model, [(text, 0) for text in texts])
    assert tuning.after >= tuning.before
    assert all(torch.isfinite(torch.tensor(list(tuning.weights.values()))))


def test_other_rules_are_tuned_too(members_dir: Path) -> None:
    from tessellm.rules import RULES

    for name in RULES:
        model: Any = tessellm.compose(members_dir / "base", {"math": members_dir / "math"}, rule=name)
        texts = [[5, 9, 13, 17, 4], [8, 8, 30, 31], [40, 41, 42]]
        tuning = tune(model, [(text, 0) for text in texts])
        assert tuning.after >= tuning.before, name
        assert torch.isfinite(torch.tensor(tuning.weights["math"])), name


def test_texts_that_are_too_short_are_refused(model: Any) -> None:
    with pytest.raises(PromptError, match="at least two tokens"):
        tune(model, [([5], 0), ([], 0), ([5, 6], 2)])
    assert tune(model, [([5], 0), ([5, 6], 0)]).texts_left_out == 1


def test_texts_past_the_memory_are_left_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessellm.tune.likelihood.CACHED_BYTES", 3 * 3 * 64 * 4)
    assert tune(model, [([5, 6, 7], 0)] * 4).texts_left_out == 3


def test_prompts_do_not_count(model: Any) -> None:
    ids = [5, 9, 13, 17, 4, 30, 31]
    tuning = tune(model, [(ids, 4)], held_out=0.0)
    assert tuning.tokens == 3
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert tuning.before == pytest.approx(sum(logp[t - 1, ids[t]].item() for t in (4, 5, 6)) / 3, abs=1e-5)


def test_weights_that_make_it_worse_are_not_taken(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for astray in (torch.tensor([50.0, -50.0]), torch.tensor([torch.nan, 1.0])):
        monkeypatch.setattr("tessellm.tune.likelihood._climb", lambda *_, astray=astray: astray)
        tuning = tune(model, [([5, 9, 13, 17, 4], 0)])
        assert list(tuning.weights.values()) == [1.0, 1.0]
        assert tuning.after == tuning.before
