"""Peers' signals, against what the adapters themselves compute, and by hand."""

import pytest
import torch
from torch import tensor

from tessellm_lab.proving.decisions import Decision, cells, right_at, threshold_for
from tessellm_lab.proving.ground import Ground
from tessellm_lab.proving.peers import arrow, centroids, logo, semantic_router, seqr, spectr
from tessellm_lab.proving.reading import Reading
from tessellm_lab.proving.skills import Asked

from proving_cases import NAMES, small_places

A, B = "a", "b"


def reading(last: list[list[float]], mean: list[list[float]], first: list[list[float]]) -> Reading:
    return Reading([1], slice(0, 1), torch.zeros(1, 2), tensor(last), tensor(mean), tensor(first))


def test_norms_are_those_of_the_adapters_outputs(tmp_path) -> None:
    ground = Ground(small_places(tmp_path), NAMES, log=lambda text: None)
    row = ground.ids("list all files")
    found = ground.readings(tmp_path).of([row])[0]
    path = ground.adapted[0]
    number = next(k for k, name in enumerate(NAMES) if path in dict(ground.experts[name].named_modules()))
    layer = ground.experts[NAMES[number]].get_submodule(path)
    seen: list[torch.Tensor] = []
    tap = ground.base.model.get_submodule(path).register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        ground.base.model(input_ids=tensor([row]))
    tap.remove()
    delta_OI = layer.get_delta_weight(layer.active_adapters[0])
    norms_T = (seen[0][0] @ delta_OI.T).norm(dim=-1)
    assert torch.allclose(found.last_MK[0, number], norms_T[-1], rtol=1e-3)
    assert torch.allclose(found.mean_MK[0, number], norms_T.mean(), rtol=1e-3)
    right_I = torch.linalg.svd(delta_OI)[2][0]
    assert torch.allclose(found.first_MK[0, number], (seen[0][0] @ right_I).abs().mean(), rtol=1e-3)


def test_the_nearest_utterances_and_the_centres_choose() -> None:
    prompts = tensor([[1.0, 0.0], [0.0, 1.0]])
    utterances = {A: tensor([[1.0, 0.0], [0.6, 0.8]]), B: tensor([[0.0, 1.0]])}
    assert [d.chosen for d in semantic_router((A, B), prompts, utterances)] == [A, B]
    assert [d.chosen for d in centroids((A, B), prompts, utterances)] == [A, B]


def test_raw_norms_prefer_the_strong_adapter_and_scaled_ones_do_not() -> None:
    nan = torch.nan
    strong = reading([[9.0, 1.0], [9.0, nan]], [[9.0, 2.0], [9.0, nan]], [[1.0, 2.0], [1.0, nan]])
    blocks = tensor([0, 1])
    assert logo((A, B), [strong], blocks)[0] == Decision(A, 9.0)
    assert spectr((A, B), [strong])[0].chosen == A
    usual = {A: [reading([], [[9.0, 0.0], [9.0, nan]], []), reading([], [[11.0, 0.0], [11.0, nan]], [])],
             B: [reading([], [[0.0, 1.0], [0.0, nan]], []), reading([], [[0.0, 2.0], [0.0, nan]], [])]}  # fmt: skip
    assert seqr((A, B), [strong], usual)[0].chosen == B
    assert arrow((A, B), [strong])[0].chosen == B  # .73 of its one layer; a has .27 and 1 of two


def test_shares_are_taken_where_ordinary_prompts_stay_with_the_base() -> None:
    plain = [Asked("plain", "base", (("user", "hi"),))] * 20
    seen = [Asked("seen", A, (("user", "do a"),))] * 4
    scores = [float(n) for n in range(20)]
    decisions = [Decision(A, score, "base") for score in scores]
    decisions += [Decision(A, 50.0, A), Decision(B, 50.0, B), Decision(A, 1.0, "base"), Decision(A, 30.0, "base")]
    threshold = threshold_for(decisions, [*plain, *seen])
    assert sum(right_at(d, a, threshold) for d, a in zip(decisions[:20], plain, strict=True)) >= 19
    found = cells(decisions, [*plain, *seen])["cells"]
    assert found["seen"]["share"] == 0.5
    assert found["seen"]["closed"] == 0.75
    assert found["seen"]["shipped"] == 0.25
    assert found["seen"]["low"] <= 0.5 <= found["seen"]["high"]


@pytest.mark.parametrize("score", [float("-inf"), -1.0])
def test_what_has_no_score_stays_with_the_base(score: float) -> None:
    asked = Asked("plain", "base", (("user", "hi"),))
    assert right_at(Decision(A, score), asked, threshold_for([Decision(A, score)], [asked]))
