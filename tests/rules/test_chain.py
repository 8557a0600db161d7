"""Beliefs along a text at once are those of one token after another."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tessellm.rules import belief
from tessellm.rules.belief import NUMBERS, SHARE, Belief, shared
from tessellm.rules.chain import beliefs_along, update_matrices


@pytest.mark.parametrize(("spread", "steps"), [(1.0, 1), (3.0, 2), (30.0, 33), (3000.0, 130)])
def test_a_chain_is_one_update_after_another(spread: float, steps: int) -> None:
    """Laws that are nearly sure of all, and such as find what follows impossible."""
    said_BTL = -torch.rand(2, steps, 5, generator=torch.Generator().manual_seed(steps)) * spread
    said_BTL[:, ::7, 2] = -1e4
    belief_BL = shared(torch.tensor([[0.0, 0, 0, 0, 0], [-30.0, 0, 0, -30, 0]]))
    found_BTL = beliefs_along(update_matrices(said_BTL, SHARE), belief_BL)
    for t in range(steps):
        belief_BL = shared(belief_BL + said_BTL[:, t])
        torch.testing.assert_close(found_BTL[:, t], belief_BL, atol=2e-5, rtol=1e-5)


def test_products_are_not_concatenated() -> None:
    """Concatenations of concatenations are what compilers for a GPU fail at, with five to seven laws."""
    graph = make_fx(beliefs_along)(torch.rand(1, 32, 5, 5), torch.zeros(1, 5)).graph
    assert torch.ops.aten.cat.default not in {node.target for node in graph.nodes}


@pytest.mark.parametrize("steps", [1, 2, 40, 140])
@pytest.mark.parametrize("calibrated", [True, False])
def test_a_text_is_read_at_once_as_token_by_token(
    calibrated: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, answers that begin in the middle, and a state to go on from."""
    generator = torch.Generator().manual_seed(steps)
    logp = (3 * torch.randn(3, 2, 2 * steps, 12, generator=generator)).log_softmax(-1)
    tokens = torch.randint(12, (2, 2 * steps), generator=generator)
    tokens[0, steps // 2], mask = 7, torch.ones_like(tokens, dtype=torch.bool)
    mask[1, : steps // 3] = False
    habits = [[0.0] * NUMBERS + [1.0] * NUMBERS] * 2
    rule = Belief(habits=habits, opening=[3], turn=[7], span=6) if calibrated else Belief(span=6)
    found = []
    for fast in (False, True):
        monkeypatch.setattr(belief, "sums_are_fast", lambda like, fast=fast: fast)
        state, said = None, []
        for at in (slice(0, steps), slice(steps, None)):
            logp_BTV, state = rule(logp[:, :, at], tokens[:, at], mask[:, at], state)
            said.append(logp_BTV)
        found.append((torch.cat(said, 1), state))
    (one, before), (other, after) = found
    torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, atol=2e-5, rtol=1e-5)
