"""Compositions by the rule `evidence`: found by entry point, run by the reference model, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.engine.engine import Engine
from tessellm.errors import EngineError, RecipeError
from tessellm.rules import ComposedRule, make_rule, tilt
from tessellm_lab.evidence import POLICIES, Evidence, Stopping

from families import composition, family, random_ids


def greedy_by_hand(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """No cache, no generate: the whole text again for every token."""
    finished = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(steps):
        token_B = model(ids, use_cache=False).logits[:, -1].argmax(-1).masked_fill(finished, 0)
        ids = torch.cat([ids, token_B[:, None]], 1)
        finished |= torch.isin(token_B, torch.tensor(model.config.eos_token_id))
        if finished.all():
            break
    return ids


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
def test_it_generates_as_it_scores_however_it_stops(policy: str) -> None:
    rule = {"name": "evidence", "window": 8, "termination": policy}
    model, ids = composition(family(["llama"] * 3), [1.0, 0.8], rule=rule), random_ids(2)
    expected = greedy_by_hand(model, ids, 20)
    given = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **given), expected)
    assert torch.equal(model.generate(ids, **given, prefill_chunk_size=7), expected)
    logits = model(expected, use_cache=False).logits
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones_like(logits[..., 0]), rtol=0, atol=1e-4)


def test_by_default_the_owner_stops() -> None:
    model = composition(family(["llama"] * 3), rule="evidence")
    assert isinstance(model.rule.rule, Stopping)
    assert (model.rule.rule.policy, model.config.rule) == ("owner", {"name": "evidence"})
    assert make_rule("evidence", termination="any").describe() == {"name": "evidence", "termination": "any"}


def test_weights_tilt_the_experts() -> None:
    logp = torch.randn(3, 2, 6, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tokens, mask = torch.randint(9, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    found = ComposedRule.make(Evidence(), (0.7, -0.3))(logp, tokens, mask, None)[0]
    assert torch.equal(found, Evidence()(tilt(logp, (0.7, -0.3)), tokens, mask, None)[0])


@torch.no_grad()
@pytest.mark.parametrize("before", [False, True], ids=["today", "before"])
def test_it_is_saved_and_loaded(before: bool, members_dir: Path, tmp_path: Path) -> None:
    """`before`: with the policy beside the rule, as it was written when the rule belonged to the library."""
    experts = {"math": members_dir / "math", "coding": members_dir / "coding"}
    rule = {"name": "evidence", "window": 8, "termination": "mean"}
    model = tessellm.compose(members_dir / "base", experts, rule=rule, weights={"math": 0.3})
    model.save_pretrained(tmp_path / "out")
    if before:
        config = json.loads((tmp_path / "out/config.json").read_text())
        config["termination"] = config["rule"].pop("termination")
        (tmp_path / "out/config.json").write_text(json.dumps(config))
    loaded, ids = tessellm.ComposedForCausalLM.from_pretrained(tmp_path / "out"), random_ids()
    assert loaded.config.rule == rule
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_traces_tell_whom_it_trusts() -> None:
    trace = tessellm.trace(composition(family(["llama"] * 3), rule="evidence"), random_ids())
    assert trace.trusted.shape == (*trace.tokens.shape, 3)


def test_engines_refuse_it(members_dir: Path) -> None:
    model = tessellm.compose(members_dir / "base", {"math": members_dir / "math"}, rule="evidence")
    with pytest.raises(EngineError, match="this composition has 'evidence'"):
        Engine(model)


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"window": True}, {"window": 10**12}, {"trust": -1}, {"termination": "x"}]
)
def test_parameters_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"must be|unknown termination policy 'x'"):
        composition(family(["llama"] * 2), rule={"name": "evidence", **wrong})
