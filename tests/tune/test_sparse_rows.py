"""Sparse rows: the likelihood of weights by them is that by whole rows, and memory is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from tessellm.tune import rows as tuning_rows
from tessellm.tune.likelihood import Objective, tune
from tessellm.tune.rows import TextRows, batches, columns_kept, read, sparse
from tessellm.tune.texts import DevelopmentText, draw, hold_out

VOCABULARY, ROWS = 4000, 60


def distributions(seed: int, sharpness: float = 3.0) -> Tensor:
    """A base, and two experts that differ from it everywhere by a little and on some tokens by much: [3, T, V]."""
    generator = torch.Generator().manual_seed(seed)
    base_TV = sharpness * torch.randn(ROWS, VOCABULARY, generator=generator)
    noise_KTV = torch.randn(2, ROWS, VOCABULARY, generator=generator)
    loud_KTV = (torch.rand(2, ROWS, VOCABULARY, generator=generator) < 0.01) * 4.0
    return torch.stack([base_TV, *(base_TV + 0.3 * noise_KTV + loud_KTV)]).log_softmax(-1)


def whole_rows(seed: int, sharpness: float = 3.0) -> TextRows:
    """With tokens that the first expert drew."""
    logp_MTV = distributions(seed, sharpness)
    next_T = logp_MTV[1].exp().multinomial(1, generator=torch.Generator().manual_seed(seed))[:, 0]
    return TextRows(logp_MTV, next_T)


def test_the_likelihood_is_that_of_whole_rows() -> None:
    off = {(1.0, 1.0): 0.0, (0.5, 0.5): 0.0, (1.4, -0.4): 0.0, (0.2, 0.9): 0.0}
    for seed in range(3):
        rows, generator = whole_rows(seed), torch.Generator().manual_seed(0)
        kept = sparse(rows, generator)
        assert kept.logp_MTC.shape[-1] == columns_kept(VOCABULARY) < VOCABULARY / 10
        for weights in off:
            off[weights] += float(kept.log_likelihood(weights) - rows.log_likelihood(weights)) / ROWS / 3
    assert max(map(abs, off.values())) < 0.02, off


def test_the_likelihood_is_eq_2s_own() -> None:
    rows = whole_rows(0)
    by_hand_TV = rows.logp_MTC[0] + sum(
        w * (p - rows.logp_MTC[0]) for w, p in zip((0.7, 1.2), rows.logp_MTC[1:], strict=True)
    )
    exact = by_hand_TV.log_softmax(-1).gather(-1, rows.next_T[:, None]).sum()
    torch.testing.assert_close(rows.log_likelihood((0.7, 1.2)).float(), exact, rtol=1e-5, atol=0)


def test_sums_over_the_vocabulary_are_estimated_without_bias() -> None:
    """Without what was drawn, or without its lift, the normaliser of Eq. 2 would be far off."""
    rows, generator = whole_rows(0, sharpness=1.0), torch.Generator().manual_seed(0)  # most of it is in the tail
    exact_T = (0.5 * rows.logp_MTC[1] + 0.5 * rows.logp_MTC[2]).logsumexp(-1)
    kept = [sparse(rows, generator).logp_MTC for _ in range(20)]
    found_T = torch.stack([(0.5 * each[1] + 0.5 * each[2]).logsumexp(-1) for each in kept]).mean(0)
    assert (found_T - exact_T).mean().abs() < 0.002
    top_MTC = rows.logp_MTC.sort(-1, descending=True).values[..., : tuning_rows.TOP]
    assert top_MTC.exp().sum(-1).mean() < 0.5  # it is the tail that matters here


def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [sparse(whole_rows(seed), generator) for seed in range(3)]
    assert len(list(batches(parts))) == 1
    found = [value_and_gradient(Objective(parts))]
    monkeypatch.setattr(tuning_rows, "BATCH_NUMBERS", 1)
    assert len(list(batches(parts))) == 3
    found.append(value_and_gradient(Objective(parts)))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-3)


def value_and_gradient(objective: Objective) -> tuple[float, Tensor]:
    weights_K = torch.tensor([0.7, 1.2], requires_grad=True)
    value = -objective.descend(weights_K)
    assert weights_K.grad is not None
    assert objective.value((0.7, 1.2)) == pytest.approx(value, abs=1e-6)
    return value, weights_K.grad


def test_a_text_is_read_in_blocks_from_where_it_counts(members_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tessellm.compose(members_dir / "base", {"math": members_dir / "math"}, rule="product")
    text = DevelopmentText(tuple(range(4, 40)), prompt=12)
    with torch.no_grad():
        output = model(torch.tensor([text.ids]), output_member_logprobs=True)
    for numbers in (1 << 24, 5 * 2 * 64):  # at once; five rows at a time
        monkeypatch.setattr(tuning_rows, "READ_AT_ONCE", numbers)
        blocks = list(read(model, text))
        assert len(blocks) == (1 if numbers > 10_000 else 5)
        logp_MTV = torch.cat([block.logp_MTC for block in blocks], 1)
        torch.testing.assert_close(logp_MTV, output.member_logprobs[:, 0, 11:-1])
        assert torch.cat([block.next_T for block in blocks]).tolist() == list(text.ids[12:])


def test_tuning_by_sparse_rows_finds_what_whole_rows_find(members_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"math": members_dir / "math", "lora": members_dir / "lora_math"}
    model: Any = tessellm.compose(members_dir / "base", experts, rule="product")
    generator = torch.Generator().manual_seed(0)
    texts = [DevelopmentText(tuple(torch.randint(4, 64, (12,), generator=generator).tolist())) for _ in range(12)]
    whole = tune(model, texts)
    for name, count in (("WHOLE", 0), ("TOP", 8), ("DRAWN", 24)):
        monkeypatch.setattr(tuning_rows, name, count)
    tuning = tune(model, texts)
    assert tuning.weights == pytest.approx(whole.weights, abs=0.1)
    assert tuning.judgement is not None
    assert 0 < abs(tuning.judgement.sparse_error) < 0.02
    assert tuning.held_out_before == pytest.approx(whole.held_out_before, abs=1e-6)  # by whole rows either way


def test_held_out_texts_are_drawn_by_the_seed_from_every_skill() -> None:
    texts = [DevelopmentText((1, 2, n), 0, skill) for skill in ("a", "b", "c") for n in range(8)]
    left, held = hold_out(texts, 0.25, seed=0)
    assert sorted(map(hash, left + held)) == sorted(map(hash, texts))
    assert sorted(text.skill for text in held) == ["a", "a", "b", "b", "c", "c"]
    assert held != hold_out(texts, 0.25, seed=1)[1]
    assert held == hold_out(texts, 0.25, seed=0)[1]
    assert [text.ids[2] for text in held if text.skill == "a"] != [6, 7]  # not the file's last
    assert hold_out(texts[:1], 0.9, seed=0) == (texts[:1], [])


def test_texts_are_drawn_in_proportion_where_not_all_fit() -> None:
    texts = [DevelopmentText((1, n), 0, skill) for skill, count in (("a", 30), ("b", 10)) for n in range(count)]
    drawn = draw(texts, lambda text: 1, 20, seed=0)
    assert [text.skill for text in drawn].count("a") == 15
    assert len(drawn) == 20
    assert draw(texts, lambda text: 1, 40, seed=0) == texts
    assert len(draw(texts, lambda text: 99, 1, seed=0)) == 1
