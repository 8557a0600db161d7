"""The sweep over the vocabulary: in blocks as at once, and the likeliest tokens without sorting all."""

import pytest
import torch

from tessellm.diagnose import sweep
from tessellm.diagnose.row_statistics import statistics
from tessellm.rules import RULES, ComposedRule

from test_row_statistics import ENDS, rows


@pytest.mark.parametrize("weights", [None, (1.0, 0.5, -0.3)])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_blocks_change_nothing(rule, weights, monkeypatch):
    logp, tokens = rows(4, 300, 3, 3.0)
    made = ComposedRule.make(rule, weights)
    composed, _, why = made.explain(logp, tokens, torch.ones_like(tokens, dtype=torch.bool), None)
    whole = statistics(logp, composed, made, ENDS[:4], why)
    monkeypatch.setattr(sweep, "BLOCK", 5 * 4 * 300)  # five of twelve rows, the last ones fewer
    parts = statistics(logp, composed, made, ENDS[:4], why)
    for name, one in whole.columns().items():
        torch.testing.assert_close(parts.columns()[name], one, msg=name, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [4, 128 * 10, 128 * 11, 128 * 11 + 1, 5000])
def test_the_likeliest_are_those_of_a_sort(size):
    logp = torch.randn(3, 7, size, generator=torch.Generator().manual_seed(size)).log_softmax(-1)
    logp[0, :, 5:] = -torch.inf
    logp[1, 0] = -1.0  # ties everywhere
    logp[2, :, -1] = 1.0  # past the last whole group
    found, places = sweep.likeliest(logp)
    assert torch.equal(found, logp.topk(min(5, size), -1).values)
    assert torch.equal(logp.gather(-1, places), found)
    assert all(len(set(row)) == len(row) for row in places.flatten(0, 1).tolist())
