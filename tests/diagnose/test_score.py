"""The predicted share of right texts: high where experts compose, low where they contradict, blind to no blend."""

import pytest
import torch

import tessellm
from tessellm.diagnose.interference import Rows
from tessellm.diagnose.recorder import log_probabilities
from tessellm.diagnose.row_statistics import statistics
from tessellm.diagnose.score import chance_right, sharpened
from tessellm.rules import make_rule

from planted import composition, prompts


def test_it_is_high_for_a_clean_pair_and_low_for_a_contradiction():
    clean, torn = (
        tessellm.diagnose(composition("three", other, rule="product"), prompts(), max_new_tokens=24)
        for other in ("six", "other_three")
    )
    assert clean.predicted.value > 0.95
    assert clean.loss < 0.02
    assert torn.predicted.value < 0.4
    assert torn.loss > 0.5
    assert torn.predicted.low <= torn.predicted.value <= torn.predicted.high


def rows_of_law(logp: torch.Tensor, name: str = "product") -> Rows:
    """One text of one token, written greedily by Eq. 2 or another rule."""
    rule, logp_MBTV = make_rule(name), logp[:, None, None]
    composed, _, why = rule.explain(logp_MBTV, torch.zeros(1, 1).long(), torch.ones(1, 1), None)
    found = statistics(logp_MBTV, composed, rule, ((),) * len(logp), why)
    columns = {name: each[0] for name, each in found.columns().items()}
    columns["logprob"] = log_probabilities(logp_MBTV, composed, composed.argmax(-1))[0]
    return Rows(torch.zeros(1, dtype=torch.long), 1, columns)


def test_a_blend_is_no_mistake():
    base, content = torch.tensor([0.96, 0.02, 0.02]), torch.tensor([0.02, 0.96, 0.02])
    style, styled = torch.tensor([0.95, 0.05]), torch.tensor([0.05, 0.95])
    laws = torch.stack(
        [torch.outer(c, s).flatten() for c, s in ((base, style), (content, style), (base, styled))]
    ).log()
    rows = rows_of_law(laws)
    assert rows["novel"].all()
    assert chance_right(rows) > 0.9
    rival = torch.tensor([0.02, 0.02, 0.96])
    laws = torch.stack([torch.outer(c, style).flatten() for c in (base, content, rival)]).log()
    assert chance_right(rows_of_law(laws)) < 0.6


def test_confidence_is_sharpened():
    top = torch.tensor([[0.6, 0.3, 0.1]]).log()[:, None]
    assert sharpened(top[..., 0], top)[0, 0] == pytest.approx(0.216 / (0.216 + 0.027 + 0.001))
    assert sharpened(torch.tensor([[-9.0]]), top)[0, 0] < 1e-9


def test_of_a_mixture_those_count_whom_it_believes():
    laws = torch.tensor([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.05, 0.05, 0.9]]).log()
    rows = rows_of_law(laws, "product")
    torn = chance_right(rows)
    for law in range(3):
        believed = torch.nn.functional.one_hot(torch.tensor([law]), 4).float()
        said = laws[law, law].expand(1, 1), laws[law].sort(descending=True).values
        voices = [rows["logprob"][:, :-1], said[0]]
        sure = Rows(rows.text_R, 1, {**rows.columns, "law": believed, "logprob": torch.cat(voices, 1)})
        top = rows["top_logprobs"].clone()
        top[0, -1, : len(said[1])] = said[1]
        sure.columns["top_logprobs"], sure.columns["logprob"][0, law] = top, laws[law, law]
        assert chance_right(sure) > 0.99 > torn
