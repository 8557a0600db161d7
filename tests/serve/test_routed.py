"""Answers say who wrote them, requests say who should, and an unknown name is never answered by anybody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tessellm
from tessellm.routing import calibrated
from tessellm.routing.calibration import calibration_prompts
from tessellm.text.answering import LEAST

from servers import Running, serving

pytestmark = pytest.mark.xdist_group("serve")
ASKED = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def model(chatting: dict[str, Any]) -> Any:
    """A routed composition of the experts one and two."""
    with pytest.MonkeyPatch.context() as patch:
        few = [text for text in calibration_prompts() if len(text) < 60][:40]
        patch.setattr(calibrated, "calibration_prompts", lambda: few)
        return tessellm.compose(**chatting, rule="mixture")


@pytest.fixture(scope="module")
def running(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("again")
    model.save_pretrained(home / "out")
    with serving(home / "out", home / "log.txt", "--slots", "4", "--context", "256") as started:
        yield started


def chat(running: Running, text: str, model: str = "out", **options: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **ASKED, **options}
    return running.post("/v1/chat/completions", json=body)


def route_of(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["choices"][0]["tessellm"]["route"]
    return found


@pytest.mark.parametrize("text", ["abc", "what is 2+2?", "hello"])
def test_an_answer_carries_its_route(running: Running, model: Any, text: str) -> None:
    expected = model.route(text)
    answer = chat(running, text)
    route = route_of(answer)
    assert answer.headers["x-tessellm-route"] == route["selected"] == expected.selected
    assert route["prior"] == pytest.approx(
        {n: share for n, share in expected.prior.items() if share >= LEAST}, abs=1e-3
    )
    assert route["threshold"] == pytest.approx(expected.threshold, abs=1e-3)
    assert set(route["active"]) == set(expected.active(model.rule.rule.alone, model.rule.rule.most))
    lines = chat(running, text, stream=True)
    assert lines.headers["x-tessellm-route"] == expected.selected
    pieces = [json.loads(line[6:]) for line in lines.text.split("\n\n") if line.startswith("data: {")]
    told = [piece["choices"][0].get("tessellm") for piece in pieces]
    again = told[0]["route"]
    assert {**again, "prior": 0, "score": 0} == {**route, "prior": 0, "score": 0}
    assert again["prior"] == pytest.approx(
        route["prior"], abs=0.01
    )  # a beginning that was read before rounds otherwise
    assert not any(told[1:])


@pytest.mark.parametrize("name", ["base", "one", "two"])
def test_a_member_answers_by_its_name(running: Running, name: str) -> None:
    answers = [
        chat(running, "abc", name),
        chat(running, "abc", f"out:{name}"),
        chat(running, "abc", tessellm={"experts": name}),
        chat(running, "abc", tessellm={"experts": name, "trace": True}),
    ]
    assert {answer.headers["x-tessellm-route"] for answer in answers} == {name}
    assert [route_of(answer) for answer in answers] == [{"selected": name, "active": [name]}] * 4
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1


def test_the_base_answers_by_the_name_of_its_files(running: Running, chatting: dict[str, Any]) -> None:
    assert chat(running, "abc", chatting["base"]).headers["x-tessellm-route"] == "base"


def test_weights_of_one_product(running: Running) -> None:
    one = chat(running, "abc", tessellm={"experts": {"one": 1}})
    assert one.headers["x-tessellm-route"] == "one"
    both = chat(running, "abc", tessellm={"experts": {"one": 0.7, "two": -0.2}})
    assert route_of(both) == {"selected": "mixed", "active": ["base", "one", "two"]}


def test_unknown_names_are_never_answered(running: Running) -> None:
    for wrong in (
        chat(running, "abc", "three"),
        chat(running, "abc", "out:three"),
        chat(running, "abc", tessellm={"experts": "three"}),
        chat(running, "abc", tessellm={"experts": {"three": 1}}),
        chat(running, "abc", tessellm={"experts": {"base": 1}}),
        running.get("/v1/models/three"),
    ):
        assert wrong.status_code == 404
        assert wrong.json()["error"]["code"] == "model_not_found"
    for wrong in (
        chat(running, "abc", "one", tessellm={"experts": "one"}),
        chat(running, "abc", tessellm={"experts": "one", "rule": "product"}),
        chat(running, "abc", tessellm={"experts": {"one": 1e9}}),
        chat(running, "abc", tessellm={"experts": {}}),
        chat(running, "abc", tessellm={"experts": ["one"]}),
    ):
        assert wrong.status_code == 400


def test_routes_are_counted_by_member(running: Running) -> None:
    before = running.metric('tessellm_routes_total{member="two"}')
    for _ in range(3):
        chat(running, "abc", "two")
    assert running.metric('tessellm_routes_total{member="two"}') == before + 3


def test_an_expert_of_the_compositions_name_has_another(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "one")
    with serving(tmp_path / "one", tmp_path / "log.txt", "--slots", "1", "--context", "64") as running:
        names = [each["id"] for each in running.get("/v1/models").json()["data"]]
        assert names == ["one", "base", "one:one", "two"]
        assert "prior" in route_of(chat(running, "abc", "one"))
        assert chat(running, "abc", "one:one").headers["x-tessellm-route"] == "one"
