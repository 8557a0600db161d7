"""Real answers as they were recorded, and the rule that replays them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from resting_gpu import by_passes, full_members, prompts, random_base, replaying, run
from resting_rules import Replayed
from resting_traces import Trace, rates, read_traces, write_traces
from tessellm.decoding.engine import Engine
from tessellm.decoding.speculation import Speculation

ROOT = Path(__file__).resolve().parent.parent.parent
TRACE = Trace("math", [0, 1, 1, 1, 1, 1], [0, 1, 3, 3, 3, 3], [[0], [0, 1], [1], [2], [1], [0, 1, 2]])


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    write_traces([TRACE, TRACE], ["base", "a", "b"], tmp_path / "traces.json")
    assert read_traces(tmp_path / "traces.json") == [TRACE, TRACE]


def test_what_is_kept_is_of_every_kind() -> None:
    kept = read_traces()
    assert {trace.kind for trace in kept} == {"math", "bash", "intents", "sql", "code", "base"}
    assert sum(len(trace.right) for trace in kept) > 300


def test_drafts_stand_up_to_the_first_token_that_the_writer_would_not_write() -> None:
    assert TRACE.accepted(1, 3) == 1  # the base, believed in the first row, would not have written the third token
    assert TRACE.accepted(2, 3) == 1
    assert TRACE.accepted(4, 31) == 2
    assert rates([TRACE], 3) == {"accepted": pytest.approx(3 / 8), "tokens a block": pytest.approx(5 / 3)}


def test_a_replayed_answer_believes_and_says_what_was_recorded() -> None:
    model = full_members(random_base("gemma-tiny", "cpu", torch.float32), 3)
    with pytest.raises(ValueError, match="cannot be replayed"):
        Replayed([TRACE], 3, 128, "cpu")
    said = Trace("math", [0, 1, 1, 1, 1, 1], [0, 1, 3, 3, 3, 3], [[0], [0, 1], [1], [1, 2], [1], [0, 1, 2]])
    rule = Replayed([said], 3, 128, "cpu")
    model.set_rule(rule)
    rows = prompts(model, [0])
    texts = {}
    for who in ("none", "belief"):
        engine = Engine(model, 1, 200, speculation=Speculation(who))
        texts[who] = run(engine, rows, 24)[1]
    assert texts["none"] == texts["belief"]
    assert texts["none"] == [rows[0][-1:] * 24]
    state = rule.begun(torch.zeros(3, 1, 1, model.config.vocab_size))
    believed = []
    for row in range(1, 128 + 12):
        state = state._replace(rows_B=torch.tensor([row]))
        believed.append([int(each) for each in rule.believed_members(state)])
    assert believed[127:139] == [[0, 0], [1, 1], [1, 3], [1, 3], [1, 3], [1, 3]] * 2


def test_who_is_believed_follows_the_prompt() -> None:
    model = replaying(full_members(random_base("gemma-tiny", "cpu", torch.float32), 9))
    engine = Engine(model, 3, 200, speculation=Speculation("belief"))
    kinds = model.rule.rule.kinds  # type: ignore[attr-defined]
    run(engine, prompts(model, [kinds.index(kind) for kind in ("sql", "math", "base")]), 12)
    speculator = engine.speculator
    assert speculator is not None
    assert set(speculator.drafter._by_place) == {4, 1, 0}  # type: ignore[attr-defined]
    assert speculator.accepted == speculator.drafted > 0


def test_time_a_token_by_passes() -> None:
    passes = {"decode 1 256": 4.5, "verify 1 3": 5.0, "draft by 0 1 1": 1.5, "draft by 1 1 1": 1.6}
    assert by_passes(passes) == {"1 × 3": pytest.approx((3 * 1.6 + 5) / 4, abs=1e-3)}


def test_the_page_shows_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("generate_resting", ROOT / "docs" / "generate_resting.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    kept = json.loads(pages.RESULT.read_text())
    text = pages.PAGE.read_text(encoding="utf-8")
    assert pages.page(text, kept) == text, "run python docs/generate_resting.py"
    assert "Not measured yet" in pages.page(text, None)
    drafts = {"accepted": 1.0, "drafted": 1200, "ms": 2.0}
    tables = {"one": {"ms": 1.6}, "three": {"awake": {"ms": 4.5}, "resting": drafts, "same": 1.0}}
    claims = [{"statement": "fast", "value": 2.0, "target": "≤ 2.2", "holds": True}]
    block = pages.page(text, {"hardware": "a GPU", "commit": "0" * 40, "tables": tables, "claims": claims})
    assert "| three | 4.50 | 2.00 | 2.25 | 100.0% of 1,200 | 100% |" in block
    assert "| fast | 2 | ≤ 2.2 | yes |" in block
