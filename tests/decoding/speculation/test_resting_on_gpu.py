"""Members that rest as on a GPU, without one: its lengths of drafts, its model of the cost, its captured passes."""

from __future__ import annotations

from typing import Any

import pytest

import tessellm
from resting_rules import Contrary
from tessellm.decoding.buffers import RowOrder
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation, who
from tessellm.decoding.speculation.costs import GPU, Costs
from tessellm.decoding.speculation.member_drafts import MemberDrafter

from conftest import build_model
from decoding_cases import prompts
from host_graphs import captured
from speculation_cases import agreeing, texts

NOBODY, BELIEF = Speculation("none"), Speculation("belief")


@pytest.fixture(autouse=True)
def _as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, prices and rows of a GPU."""
    monkeypatch.setattr(Speculation, "lengths", lambda self, on_cpu: GPU.lengths)
    monkeypatch.setattr(who, "CPU", GPU)
    monkeypatch.setattr(
        MemberDrafter, "_drafting", lambda self, rows: (self.work.slots.index_S[:rows], RowOrder.FIRST_SLOTS)
    )


def resting(model: Any, slots: int) -> Engine:
    engine = captured(Engine(model, slots, speculation=BELIEF))
    assert engine.speculator is not None
    engine.speculator.steps = engine.steps
    return engine


@pytest.mark.parametrize("slots", [1, 3])
def test_long_drafts_write_what_all_members_awake_write(slots: int) -> None:
    model, given = agreeing(1e-4, rule="belief"), prompts(4, 20)
    asked = [Sampling(70 + n, (0.0, 0.8)[n % 2], seed=n, ignore_end=True) for n in range(4)]
    engine = resting(model, slots)
    assert texts(engine.generate(given, asked)) == texts(Engine(model, 4, speculation=NOBODY).generate(given, asked))
    steps: Any = engine.steps
    verified = {key[2] for key in steps.graphs if key[0] == "verify"}
    assert verified == set(GPU.lengths)
    assert {key[2] for key in steps.graphs if key[0].startswith("draft")} == {1}
    assert engine.speculator is not None
    assert engine.speculator.accepted > 100


def test_no_draft_is_longer_than_the_kernels_take_with_all_rows_of_a_captured_pass() -> None:
    model, engine = agreeing(1e-4, rule="belief"), resting(agreeing(1e-4, rule="belief"), 9)
    steps: Any = engine.steps
    steps.few_shapes = True  # five texts run as nine rows
    given, asked = prompts(5, 20), Sampling(40, ignore_end=True)
    assert texts(engine.generate(given, asked)) == texts(Engine(model, 5, speculation=NOBODY).generate(given, asked))
    verified = {key[1:3] for key in steps.graphs if key[0] == "verify"}
    assert {rows for rows, _ in verified} >= {9}
    assert all(rows * (length + 1) <= GPU.most_rows for rows, length in verified)


@pytest.mark.parametrize("members", [3, 9])
def test_the_worst_case_by_the_model_of_the_cost(members: int) -> None:
    """Never more than 1.15 times the time of all awake, where every draft is wrong."""
    experts = {f"e{n}": build_model("llama", 5 + n) for n in range(1, members)}
    model = tessellm.compose(build_model("llama"), experts, rule=Contrary(members))
    engine, spent, costs = Engine(model, 1, speculation=BELIEF), [], Costs(GPU, members)
    speculator: Any = engine.speculator
    assert speculator.pace.costs == costs
    chosen = speculator.pace.choose
    speculator.pace.choose = lambda rows, rates: spent.append(chosen(rows, rates)) or spent[-1]
    (text,) = texts(engine.generate(prompts(1, 20), Sampling(96, ignore_end=True)))
    assert (
        text == texts(Engine(model, 1, speculation=NOBODY).generate(prompts(1, 20), Sampling(96, ignore_end=True)))[0]
    )
    time = sum(costs.block(1, length) if length else costs.step(1) for length in spent)
    assert speculator.accepted == 0 < speculator.drafted
    assert time / (95 * costs.step(1)) < 1.15


def test_members_rest_by_default_on_a_gpu() -> None:
    assert who.suggested(agreeing(rule="belief")) == BELIEF
    assert who.suggested(agreeing(rule="evidence")) == NOBODY
