"""The experiment on small adapters of a small base: columns, journal, tables, claims, pictures."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tessellm.errors import EngineError
from tessellm.evaluate.scoring import score
from tessellm.model.variants import alone, in_place_of_all, with_rule
from tessellm.rules import DEFAULT, RULES
from tessellm_lab.real import __main__ as program
from tessellm_lab.real import experiment, keep, measure, train
from tessellm_lab.real.columns import ROUTER, Column, own_columns, peer_columns, routes
from tessellm_lab.real.measure import Measuring, Task
from tessellm_lab.real.members import Experts, Places, load_base
from tessellm_lab.real.peers import METHODS, arrow, merged
from tessellm_lab.real.peft_files import read_facts
from tessellm_lab.real.plan import EQ2, PLANS, TWO
from tessellm_lab.real.reading import prompt_nats, read_alone, read_together
from tessellm_lab.real.results import OURS, claims_of
from tessellm_lab.real.shared import SharedJournal
from tessellm_lab.real.skills import SKILLS, read
from tessellm_lab.real.tasks import encode, function_prompt

from real_cases import write_base, write_data

SMALL = replace(
    PLANS["full"],
    read=2, write=2, others=None, develop=1, two=1, batch_size=2, numbers=1 << 16, timed=1, new_tokens=3,
    rules=(DEFAULT, EQ2, "mixture"), sets=("six", "math+capitals", TWO),
    merges=("task-arithmetic", "dare-ties"), strengths=(0.5, 1.0), writing=("sql", "code", "capitals"),
)  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Places:
    """Six adapters, those of another seed, one on all data and a blend, each trained for a few steps."""
    folder = tmp_path_factory.mktemp("real")
    data, base = write_data(folder / "data"), write_base(folder)
    given = ["--data", data, "--base", base, "--size", "cpu", "--rows", 2, "--out", folder / "trained", "--limit", 6]
    steps = [f"{name}=6" for name in (*SKILLS, "all", "blend-math")]
    skills = [*SKILLS, "all", "blend-math"]
    assert train.main([*map(str, given), "--seed", "0", "2", "--skills", *skills, "--steps", *steps]) == 0
    adapters = folder / "adapters"
    adapters.mkdir()
    for name in SKILLS:
        (adapters / name).symlink_to(folder / "trained" / f"{name}-0")
    return Places(data, adapters, folder / "trained", str(base))


@pytest.fixture(scope="module")
def experts(places) -> Experts:
    return Experts(load_base(places, "cpu"), {name: places.adapters / name for name in ("math", "sql", "capitals")})


def texts(experts, places, name="math"):
    return encode(experts.composed.tokenizer, read(places.data, name, "test"))


def test_adapters_share_the_tensors_of_one_base(experts):
    own = experts.composed.base.get_input_embeddings().weight
    assert all(member.get_input_embeddings().weight is own for member in experts.composed.members.values())


def test_reading_together_is_reading_each_alone(experts, places):
    rules = {rule: with_rule(experts.composed, rule).rule for rule in RULES if rule != "mixture"}  # it needs a router
    for numbers in (1, 1 << 20):  # one text at a time, all at once
        found = read_together(experts.composed, rules, texts(experts, places), numbers)
        for name in (*rules, *experts.composed.members):
            model = with_rule(experts.composed, name) if name in rules else alone(experts.composed, name)
            expected = read_alone(model, texts(experts, places), 2)
            assert found[name].tokens == expected.tokens
            assert found[name].nats == pytest.approx(expected.nats, abs=1e-3)


def members_of(experts):
    return [experts.composed.member(name) for name in experts.adapters]


def test_task_arithmetic_adds_the_adapters_deltas(experts):
    path = "model.layers.1.mlp.up_proj"
    found = merged(experts.base.model, members_of(experts), "task-arithmetic", 0.5).get_submodule(path).weight
    deltas = [member.get_submodule(path).get_delta_weight("default") for member in members_of(experts)]
    torch.testing.assert_close(found, experts.base.model.get_submodule(path).weight + 0.5 * sum(deltas))
    assert not torch.equal(found, experts.base.model.get_submodule(path).weight)


@pytest.mark.parametrize("method", list(METHODS))
def test_merges_are_plain_models_drawn_by_their_seed(experts, places, method):
    path = "model.layers.0.self_attn.k_proj"
    before = experts.base.model.get_submodule(path).weight.clone()
    found = [merged(experts.base.model, members_of(experts), method, 1.0, seed) for seed in (0, 0, 1)]
    first, second, other = (model.get_submodule(path).weight for model in found)
    assert torch.equal(first, second)
    assert torch.equal(first, other) == (method != "dare-ties")
    assert torch.equal(experts.base.model.get_submodule(path).weight, before)
    assert found[0].state_dict().keys() == experts.base.model.state_dict().keys()


def test_arrow_differs_from_base_and_experts_and_leaves_the_base_as_it_is(experts, places):
    before = read_alone(alone(experts.composed, "base"), texts(experts, places), 2)
    model = in_place_of_all(experts.composed, "arrow", arrow(experts.base.model, experts.adapters, 1))
    found = read_alone(model, texts(experts, places), 2)
    assert all(torch.tensor(found.nats).isfinite())
    for name in experts.composed.members:
        assert read_alone(alone(experts.composed, name), texts(experts, places), 2).nats != pytest.approx(found.nats)
    assert read_alone(alone(experts.composed, "base"), texts(experts, places), 2) == before


def test_the_router_takes_the_expert_that_finds_the_prompt_likeliest(experts, places, tmp_path):
    columns = own_columns(experts, SMALL)
    own = [column for column in columns if column.kind == "expert"]
    chosen = routes(own, texts(experts, places), 2)
    for place, text in enumerate(texts(experts, places)):
        nats = [prompt_nats(column.model, [text], 1)[0] for column in own]
        assert chosen[place] == nats.index(min(nats))
        (scored,) = score(own[0].model, [(text[0][:1], text[0][1:])])
        assert -scored.logprob == pytest.approx(nats[0])


def test_a_cell_is_measured_once_and_says_what_the_engine_wrote(experts, places, tmp_path):
    examples = read(places.data, "sql", "test", 2)
    task = Task("sql", examples, examples, 4)
    plan = replace(SMALL, merges=("task-arithmetic",), arrow=(1, 3))
    said: list[str] = []
    measuring = Measuring(SharedJournal(tmp_path / "journal.jsonl"), plan, said.append)
    tried: list[float] = []

    def tuned(models):
        tried.extend(models["task-arithmetic"])
        return dict.fromkeys(models, 0.5)

    columns = own_columns(experts, plan) + peer_columns(experts, plan, tuned)
    assert tried == [0.5, 1.0]
    found = measuring.read(columns, task)
    assert set(found) == {column.name for column in columns}
    written = {column.name: measuring.write(column, columns, [task])[0] for column in columns}
    picked = [column.name for column in columns if column.kind == "expert"]
    for place, text in enumerate(written[ROUTER]["texts"]):
        assert text in {written[name]["texts"][place] for name in picked}
    assert written["task-arithmetic λ=0.5"]["scores"]["right"]
    again = Measuring(SharedJournal(tmp_path / "journal.jsonl"), plan, said.append)
    before = len(said)
    assert again.read(columns, task) == found
    assert again.write(columns[0], columns, [task])[0]["texts"] == written["base"]["texts"]
    assert len(said) == before


@pytest.mark.parametrize("by_writing", [False, True])
def test_strengths_are_chosen_on_development_prompts(experts, places, tmp_path, by_writing):
    plan = replace(SMALL, develop_by_writing=by_writing)
    measuring = Measuring(SharedJournal(tmp_path / "j"), plan, lambda text: None)
    tasks = experiment.development(places.data, list(experts.adapters), plan)

    def made(strength):
        model = merged(experts.base.model, members_of(experts), "task-arithmetic", strength)
        return in_place_of_all(experts.composed, "merged", model)

    models = {strength: partial(made, strength) for strength in (0.5, 20.0)}
    (chosen,) = measuring.tune(list(experts.adapters), tasks, "x")({"task-arithmetic": models}).values()
    judged = [task for task in tasks if task.write or not by_writing]
    found = {
        strength: sum(measuring._develop(Column("m", "merge", strength, make), [task]) for task in judged)
        for strength, make in models.items()
    }
    assert found[chosen] == max(found.values())


def test_what_cannot_be_judged_here_is_kept_and_judged_elsewhere(experts, places, tmp_path, monkeypatch):
    problems = [function_prompt(problem) for problem in read(places.data, "humaneval", "test")]
    task, columns, said = Task("code", (), problems, 2), own_columns(experts, SMALL), []

    def refuse(programs):
        raise EngineError("this system refuses")

    with monkeypatch.context() as patched:
        patched.setattr(measure, "exit_codes", refuse)
        assert Measuring(SharedJournal(tmp_path / "j"), SMALL, said.append).write(columns[0], columns, [task]) == [None]
    assert "not judged: this system refuses" in said[-1]
    later = Measuring(SharedJournal(tmp_path / "j"), SMALL, said.append)
    monkeypatch.setattr(later, "produce", None)
    assert later.write(columns[0], columns, [task])[0]["scores"] == {"right": [0.0]}


def test_processes_share_a_journal_and_do_nothing_twice(tmp_path):
    ours, theirs = (SharedJournal(tmp_path / "journal.jsonl") for _ in range(2))
    tried, done = [], []

    def job(number):
        tried.append(number)
        measuring._once([f"cell{number}"], lambda: done.append(ours.add(f"cell{number}", value=number)))
        return measuring.journal[f"cell{number}"]["value"]

    measuring = Measuring(ours, SMALL, print)
    with theirs.taken(measure.key_of(["cell0"])) as mine:
        assert mine
        with pytest.raises(measure.BusyError):
            job(0)
        theirs.add("cell0", value=10)
        with ours.taken("other") as free:  # sees what was added meanwhile
            assert free
    assert measuring.each([partial(job, 0), partial(job, 1)]) == [10, 1]
    assert [entry["value"] for entry in done] == [1]
    theirs.refresh()
    assert len(theirs) == len(SharedJournal(tmp_path / "journal.jsonl")) == 2


@pytest.mark.slow
def test_all_of_it_at_a_small_size(places, tmp_path):
    said: list[str] = []
    run = experiment.Run(places, SMALL, 0, tmp_path, "full", "cpu")
    experiment.fill(run, 1)  # as a worker does
    result = experiment.measure(run, said.append)
    assert not any("wrote" in text or "read" in text for text in said)
    tables = result.write(tmp_path)["tables"]
    assert tuple(tables["sets"]) == SMALL.sets
    six = tables["sets"]["six"]
    assert set(six["tasks"]) == {*SKILLS, "plain"}
    assert {"base", OURS, "Eq. 2", ROUTER, "Arrow, top-k 1", "Arrow, top-k 3", "one LoRA on all data"} <= set(
        six["columns"]
    )
    assert {"nats", "nats low", "right", "prompts"} <= set(six["tasks"]["sql"][OURS])
    assert set(six["tasks"]["plain"][OURS]) == {"nats", "nats low", "nats high", "texts"}
    assert "one LoRA on the blend" in tables["sets"]["math+capitals"]["columns"]
    assert "mixture, capitals as style" in tables["sets"]["math+capitals"]["columns"]
    assert {"first", "second", "right"} <= set(tables["sets"]["two requests"]["tasks"]["sql then intents"][OURS])
    assert tables["costs"]["base"]["ms per token over the base's"] == 1
    assert tables["costs"][OURS]["bytes over the base's"] > 1
    assert tables["texts"]["six"]["sql"][0]["texts"][OURS] is not None
    assert {f"expert-{name}" for name in SKILLS} <= {claim.id for claim in result.claims}
    assert claims_of(json.loads((tmp_path / "real.json").read_text())["tables"], True) == list(result.claims)
    assert (tmp_path / "real.png").stat().st_size > 10_000
    journal = tmp_path / "real" / "full.jsonl"
    lines = journal.read_text().splitlines()
    assert tables["measured on"][0]["hardware"]
    again = experiment.measure(replace(run, frozen=True), said.append)
    assert journal.read_text().splitlines() == lines
    assert again.tables["sets"] == tables["sets"]
    journal.write_text(
        "\n".join(line for line in lines if any(key in line for key in ("nats", "scores", "measured_on"))) + "\n"
    )
    less = experiment.measure(replace(run, frozen=True), said.append)  # what was written is lost
    assert less.tables["costs"] == {}
    assert "right" not in less.tables["sets"]["six"]["tasks"]["sql"][OURS]


def test_the_program_takes_folders_sets_and_limits(places, tmp_path, capsys):
    given = ["--data", places.data, "--adapters", places.adapters, "--base", places.base, "--size", "cpu"]
    given += ["--out", tmp_path, "--limit", 1]
    assert program.main(list(map(str, [*given, "--sets", "six-other", "math+code"]))) == 0
    assert "six-other: left out" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "real.json").read_text())["tables"]["sets"]) == ["math+code"]
    assert program.main(list(map(str, [*given, "--sets", "sixes"]))) == 2
    assert "did you mean 'six'" in capsys.readouterr().err
    assert program.main([*map(str, given), "--trained", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err
    assert program.main([*map(str, given), "--frozen", "--out", str(tmp_path / "empty")]) == 2
    assert "expected a journal that says on what it was measured" in capsys.readouterr().err


def test_the_full_size_is_refused_without_a_gpu(cli, places, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name, value in (("DATA", places.data), ("ADAPTERS", places.adapters), ("BASE", places.base)):
        monkeypatch.setenv(f"TESSELLM_REAL_{name}", str(value))
    ran = cli("reproduce", "real", "--size", "full", "-o", tmp_path / "out")
    assert ran.code == 2
    assert "finds none here" in ran.err
    assert not Path(tmp_path / "out").exists()


def test_trained_adapters_are_kept_with_their_scores(places, tmp_path, capsys):
    cell = {"nats": 1.0, "texts": 3, "right": {"mean": 0.5}, "prompts": 4}
    tasks = {name: {name: cell, "base": {**cell, "right": {"mean": 0.125}}} for name in SKILLS}
    result = tmp_path / "real.json"
    result.write_text(json.dumps({"tables": {"sets": {"six": {"tasks": tasks}}}}))
    kept = tmp_path / "kept"
    kept.mkdir()
    given = ["--adapters", str(kept), "--result", str(result)]
    assert keep.main([*given, "--trained", str(places.trained), "--seed", "2"]) == 0
    assert read_facts(kept / "sql") == read_facts(places.trained / "sql-2")
    card = (kept / "sql" / "README.md").read_text()
    assert "0.500 (base 0.125)" in card
    (kept / "sql" / "README.md").write_text("old")
    assert keep.main(given) == 0
    assert (kept / "sql" / "README.md").read_text() == card
    result.write_text("{}")
    assert keep.main(given) == 2
    assert "damaged" in capsys.readouterr().err
    assert keep.main(["--adapters", str(kept), "--trained", str(tmp_path)]) == 2
    assert "no adapter in" in capsys.readouterr().err


def test_other_sets_are_measured_with_less():
    plan = PLANS["full"]
    assert plan.of_set("five") == plan
    twins, blend, two = (plan.of_set(name) for name in ("twins", "sql+capitals", TWO))
    assert (twins.write, twins.rules, twins.merges, twins.router) == (150, ("mixture",), (), False)
    assert (blend.rules, blend.arrow) == (("mixture", EQ2), ())
    assert (two.rules, two.merges, two.arrow) == (("mixture",), plan.merges, plan.arrow)
    assert plan.limited(5, None).of_set("twins").write == 5
    assert PLANS["cpu"].of_set("twins") == PLANS["cpu"]


def test_a_prompt_that_failed_is_no_wrong_answer(experts, places, tmp_path, monkeypatch):
    def write(self, asks):
        yield from ((number, measure.Written("", 0, "error", "memory ran out")) for number in range(len(asks)))

    monkeypatch.setattr(measure.BlockWriter, "write", write)
    measuring = Measuring(SharedJournal(tmp_path / "journal.jsonl"), SMALL, print)
    columns = own_columns(experts, SMALL)
    task = Task("sql", (), read(places.data, "sql", "test"), 3)
    with pytest.raises(EngineError, match="3 of 3 prompts failed, the first since memory ran out"):
        measuring.write(columns[0], columns, [task])
    assert not measuring.journal.entries
