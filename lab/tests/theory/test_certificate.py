"""The certificate of Eq. 2: the bound holds on what compositions write, and says nothing where ε is large."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.diagnose import trace_generation
from tessellm.diagnose.row_statistics import statistics
from tessellm.rules import make_rule
from tessellm_lab.theory.certificate import certificate, gap_bound, idle, new_text_limit

from families import composition, family, random_ids


@pytest.mark.parametrize("weight", [0.02, 1.0])
def test_the_bound_holds_on_written_texts(weight: float) -> None:
    model, ids = composition(family(["llama"] * 3), [weight] * 2, rule="product"), random_ids(4, 9)
    _, written = trace_generation(model, ids, torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
    found = certificate([written.text(row) for row in range(4)])
    assert found.holds
    assert len(found.gaps) == len(found.bounds) == 4
    assert found.vacuous == (weight == 1.0)
    assert found.unseen_gap == float("inf")  # nine texts say something


@settings(max_examples=60, deadline=None)
@given(weight=st.sampled_from([0.5, -0.4, 1.0, 1.3]), spread=st.floats(0, 6), seed=st.integers(0, 10**6))
def test_the_bound_holds_on_every_row_of_eq_2(weight: float, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 2, 6, 9, generator=generator) * 2
    size = spread * torch.rand(4, 2, 6, 1, generator=generator) ** 3
    size[0] = 0
    logp = (base + size * torch.randn(4, 2, 6, 9, generator=generator)).log_softmax(-1)
    rule = make_rule("product", (weight, 1.0, 1.0))
    tokens, mask = torch.zeros(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.bool)
    composed, _, why = rule.explain(logp, tokens, mask, None)
    found = statistics(logp, composed, rule, ((),) * 4, why)
    bound_BT = gap_bound(idle(found.epsilon_BTK))
    assert (found.gap_kl_BT <= bound_BT + 2e-4 * (1 + bound_BT)).all()
    assert (found.gap_BT <= (bound_BT / 2).sqrt() + 1e-3).all()  # Pinsker
    assert (found.log_z_BT.abs() <= idle(found.epsilon_BTK) + 1e-3).all()


def test_the_limit_for_a_new_text_is_an_order_statistic() -> None:
    value_B = torch.arange(19.0)
    assert new_text_limit(value_B, 0.9) == 17
    assert new_text_limit(value_B[:8], 0.9) == float("inf")


def test_the_limit_for_new_texts_covers_them() -> None:
    draws = torch.randn(2000, 20, generator=torch.Generator().manual_seed(0)).exp()
    covered = [float(row[19]) <= new_text_limit(row[:19], 0.9) for row in draws]
    assert 0.88 < sum(covered) / len(covered) < 0.93
