"""The decoders are scikit-learn's, the penalties are chosen blind to the test rows, and the controls stay at chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge

from tessellm_lab.probe import decoders
from tessellm_lab.probe.decoders import (
    folds_of,
    logistic,
    predict_names,
    predict_numbers,
    ridge,
    score_names,
    score_numbers,
)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(40, 7), (15, 30)])
def test_ridge_is_scikit_learns_at_every_penalty(shape: tuple[int, int]) -> None:
    x, y = gaussian(*shape), gaussian(shape[0], 3, seed=1)
    penalties = (1e-3, 0.5, 20.0)
    for w_DJ, penalty in zip(ridge(x, y, penalties), penalties, strict=True):
        theirs = Ridge(alpha=penalty, fit_intercept=False).fit(x.numpy(), y.numpy()).coef_.T
        np.testing.assert_allclose(w_DJ.numpy(), theirs, atol=1e-9)


def test_logistic_is_scikit_learns_with_rows_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "MOST_ITERATIONS", 2000)
    x, classes, rows = gaussian(60, 5), 4, 60
    y = ((x @ gaussian(5, classes, seed=1)) + gaussian(60, classes, seed=2)).argmax(1)
    shuffled = y[torch.randperm(rows, generator=torch.Generator().manual_seed(3))]
    kept = torch.arange(rows) < 45
    weights = torch.stack([torch.ones(rows), kept, kept]).double()
    penalties = torch.tensor([1.0, 0.01, 0.01], dtype=torch.float64)
    start = torch.zeros(3, 6, classes, dtype=torch.float64)
    w_JRC = logistic(x, torch.stack([y, y, shuffled]), weights, start, penalties, tolerance=1e-9)
    for problem, labels in enumerate([y, y, shuffled]):
        used = weights[problem] > 0
        strength = 1 / (penalties[problem].item() * int(used.sum()))
        theirs = LogisticRegression(C=strength, tol=1e-10, max_iter=10_000).fit(x[used].numpy(), labels[used].numpy())
        ours = (x @ w_JRC[problem, :-1] + w_JRC[problem, -1]).softmax(-1)
        np.testing.assert_allclose(ours.numpy(), theirs.predict_proba(x.numpy()), atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=8, max_size=60), st.integers(2, 5), st.integers(0, 99))
def test_groups_are_never_split_and_folds_are_even(groups: list[int], folds: int, seed: int) -> None:
    fold_N = folds_of(torch.tensor(groups), folds, torch.Generator().manual_seed(seed))
    by_group = {group: {int(f) for f, g in zip(fold_N, groups, strict=True) if g == group} for group in set(groups)}
    assert all(len(found) == 1 for found in by_group.values())
    counts = [sum(found == {fold} for found in by_group.values()) for fold in range(folds)]
    assert max(counts) - min(counts) <= 1


def test_numbers_are_found_where_they_are_and_nowhere_else() -> None:
    x = gaussian(300, 12)
    there = x[:, 3] - 2 * x[:, 7] + 0.1 * gaussian(300, seed=5)
    y = torch.stack([there, gaussian(300, seed=6), x[:, 0] * x[:, 1]], 1)
    groups = torch.arange(300)
    predicted, mean = predict_numbers(x, y, groups, 5, 0)
    scores = [score_numbers(predicted[:, j], mean[:, j], y[:, j], groups, 0) for j in range(3)]
    assert scores[0].value > 0.99
    assert scores[0].low <= scores[0].value <= scores[0].high
    assert all(-0.2 < score.value < 0.1 for score in scores[1:])  # noise, and a product: not linear


def test_more_features_than_rows_do_not_make_up_a_signal() -> None:
    x, y = gaussian(60, 400), gaussian(60, 1, seed=1)
    predicted, mean = predict_numbers(x, y, torch.arange(60), 5, 0)
    assert score_numbers(predicted[:, 0], mean[:, 0], y[:, 0], torch.arange(60), 0).value < 0.2


def test_names_are_found_where_they_are_and_parity_is_not() -> None:
    x = gaussian(240, 8)
    noise = torch.randint(3, (240,), generator=torch.Generator().manual_seed(2))
    there = (x[:, 2] > 0.4).long() + (x[:, 2] > -0.4).long()
    parity = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()
    groups = torch.arange(240)
    predicted, commonest = predict_names(x, torch.stack([there, noise, parity]), 3, groups, 4, 0)
    scores = [score_names(predicted[j], commonest[j], y, groups, 0) for j, y in enumerate((there, noise, parity))]
    assert scores[0].value > 0.9
    assert abs(scores[1].value - scores[1].chance) < 0.12
    assert abs(scores[2].value - 0.5) < 0.12


def test_copies_of_a_row_in_one_group_do_not_leak() -> None:
    """Forty distinct rows, each ten times over: a decoder that saw a copy knows the label, one that did not cannot."""
    distinct, labels = gaussian(40, 60), gaussian(40, 1, seed=3)
    x, y = distinct.repeat(10, 1), labels.repeat(10, 1)
    honest, leaky = torch.arange(40).repeat(10), torch.arange(400)
    scores = []
    for groups in (honest, leaky):
        predicted, mean = predict_numbers(x, y, groups, 5, 0)
        scores.append(score_numbers(predicted[:, 0], mean[:, 0], y[:, 0], groups, 0).value)
    assert scores[0] < 0.2
    assert scores[1] > 0.9


def test_constant_features_are_ignored() -> None:
    x = torch.cat([gaussian(50, 2), torch.full((50, 1), 7.0, dtype=torch.float64)], 1)
    predicted, _ = predict_numbers(x, x[:, :1].clone(), torch.arange(50), 5, 0)
    assert torch.isfinite(predicted).all()
    constant = torch.zeros(50, 3, dtype=torch.float64)
    predicted, mean = predict_numbers(constant, x[:, :1].clone(), torch.arange(50), 5, 0)
    assert torch.equal(predicted, mean)
