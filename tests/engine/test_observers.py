"""Observers see the rows that tokens were chosen from, of all members if they want to, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from routing_cases import route_of, routed, wrong_places
from tessellm.engine import observing
from tessellm.engine.engine import Engine
from tessellm.engine.requests import Request
from tessellm.engine.sampling import Sampling
from tessellm.rules import Explanation

from captured_steps import over_slots
from decoding_cases import composition, prompts


def observer(logp_MB1V: Tensor, token_B1: Tensor, composed_B1V: Tensor, why: Explanation) -> dict[str, Tensor]:
    said_MB = logp_MB1V.gather(-1, token_B1[None, ..., None].expand(len(logp_MB1V), -1, 1, 1))[:, :, 0, 0]
    best_B, share_BM = composed_B1V[:, 0].amax(-1), why.share_BTM[:, 0]
    return {"token": token_B1[:, 0], "best": best_B, "members": said_MB.T, "share": share_BM}


@pytest.mark.parametrize("on_slots", [False, True])
@pytest.mark.parametrize("rule", ["mixture", "product"])
def test_rows_that_tokens_were_chosen_from(rule: str, on_slots: bool, tmp_path: Path) -> None:
    model = composition("adapters", tmp_path, rule=rule)
    if rule == "mixture":
        routed(model)
    engine = Engine(model, slots=3)
    if on_slots:
        over_slots(engine)
    texts = prompts(6, seed=11)
    asked = [
        engine.submit(text, Sampling(8), None, observer if n % 2 else None, n != 3) for n, text in enumerate(texts)
    ]
    while engine.busy:
        engine.step()
    assert [bool(r.seen) for r in asked] == [False, True] * 3
    for n, request in enumerate(asked[1::2]):
        assert request.components is not None
        everyone = n != 1 or on_slots
        members = [0, 1, 2] if everyone else list(request.components.members)
        text = torch.tensor([request.prompt + request.tokens])
        with torch.no_grad():
            logp_MTV = model(text, use_cache=False, output_member_logprobs=True).member_logprobs[:, 0]
        rows_MTV = logp_MTV[members, len(request.prompt) - 1 : -1]
        at_MT1 = torch.tensor(request.tokens)[None, :, None].expand(len(members), -1, 1)
        found = torch.tensor([view["members"] for view in request.seen])
        torch.testing.assert_close(found, rows_MTV.gather(-1, at_MT1)[..., 0].T, atol=1e-4, rtol=0)
        assert [view["token"] for view in request.seen] == request.tokens
        best, share = ([view[name] for view in request.seen] for name in ("best", "share"))
        assert best == pytest.approx(request.logprobs, abs=1e-5)
        assert [sum(row) for row in share] == pytest.approx([1.0] * len(share), abs=1e-4)
        if rule == "mixture":
            assert not wrong_places(model, request, route_of(model, request.prompt))


def test_nobody_is_told_why_who_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To say why costs as much as the rule itself, or more."""
    told: list[Request] = []
    explain: Any = observing.explain
    monkeypatch.setattr(
        observing, "explain", lambda request, *given: (told.append(request), explain(request, *given))[1]
    )
    engine = Engine(composition("llama", tmp_path), slots=2)
    plain = engine.generate(prompts(3, 20), Sampling(5, ignore_end=True))
    assert not told
    seen = engine.submit(plain[0].prompt, Sampling(5, ignore_end=True), observer=lambda *given: None)
    while engine.busy:
        engine.step()
    assert told == [seen] * 5
    assert seen.tokens == plain[0].tokens
