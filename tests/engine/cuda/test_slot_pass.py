"""Attention over slots: passes that need no mask, and cells that no token reads any more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessellm.engine.cuda import slot_pass
from tessellm.engine.cuda.slot_pass import SlotPass, TokenBatch
from tessellm.engine.members import attention
from tessellm.engine.members.kv_cache import SlotCache

TOKENS = 6


def pieces(start: int, shared: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of the last tokens, and keys and values of all cells."""
    generator = torch.Generator().manual_seed(start)
    query = torch.randn(3, 4, TOKENS, 16, generator=generator)
    key, value = torch.randn(2, 3, 4 // shared, start + TOKENS, 16, generator=generator)
    return query, key, value


def passed(start: int, known: bool) -> SlotPass:
    position_RT = torch.arange(start, start + TOKENS).expand(3, -1)
    slot_B = torch.arange(3)
    batch = TokenBatch(position_RT, position_RT, slot_B, start + TOKENS, start=start if known else None)
    return SlotPass(SlotCache(3, 1, start + TOKENS), batch, position_RT, slot_B)


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("start", [0, 1, 9])
def test_the_last_tokens_of_their_cells_need_no_mask(start: int, shared: int) -> None:
    query, key, value = pieces(start, shared)
    found = slot_pass._continue(query, key, value, 0.3)
    wanted, _ = attention.slot_attention(nn.Identity(), query, key, value, None, 0.3, rows_pass=passed(start, True))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 1, 4, 8, 100])
@pytest.mark.parametrize("start", [0, 3, 20])
def test_knowing_where_a_pass_starts_changes_nothing(start: int, window: int | None, softcap: float | None) -> None:
    query, key, value = pieces(start, 2)
    found, wanted = (
        attention.slot_attention(
            nn.Identity(), query, key, value, None, 0.3, softcap, window, rows_pass=passed(start, known)
        )[0]
        for known in (True, False)
    )
    torch.testing.assert_close(found, wanted)
    if window is not None:
        assert passed(start, True)._first(window) == max(0, start - window + 1)
