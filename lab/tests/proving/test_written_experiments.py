"""The written and the two-skills experiments on a small ground: they run by one call, and compare like with like."""

import json

import pytest

from tessellm_lab.proving import two_skills, written
from tessellm_lab.proving.skills import Places
from tessellm_lab.proving.two_skills import Double, Part
from tessellm_lab.proving.writing import Answers, Job

from proving_cases import NAMES, small_places


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return small_places(tmp_path_factory.mktemp("ground"))


def test_answers_are_written_once_and_compared_with_the_right_experts(places: Places, tmp_path) -> None:
    plan = written.Plan(2, 3, sets={"three": NAMES})
    said: list[str] = []
    first = written.measure(places, plan, 0, tmp_path, "cpu", said.append)
    assert any("answers written" in line for line in said)
    again: list[str] = []
    second = written.measure(places, plan, 0, tmp_path, "cpu", again.append)
    assert not again
    assert json.dumps(first.tables) == json.dumps(second.tables)
    columns = first.tables["three"]["columns"]
    assert set(columns) == {written.COMPOSITION, written.OWN, written.PICK, written.BASE_COLUMN, "ties λ=1"}
    assert columns[written.BASE_COLUMN]["plain"]["share"] == 1.0
    assert columns[written.OWN]["seen"]["of"] == 2 * len(NAMES)
    assert first.write(tmp_path)["claims"]


def test_an_answer_that_one_member_writes_alone_is_what_it_writes_when_named(places: Places, tmp_path) -> None:
    model = written.compose_experts(places, NAMES)
    rows = [written.row_of(model, text) for text in ("list the files", "what is it", "next monday", "hi", "sort a.txt")]
    routed = Answers(model, "routed", tmp_path, lambda text: None).of([Job(row, 8) for row in rows])
    lone = [(row, answer) for row, answer in zip(rows, routed, strict=True) if len(answer.active) == 1]
    assert lone
    jobs = [Job(row, 8, () if answer.active == ("base",) else answer.active) for row, answer in lone]
    named = Answers(model, "named", tmp_path, lambda text: None).of(jobs)
    assert [answer.text for answer in named] == [answer.text for _, answer in lone]


def test_two_skills_are_scored_by_both_judges(places: Places, tmp_path) -> None:
    plan = two_skills.Plan(4, 2, NAMES, ("bash",))
    found = two_skills.measure(places, plan, 0, tmp_path, "cpu", lambda text: None)
    table = found.tables["two requests"]
    assert table["prompts"] == 4
    assert set(table["scores"]) == {two_skills.MIXTURE, two_skills.BETTER, two_skills.PRODUCT}
    assert found.tables["a request and a style"]["prompts"] == 2


def test_the_parts_of_an_answer_are_found_in_it() -> None:
    parts = (Part("bash", "list", "ls -l"), Part("clinc", "hi", "greeting"))
    asked = Double("two requests", "", parts)
    assert asked.score("ls -l\ngreeting") == 1.0
    assert asked.score("First:\ngreeting\nSecond:\nls -l") == 1.0
    assert asked.score("greeting") == 0.5
    styled = Double("a request and a style", "", (Part("bash", "list", "ls -l"), Part(two_skills.STYLE, "list", "")))
    assert styled.score("LS -L") == 1.0
    assert styled.score("ls -l") == 0.5


def test_pairs_are_of_test_prompts_and_the_same_for_one_seed() -> None:
    places = Places.found()
    names = ("bash", "clinc", "isodate", "sql")
    first = two_skills.two_requests(places, names, 25, 0)
    assert first == two_skills.two_requests(places, names, 25, 0)
    assert first != two_skills.two_requests(places, names, 25, 1)
    assert len({double.skills for double in first}) <= 3
    assert all(part.prompt in double.text for double in first for part in double.parts)
