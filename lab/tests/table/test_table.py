"""The miniature of the table: its problems, what members read, how they are trained, and a run from texts to claims."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tessellm import compose
from tessellm.errors import TessellmError
from tessellm.evaluate.code_tasks import stop_texts
from tessellm.evaluate.tasks import gsm8k
from tessellm_lab.common.stacked import Shape, initialise, select
from tessellm_lab.common.steps import Steps
from tessellm_lab.table import experiment
from tessellm_lab.table.cells import Pooled, quality_claims, speed_claim
from tessellm_lab.table.functions import ENDINGS, OPERATIONS, write_function
from tessellm_lab.table.gold import Gold, gold_texts, misses, pieces
from tessellm_lab.table.members import (
    EXPERTS,
    Stage,
    adapter_config,
    adapter_tensors,
    expert_loss,
    initial_deltas,
    train_experts,
    with_deltas,
)
from tessellm_lab.table.models import COMPOSED, EQ2, LORA, llama
from tessellm_lab.table.plan import PLANS
from tessellm_lab.table.problems import KINDS, Level, part, problems
from tessellm_lab.table.scoring import score
from tessellm_lab.table.stories import write_story
from tessellm_lab.table.texts import CODE, MATH, READERS, both, write_text
from tessellm_lab.table.tokens import encode, library, make_tokenizer
from tessellm_lab.table.writing import STOPS, Sample

LEVEL = PLANS["full"].level
SMALL = Level(largest=9, events=(1, 1), operations=6, lines=(1, 1))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(LEVEL, 700, 600)


def test_worked_answers_are_right_and_numbers_stay_small() -> None:
    rng = random.Random(0)
    for _ in range(300):
        story = write_story(rng, LEVEL.largest, LEVEL.events)
        for step in story.steps:
            assert eval(f"{step.left} {step.sign} {step.right}") == step.result
            assert 0 < step.result <= LEVEL.largest
        assert str(story.steps[0].left) in story.text


def test_splits_never_share_a_skeleton() -> None:
    rng = random.Random(0)
    parts = {write_function(rng, 20, (1, 3)).skeleton: "" for _ in range(500)}
    parts = {skeleton: part(skeleton) for skeleton in parts}
    assert set(parts.values()) == {"test", "development", "training"}
    for kind in KINDS:
        test, development = (problems(kind, 20, LEVEL, 0, split) for split in ("test", "development"))
        assert len({problem.prompt for problem in test}) == 20
        assert not {problem.gold for problem in test} & {problem.gold for problem in development}
        assert test != problems(kind, 20, LEVEL, 1)
    asked = [problem for kind in KINDS for problem in problems(kind, 10, LEVEL, 0)]
    for reader in READERS:
        for _ in range(100):
            written = "".join(text for text, _ in write_text(rng, LEVEL, reader))
            assert not any(problem.prompt in written for problem in asked)


def asked_body(prompt: str) -> str:
    """The body that a docstring asks for, read off its sentences."""
    told, lines = prompt.split(" has now. ")[1].removesuffix('"""\n'), []
    while told:
        (found,) = [(a, each.line) for each in (*OPERATIONS, *ENDINGS) for a in each.asked if told.startswith(a)]
        lines.append(f"    {found[1]}")
        told = told.removeprefix(found[0]).strip()
    return "\n".join(lines)


def test_nobody_reads_a_function_with_both_halves_right() -> None:
    for skill in (MATH, CODE):
        rng, sums_right, bodies_right = random.Random(0), 0, 0
        for _ in range(60):
            prompt, steps, body = (text for text, _ in both(rng, LEVEL, skill))
            *sums, number = [line.removeprefix("    # ").split(" = ") for line in steps.splitlines()]
            sums_right += all(eval(left.replace("/", "//")) == int(result) for left, result in sums)
            bodies_right += body == asked_body(prompt)
            assert number == ["    n", sums[-1][1]]
        assert (sums_right == 60) == (skill == MATH)
        assert (bodies_right == 60) == (skill == CODE)
        assert min(sums_right, bodies_right) <= 3  # what an unlearned hand hits by chance


def test_tokens_of_pieces_are_those_of_the_whole(tokenizer: Any) -> None:
    rng = random.Random(0)
    for reader in READERS:
        for _ in range(60):
            written = write_text(rng, LEVEL, reader)
            text, (ids, owners) = "".join(piece for piece, _ in written), encode(tokenizer, written)
            assert [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] == ids
            assert tokenizer.decode(ids[:-1]) == text
            assert len(owners) == len(ids)
    for problem in problems("mixed", 5, LEVEL, 0):
        assert "".join(text for text, _ in pieces(problem)) == problem.gold
        prompt = tokenizer(problem.prompt)["input_ids"]
        assert tokenizer(problem.prompt + problem.gold)["input_ids"][: len(prompt)] == prompt


def test_texts_do_not_depend_on_the_number_of_processes(tokenizer: Any) -> None:
    one, two = (library(tokenizer, SMALL, 20, processes=processes) for processes in (1, 2))
    for reader, texts in one.items():
        assert torch.equal(texts.tokens_NT, two[reader].tokens_NT)
        assert torch.equal(texts.owner_NT, two[reader].owner_NT)
        assert texts.length_N == sorted(texts.length_N)
        for row, length in zip(texts.tokens_NT, texts.length_N, strict=True):
            assert row[length - 1] == tokenizer.eos_token_id
            assert "</s>" not in tokenizer.decode(row[: length - 1])


def members(tokenizer: Any) -> tuple[Shape, dict[str, torch.Tensor], torch.Generator]:
    shape, generator = Shape(len(tokenizer), 32, 2, 2, 256), torch.Generator().manual_seed(0)
    return shape, initialise(shape, 1, generator), generator


def test_an_expert_that_is_the_base_pays_for_its_own_tokens_alone(tokenizer: Any) -> None:
    shape, base, _ = members(tokenizer)
    twice = select(base, [0, 0])
    tokens = torch.randint(len(tokenizer), (2, 3, 8))
    owner = torch.tensor([[[0, 0, 1, 1, 2, 2, 0, -1]] * 3] * 2)
    nll = expert_loss(twice, twice, shape, tokens, owner, torch.float32)
    other = {name: p + 0.1 * torch.randn(p.shape) for name, p in twice.items()}
    assert (expert_loss(other, twice, shape, tokens, torch.zeros_like(owner), torch.float32) > 0).all()
    assert (expert_loss(twice, twice, shape, tokens, torch.zeros_like(owner), torch.float32).abs() < 1e-5).all()
    assert (nll > 1).all()  # an untrained model's surprise
    alone = [expert_loss(twice, twice, shape, tokens, (owner == n) * owner, torch.float32)[n - 1] for n in (1, 2)]
    torch.testing.assert_close(nll, torch.stack(alone))


def test_lora_experts_are_adapters_that_the_project_loads(tokenizer: Any, tmp_path: Path) -> None:
    shape, base, generator = members(tokenizer)
    texts = library(tokenizer, SMALL, 60)
    deltas = train_experts(base, shape, texts, Stage(4, 4, 1e-2, 60.0), generator, Steps("", 4, print), rank=3)
    assert set(deltas) == set(initial_deltas(select(base, [0, 0]), shape, 3, generator))
    plain = llama(base, shape, 0, tokenizer, "cpu")
    plain.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for number, name in enumerate(EXPERTS):
        (tmp_path / name).mkdir()
        save_file(adapter_tensors(deltas, shape, number), tmp_path / name / "adapter_model.safetensors")
        config = json.dumps(adapter_config(3, str(tmp_path / "base")))
        (tmp_path / name / "adapter_config.json").write_text(config)
    model = compose(tmp_path / "base", {name: tmp_path / name for name in EXPERTS})
    whole = with_deltas(select(base, [0, 0]), deltas)
    ids = torch.randint(len(tokenizer), (2, 9))
    for number, name in enumerate(EXPERTS):
        expected = llama(whole, shape, number, tokenizer, "cpu")(ids).logits
        torch.testing.assert_close(model.member(name)(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert (expected - plain(ids).logits).abs().max() > 1e-3


def test_misses_are_where_greedy_decoding_differs(tokenizer: Any) -> None:
    shape, base, _ = members(tokenizer)
    model: Any = llama({name: 4 * p for name, p in base.items()}, shape, 0, tokenizer, "cpu")
    prompt = torch.randint(1, len(tokenizer), (2, 5))
    written = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=None)
    gold = Gold(written, torch.zeros_like(written), torch.arange(11).expand(2, -1) >= 5)
    wrong, logp = misses([model], gold, lambda logp_MBTV, some: logp_MBTV[0])
    assert not wrong.any()
    assert (logp[:, :5] == 0).all()
    changed = written.clone()
    changed[1, 7] = (changed[1, 7] + 1) % len(tokenizer)
    wrong, _ = misses([model], gold._replace(tokens_BT=changed), lambda logp_MBTV, some: logp_MBTV[0])
    assert wrong[1, 7]
    assert not wrong[0].any()


def test_gold_texts_say_whose_token_it_is(tokenizer: Any) -> None:
    asked = problems("mixed", 2, LEVEL, 0)
    gold = gold_texts(tokenizer, asked, "cpu")
    for row, problem in enumerate(asked):
        ids = gold.tokens_BT[row][gold.written_BT[row]].tolist()
        assert tokenizer.decode(ids[:-1]) == problem.gold
        assert ids[-1] == tokenizer.eos_token_id
        math = gold.tokens_BT[row][(gold.owner_BT[row] == MATH)].tolist()
        assert tokenizer.decode(math) == problem.gold[: problem.gold.index("\n", problem.gold.index("    n =")) + 1]


def test_stop_texts_are_those_of_the_judges() -> None:
    assert set(STOPS["math"]) == set(gsm8k()["generation_kwargs"]["until"])
    assert set(STOPS["code"]) == set(STOPS["mixed"]) == set(stop_texts("humaneval"))


def test_the_real_judges_tell_right_from_wrong() -> None:
    asked = {kind: problems(kind, 3, LEVEL, 0) for kind in KINDS}
    samples = [
        Sample(0, column, kind, number, some[(number + shift) % 3].gold, 1, "stop")
        for kind, some in asked.items()
        for number in range(3)
        for shift, column in enumerate(("right", "another's"))
    ]
    found = score(asked, samples, workers=1)
    assert all(found[kind, "right"] == [1.0] * 3 for kind in KINDS)
    assert sum(sum(found[kind, "another's"]) for kind in KINDS) <= 1
    with pytest.raises(TessellmError, match="2 samples of 3"):
        score(asked, [sample for sample in samples if sample.number])


TINY = replace(
    PLANS["cpu"], level=SMALL, width=32, heads=1, texts=60, base=Stage(2, 4, 1e-3, 60.0),
    experts=Stage(2, 4, 1e-3, 60.0), lora=Stage(2, 4, 1e-3, 60.0), rank=2, seeds=2, problems=2, development=1,
    new_tokens=6, slots=2, loops=2,
)  # fmt: skip


def test_a_run_that_was_stopped_goes_on_and_gives_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(experiment.PLANS, "cpu", TINY)
    made: list[int] = []
    make = experiment.make

    def once(plan: Any, seed: int, *rest: Any) -> Any:
        if made and seed != made[-1]:
            made.append(seed)
            raise KeyboardInterrupt
        made.append(seed)
        return make(plan, seed, *rest)

    monkeypatch.setattr(experiment, "make", once)
    with pytest.raises(KeyboardInterrupt) as stop:
        experiment.run(0, tmp_path, "cpu", lambda text: None)
    assert f"is kept in {tmp_path / 'table'}:" in stop.value.__notes__[0]
    assert not (tmp_path / "table.json").exists()
    first = experiment.run(0, tmp_path, "cpu", lambda text: None)
    assert made == [0, 1, 1]
    again = experiment.run(0, tmp_path, "cpu", lambda text: None)
    assert made == [0, 1, 1]
    assert again["tables"]["cells"] == first["tables"]["cells"]
    assert set(first["tables"]["cells"]) == set(KINDS)
    assert COMPOSED in first["tables"]["cells"]["mixed"]
    assert (tmp_path / "table.png").is_file()
    stored = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert [claim["id"] for claim in stored["claims"]][-1] == "speed"


COLUMNS = ("base", *EXPERTS, COMPOSED, EQ2, "linear", "task-arithmetic", "ties", "dare", "slerp")
COLUMNS += tuple(LORA + name for name in (*EXPERTS, COMPOSED))


def test_claims_hold_only_where_the_scores_say_so() -> None:
    names = list(COLUMNS)
    bad, good = [0.0] * 60, [1.0] * 60
    scores = {kind: dict.fromkeys(names, bad) for kind in KINDS}
    for kind in KINDS:
        scores[kind] = {**scores[kind], COMPOSED: good, LORA + COMPOSED: good}
    found = Pooled(names, scores, 1, {}, {})
    assert all(claim.holds is not False for claim in quality_claims(found))
    rival = {kind: {**row, "ties": good, "math": good} for kind, row in scores.items()}
    held = {claim.id: claim.holds for claim in quality_claims(replace(found, scores=rival))}
    assert held["mixed-merges"] is False
    assert held["mixed-members"] is False
    pace = {EQ2: {"tokens": 100, "seconds": 1.0}, "a notebook's loop": {"tokens": 10, "seconds": 1.0}}
    assert speed_claim([{"pace": pace}], firm=True).value == pytest.approx(10)
