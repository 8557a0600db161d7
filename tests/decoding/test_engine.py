"""The engine writes what the reference would, whatever else is in the batch, and frees what it no longer needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessellm.decoding.sampling import Sampling

from decoding_cases import KINDS, composition, disagreements, prompts, reference_rows, stacked_engine


@pytest.mark.parametrize("rule", ["evidence", "product"])
@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference(kind: str, stacked: bool, rule: str, tmp_path: Path) -> None:
    model = composition(kind, tmp_path, rule=rule)
    engine = stacked_engine(model, stacked, slots=4)
    requests = engine.generate(prompts(9, 100), Sampling(max_new_tokens=20))
    for request in requests:
        assert not disagreements(model, request)
        rows = reference_rows(model, request)
        chosen = rows.gather(-1, torch.tensor(request.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.logprobs), chosen, atol=1e-4, rtol=0)
