"""`lengths`: the schemes are what they say, and a short run goes through."""

import json

import pytest
import torch

from tessellm_lab.common.stacked import initialise
from tessellm_lab.common.stacked import logits as rotary_logits
from tessellm_lab.lengths import experiment as lengths
from tessellm_lab.lengths.members import LONGEST, SCHEMES, SHAPE, WINDOW, logits, target, train_members
from tessellm_lab.letters.positions import REPLACEMENTS


@pytest.fixture
def params():
    generator = torch.Generator().manual_seed(0)
    params = {name: 3 * p for name, p in initialise(SHAPE, 2, generator).items()}
    params["positions"] = torch.randn(2, LONGEST, SHAPE.width, generator=generator)
    return params


def strings(length, count=3):
    return torch.randint(27, (2, count, length), generator=torch.Generator().manual_seed(1))


def test_rotary_is_the_stacked_transformer(params):
    tokens = strings(20)
    torch.testing.assert_close(logits("rotary", params, SHAPE, tokens), rotary_logits(params, SHAPE, tokens))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_scheme_sees_the_future(params, scheme):
    tokens = strings(12)
    other = tokens.clone()
    other[..., 8:] = (other[..., 8:] + 1) % 27
    one, two = (logits(scheme, params, SHAPE, t)[:, :, :8] for t in (tokens, other))
    torch.testing.assert_close(one, two)


def test_a_window_reaches_no_further_and_knows_no_absolute_position(params):
    tokens = strings(60)
    other = tokens.clone()
    reach = SHAPE.layers * WINDOW
    other[..., : 40 - reach] = (other[..., : 40 - reach] + 1) % 27
    one, two = (logits("window", params, SHAPE, t)[:, :, 40:] for t in (tokens, other))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    shifted = logits("window", params, SHAPE, tokens[..., 20:])[:, :, reach:]
    torch.testing.assert_close(
        shifted, logits("window", params, SHAPE, tokens)[:, :, 20 + reach :], rtol=1e-3, atol=1e-4
    )


def test_schemes_differ(params):
    tokens = strings(16)
    found = [logits(scheme, params, SHAPE, tokens) for scheme in SCHEMES]
    for number, one in enumerate(found):
        for other in found[number + 1 :]:
            assert not torch.allclose(one, other, atol=1e-3)


def test_the_task_is_the_letter_before():
    assert target(torch.tensor([[3, 0, 12]]), REPLACEMENTS)[0, 1:].tolist() == [3, 10]  # D, then A→K


def test_a_short_run_writes_claims_and_figure(tmp_path, monkeypatch):
    monkeypatch.setitem(lengths.SIZES, "cpu", lengths.Effort(2, (2, 2), 4, 5))
    monkeypatch.setattr(lengths, "ABLE", 0.0)
    result = lengths.run(seed=0, out=tmp_path, size="cpu")
    written = json.loads((tmp_path / "lengths.json").read_text())
    assert {"inherits", "union", "window"} <= {claim["id"] for claim in written["claims"]}
    assert len(result.tables["lengths"]) == len(SCHEMES) * len(lengths.LENGTHS) * 2
    assert (tmp_path / "lengths.png").stat().st_size > 10_000


def test_a_window_learns_and_extrapolates():
    generator = torch.Generator().manual_seed(0)
    members = train_members("window", 1, (150, 40), 16, generator)
    rows = lengths.evaluate("window", members, 20, generator)
    far, near = (next(row for row in rows if row["length"] == n) for n in (128, 16))
    assert near["base"] > 0.5
    assert far["base"] > near["base"] - 0.05
