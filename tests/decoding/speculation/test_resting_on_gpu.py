"""Members that rest as on a GPU, without one: its lengths of drafts, its model of the cost, its captured passes."""

from __future__ import annotations

from typing import Any, cast

import pytest

import tessellm
from resting_rules import Contrary
from tessellm.decoding.buffers import RowOrder
from tessellm.decoding.engine import Engine
from tessellm.decoding.preparation import prepare
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation, who
from tessellm.decoding.speculation.costs import GPU, Costs
from tessellm.decoding.speculation.member_drafts import MemberDrafter

from conftest import build_model, perturbed
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


def drafting_passes(engine: Engine) -> list[str]:
    """The passes that write and verify drafts from now on."""
    steps, names = engine.steps, []
    run = steps.run
    steps.run = lambda name, *given: names.append(name) or run(name, *given)  # type: ignore[method-assign,func-returns-value]
    return names


def test_members_go_on_while_the_host_reads_what_came() -> None:
    """Behind a verification that is not the last, a draft's token is sent before its results are waited for; it is the
    next draft's first, so that no more tokens are drafted than without."""
    model, given = agreeing(0.0, rule="belief"), prompts(1, 20)
    engine = resting(model, 1)
    engine.generate(given, Sampling(8, ignore_end=True))  # captures
    names, waited = drafting_passes(engine), []
    steps: Any = engine.steps
    get = steps.get

    def noted(buffer: Any) -> Any:
        came = get(buffer)
        return lambda: waited.append(len(names)) or came()

    steps.get = noted
    speculator: Any = engine.speculator
    speculator.drafted = speculator.accepted = 0
    (text,) = engine.generate(given, Sampling(70, ignore_end=True))
    assert len(text.tokens) == 70
    verified = [n for n, name in enumerate(names, 1) if name == "verify"]
    assert len(verified) >= 3
    assert [after for after in waited if after in verified] == [verified[-1]]  # nothing goes on behind the last
    assert {names[after - 1] for after in waited[1:-1]} == {f"draft by {speculator.drafter.writer[0]}"}
    assert sum(name != "verify" for name in names) == speculator.drafted == speculator.accepted


@pytest.mark.parametrize("apart", [1e-4, 0.01, 0.1])
def test_drafts_that_go_on_change_no_text(apart: float) -> None:
    """Texts of many lengths come and go beside one another, some of their drafts fall, others are believed."""
    model, given = agreeing(apart, rule="belief"), prompts(9, 20)
    asked = [Sampling(20 + 7 * n, (0.0, 0.8)[n % 2], seed=n, ignore_end=n % 3 > 0) for n in range(9)]
    engine = resting(model, 3)
    taken_up: list[int] = []
    speculator: Any = engine.speculator
    take_up = speculator.drafter._take_up

    def noted(places: Any) -> Any:
        kept = take_up(places)
        taken_up.append(len(kept))
        return kept

    speculator.drafter._take_up = noted
    assert texts(engine.generate(given, asked)) == texts(Engine(model, 4, speculation=NOBODY).generate(given, asked))
    assert sum(taken_up) > 0


@pytest.mark.parametrize("members", [3, 9])
def test_the_worst_case_with_tokens_begun_in_vain(members: int) -> None:
    """The same bound where passes are captured, and members go on before they are heard to be wrong."""
    experts = {f"e{n}": build_model("llama", 5 + n) for n in range(1, members)}
    model = tessellm.compose(build_model("llama"), experts, rule=Contrary(members))
    engine, costs, asked = resting(model, 1), Costs(GPU, members), Sampling(96, ignore_end=True)
    engine.generate(prompts(1, 20), asked)
    names, steps = drafting_passes(engine), []
    decode = engine.steps.decode
    engine.steps.decode = lambda *given: steps.append(1) or decode(*given)  # type: ignore[func-returns-value]
    lengths: list[int] = []
    speculator: Any = engine.speculator
    run = speculator._run
    speculator._run = lambda in_slot, length, *given: lengths.append(length) or run(in_slot, length, *given)
    (text,) = texts(engine.generate(prompts(1, 20), asked))
    assert text == texts(Engine(model, 1, speculation=NOBODY).generate(prompts(1, 20), asked))[0]
    drafted = [name for name in names if name != "verify"]
    in_vain = len(drafted) - sum(lengths)
    assert sum(lengths) > 0 <= in_vain
    assert in_vain > 0 or members == 3  # of three, another is often the same
    time = sum(costs.block(1, length) for length in lengths if length) + len(steps) * costs.step(1)
    time += in_vain * costs.draft(1)
    assert time / (95 * costs.step(1)) < 1.15


def test_few_sizes_of_drafts_are_prepared_and_do_for_all() -> None:
    base = build_model("llama", eos_token_id=None, max_position_embeddings=1024)
    model = tessellm.compose(base, {f"e{i}": perturbed(base, i, 1e-4) for i in range(2)}, rule="belief")
    engine = captured(Engine(model, 2, 1024, speculation=BELIEF))
    speculator, steps = cast(Any, engine.speculator), cast(Any, engine.steps)
    speculator.steps = steps
    for place in range(3):
        speculator.drafter.by(place)  # as on a GPU
    prepared = prepare(engine)
    assert {key[3] for key in steps.graphs if key[0] == "verify"} == {256, 1024}
    given = [(text * 40)[:length] for text, length in zip(prompts(4, 20), (20, 230, 300, 40), strict=True)]
    asked = [Sampling(60, (0.0, 0.8)[n % 2], seed=n) for n in range(4)]
    found = engine.generate(given, asked)
    assert speculator.accepted > 20
    assert prepared.late == 0
    assert texts(found) == texts(Engine(model, 2, 1024, speculation=NOBODY).generate(given, asked))
