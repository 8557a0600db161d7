"""Sparse rows: the likelihood of weights by them is that by whole rows, under every rule, and memory is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from tessellm.rules import RULES, ComposedRule
from tessellm.rules.belief import Belief
from tessellm.tune import sparse_rows
from tessellm.tune.likelihood import Objective, tune
from tessellm.tune.reading import read
from tessellm.tune.sparse_rows import NamedColumns, SparseText, batches, keep_columns
from tessellm.tune.texts import DevelopmentText, draw, hold_out

VOCABULARY, ROWS, ENDS = 4000, 60, ((7,), (7,), (7, 9))


def laws(seed: int, sharpness: float = 3.0) -> Tensor:
    """A base, and two experts that differ from it everywhere by a little and on some tokens by much: [3, T, V]."""
    generator = torch.Generator().manual_seed(seed)
    base_TV = sharpness * torch.randn(ROWS, VOCABULARY, generator=generator)
    noise_KTV = torch.randn(2, ROWS, VOCABULARY, generator=generator)
    loud_KTV = (torch.rand(2, ROWS, VOCABULARY, generator=generator) < 0.01) * 4.0
    return torch.stack([base_TV, *(base_TV + 0.3 * noise_KTV + loud_KTV)]).log_softmax(-1)


def written(law_TV: Tensor, seed: int) -> Tensor:
    """Tokens drawn from the rows, after a first one: [T+1]."""
    drawn_T = law_TV.exp().multinomial(1, generator=torch.Generator().manual_seed(seed))[:, 0]
    return torch.cat([torch.tensor([3]), drawn_T])


def kept(rule: ComposedRule, logp_MTV: Tensor, ids_T: Tensor) -> tuple[NamedColumns, SparseText]:
    labels = NamedColumns.of(rule, VOCABULARY)
    own_D = torch.tensor(labels.own(ids_T.tolist()))
    place = {token: column for column, token in enumerate(own_D.tolist())}
    column_T = torch.tensor([place[token] for token in ids_T.tolist()])
    kept_MTC = keep_columns(logp_MTV, own_D, torch.Generator().manual_seed(0), whole=False)
    counts_T = torch.ones(ROWS, dtype=torch.bool)
    return labels, SparseText(kept_MTC, column_T[:-1], column_T[1:], counts_T, len(own_D))


def test_token_ids_become_columns_and_other_numbers_stay() -> None:
    rule = ComposedRule(Belief((), (900, 5), (7, 30), styles=(2,)), stops=ENDS)
    labels = NamedColumns.of(rule, VOCABULARY)
    assert labels.named == (5, 7, 9, 30, 900)
    assert labels.rule(rule).rule == Belief((), (4, 0), (1, 3), styles=(2,))


@pytest.mark.parametrize("name", RULES)
def test_the_likelihood_is_that_of_whole_rows(name: str) -> None:
    bound = 0.02 if name == "product" else 0.06  # other rules decide who speaks, which a small error can turn
    off = {(1.0, 1.0): 0.0, (0.5, 0.5): 0.0, (1.4, -0.4): 0.0, (0.2, 0.9): 0.0}
    for seed in range(3):
        logp_MTV = laws(seed)
        ids_T = written(logp_MTV[1], seed)
        rule = ComposedRule.make(name, end_ids=ENDS)
        labels, text = kept(rule, logp_MTV, ids_T)
        assert text.logp_MTC.shape[-1] <= labels.columns(ROWS + 1) < VOCABULARY / 10
        for weights in off:
            real_1T = torch.ones(1, ROWS, dtype=torch.bool)
            whole_1TV, _ = rule.weighted(weights)(logp_MTV[:, None], ids_T[None, :-1], real_1T, None)
            exact = whole_1TV[0].gather(-1, ids_T[1:, None]).clamp_min(-1e4).mean().item()
            off[weights] += (Objective(labels.rule(rule), [text]).value(weights) - exact) / 3
    assert max(map(abs, off.values())) < bound, off


def test_sums_over_the_vocabulary_are_estimated_without_bias() -> None:
    """Without what was drawn, or without its lift, the normaliser of Eq. 2 would be far off."""
    logp_MTV = laws(0, sharpness=1.0)  # a flat law, most of which is in the tail
    own_D, generator = torch.tensor([3]), torch.Generator().manual_seed(0)
    exact_T = (0.5 * logp_MTV[1] + 0.5 * logp_MTV[2]).logsumexp(-1)
    estimates = [keep_columns(logp_MTV, own_D, generator, whole=False) for _ in range(20)]
    found_T = torch.stack([(0.5 * law[1] + 0.5 * law[2]).logsumexp(-1) for law in estimates]).mean(0)
    assert (found_T - exact_T).mean().abs() < 0.002
    top_MTC = torch.cat([logp_MTV[..., :0], logp_MTV.sort(-1, descending=True).values[..., : sparse_rows.TOP]], -1)
    assert top_MTC.exp().sum(-1).mean() < 0.5  # it is the tail that matters here


def test_batches_change_nothing_and_long_texts_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = ComposedRule.make("evidence", end_ids=ENDS)
    texts, labels = [], NamedColumns((), 0)
    for seed, length in ((0, 60), (1, 23), (2, 41)):
        logp_MTV = laws(seed)
        labels, text = kept(rule, logp_MTV, written(logp_MTV[1], seed))
        cut = text.logp_MTC[:, :length], text.token_T[:length], text.next_T[:length], text.counts_T[:length]
        texts.append(SparseText(*cut, text.own))
    together = Objective(labels.rule(rule), texts)
    [batch] = batches(texts)
    assert batch.logp_MBTC.shape[1:3] == (3, 60)
    found = [(together.value((0.7, 1.2)), gradient(together))]
    for numbers in (1, 3 * 400 * 10):  # a row at a time, some rows at a time
        monkeypatch.setattr(sparse_rows, "BATCH_NUMBERS", numbers)
        found.append((together.value((0.7, 1.2)), gradient(together)))
    for value, gradient_K in found[1:]:
        assert value == pytest.approx(found[0][0], abs=1e-5)
        torch.testing.assert_close(gradient_K, found[0][1], atol=1e-4, rtol=1e-3)


def gradient(objective: Objective) -> Tensor:
    weights_K = torch.tensor([0.7, 1.2], requires_grad=True)
    objective.descend(weights_K)
    assert weights_K.grad is not None
    return weights_K.grad


def test_a_text_is_read_in_blocks_from_where_the_rule_looks(members_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tessellm.compose(members_dir / "base", {"math": members_dir / "math"}, rule="product")
    text = DevelopmentText(tuple(range(4, 40)), prompt=12)
    with torch.no_grad():
        output = model(torch.tensor([text.ids]), output_member_logprobs=True)
    for numbers in (1 << 24, 5 * 2 * 64):  # at once; five rows at a time
        monkeypatch.setattr("tessellm.tune.reading.READ_AT_ONCE", numbers)
        blocks = list(read(model, text))
        assert len(blocks) == (1 if numbers > 10_000 else 5)
        logp_MTV = torch.cat([block.logp_MTV for block in blocks], 1)
        torch.testing.assert_close(logp_MTV, output.member_logprobs[:, 0, 11:-1])
        assert torch.cat([block.next_T for block in blocks]).tolist() == list(text.ids[12:])
        assert all(block.counts_T.all() for block in blocks)
    model.set_rule("evidence")
    assert sum(len(block.token_T) for block in read(model, text)) == 35  # its window holds the prompt
    habits = [[0.0] * 5 + [1.0] * 5]
    model.set_rule(Belief(habits, turn=(8,), span=2))
    assert sum(len(block.token_T) for block in read(model, text)) == 35 - 2  # an answer began behind token 8, the fifth
    model.set_rule(Belief(habits, turn=(30,), span=2))
    assert sum(len(block.token_T) for block in read(model, text)) == 24 + 2  # none has begun


def test_tuning_by_sparse_rows_finds_what_whole_rows_find(members_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"math": members_dir / "math", "lora": members_dir / "lora_math"}
    model: Any = tessellm.compose(members_dir / "base", experts, rule="product")
    generator = torch.Generator().manual_seed(0)
    texts = [DevelopmentText(tuple(torch.randint(4, 64, (12,), generator=generator).tolist())) for _ in range(12)]
    whole = tune(model, texts)
    monkeypatch.setattr(sparse_rows, "WHOLE", 0)
    for name, count in (("TOP", 8), ("DRAWN", 24)):
        monkeypatch.setattr(sparse_rows, name, count)
    tuning = tune(model, texts)
    assert tuning.weights == pytest.approx(whole.weights, abs=0.1)
    assert tuning.judgement is not None
    assert 0 < abs(tuning.judgement.sparse_error) < 0.02
    assert tuning.held_out_before == pytest.approx(whole.held_out_before, abs=1e-6)  # by whole rows either way


def test_rows_kept_are_few_whatever_the_vocabulary() -> None:
    rule = ComposedRule.make("product", end_ids=ENDS)
    assert NamedColumns.of(rule, 10**6).columns(100) == NamedColumns.of(rule, VOCABULARY).columns(100) < 300
    assert NamedColumns.of(rule, 64).whole


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


def test_a_rule_that_names_tokens_reads_columns() -> None:
    rule = ComposedRule.make({"name": "belief", "opening": (900, 30), "turn": (30, 2000)}, end_ids=ENDS)
    labels = NamedColumns.of(rule, VOCABULARY)
    assert labels.named == (7, 9, 30, 900, 2000)
    local: Any = labels.rule(rule)
    assert (local.rule.opening, local.rule.turn, local.stops) == ((3, 2), (2, 4), ((0,), (0,), (0, 1)))
    assert labels.own([5, 30, 900, 5]) == [7, 9, 30, 900, 2000, 5]
