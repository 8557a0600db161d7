"""`styles`: the texts are what they claim to be, and a short run goes through every part."""

import json

import pytest
import torch

from tessellm_lab.styles import experiment as styles
from tessellm_lab.styles.members import (
    CONTENTS,
    START,
    STYLES,
    SUM_LENGTH,
    TOKENS,
    make_walks,
    repaired,
    sum_features,
    sums,
)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_walks_differ_in_one_feature_each_and_share_the_bijection(generator):
    base, content, style, broken = make_walks([0.0, 1.0], generator)
    assert (base.content != content.content).all()
    assert torch.equal(base.style, content.style)
    assert (base.style != style.style).all()
    assert torch.equal(base.content, style.content)
    assert torch.equal(base.token, style.token)
    assert sorted(broken.token.flatten().tolist()) == list(range(TOKENS))
    assert (broken.token != base.token).all()


def test_features_invert_the_bijection(generator):
    walk = make_walks([], generator)[0]
    content, style = walk.features
    assert torch.equal(walk.token[content, style], torch.arange(TOKENS))


def test_a_text_follows_its_walk(generator):
    walk = make_walks([], generator)[0]
    tokens = walk.write(400, 16, generator)
    content, style = walk.wanted(tokens[:, :-1])
    content_V, style_V = walk.features
    followed = [
        (content_V[tokens[:, 2:]] == content).float().mean(),
        (style_V[tokens[:, 2:]] == style).float().mean(),
    ]
    for share in followed:
        assert float(share) == pytest.approx(walk.faithful, abs=0.03)
    laws = walk.law(tokens)
    assert [law.shape[-1] for law in laws] == [CONTENTS, STYLES]
    for law in laws:
        torch.testing.assert_close(law.sum(-1), torch.ones_like(law[..., 0]))


def test_a_share_of_the_bijection_is_broken(generator):
    token = make_walks([], generator)[0].token
    assert int((repaired(token, 0.5, generator) != token).sum()) == TOKENS // 2
    assert torch.equal(repaired(token, 0.0, generator), token)


def test_sums_hide_their_features_from_the_first_token(generator):
    texts = sums(6000, (True, False), generator)
    assert texts.shape == (6000, SUM_LENGTH + 1)
    assert (texts[:, 0] == START).all()
    content, style = sum_features(texts[:, 1:])
    assert float(content.float().mean()) == pytest.approx(0.9, abs=0.01)
    assert float(style.float().mean()) == pytest.approx(1 / 3, abs=0.02)
    first = torch.bincount(texts[:, 1], minlength=3).float() / len(texts)
    torch.testing.assert_close(first, torch.full((3,), 1 / 3), atol=0.03, rtol=0)


def test_a_short_run_goes_through_every_part(tmp_path, monkeypatch):
    monkeypatch.setitem(styles.SIZES, "cpu", styles.Effort((3, 2), (3, 2), 4, 6, 50))
    result = styles.run(seed=1, out=tmp_path, size="cpu")
    written = json.loads((tmp_path / "styles.json").read_text())
    assert {"members", "composed", "broken", "future-particles"} <= {claim["id"] for claim in written["claims"]}
    assert [row["share"] for row in result.tables["bijection broken"]] == list(styles.BROKEN)
    assert (tmp_path / "styles.png").stat().st_size > 10_000
