"""A user says who should have answered: what would change is shown, then saved with the composition."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tessellm
from tessellm import checkpoint
from tessellm.members import MemberSpec
from tessellm.routing.one_example import retention

from servers import Running, serving

pytestmark = pytest.mark.xdist_group("serve")
PROMPT = "what is 2+2?"
ROUNDING = 0.01  # of a prior, whose prompt may be read in other batches


@pytest.fixture(scope="module")
def saved(chatting: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A routed composition with an example of the expert one."""
    folder = tmp_path_factory.mktemp("examples") / "out"
    experts = {name: MemberSpec(source) for name, source in chatting["experts"].items()}
    experts["one"] = MemberSpec(chatting["experts"]["one"], examples=("abc",))
    tessellm.compose(chatting["base"], experts, rule="mixture").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, saved.parent / tmp_path.name))


@pytest.fixture
def running(folder: Path, tmp_path: Path) -> Iterator[Running]:
    with serving(folder, tmp_path / "log.txt", "--slots", "2", "--context", "256") as started:
        yield started


def say(running: Running, member: str, prompt: str = PROMPT, **options: Any) -> httpx.Response:
    return running.post("/v1/examples", json={"member": member, "prompt": prompt, **options})


def prior(running: Running, folder: Path, text: str = PROMPT) -> dict[str, float]:
    body = {"model": folder.name, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    route = running.post("/v1/chat/completions", json=body).json()["choices"][0]["tessellm"]["route"]
    found: dict[str, float] = route["prior"]
    return found


def composed_anew(chatting: dict[str, Any], member: str) -> Any:
    """The composition as if the example had been there from the beginning."""
    experts = {name: MemberSpec(source) for name, source in chatting["experts"].items()}
    told = {"one": ("abc",), "two": (), "base": ()}
    told[member] = (*told[member], PROMPT)
    experts = {name: MemberSpec(spec.source, examples=told[name] or None) for name, spec in experts.items()}
    base = MemberSpec(chatting["base"], examples=told["base"] or None)
    return tessellm.compose(base, experts, rule="mixture")


@pytest.mark.parametrize("member", ["two", "base"])
def test_an_example_is_shown_then_saved(running: Running, folder: Path, chatting: dict[str, Any], member: str) -> None:
    before, now, files = prior(running, folder), checkpoint.load(folder), {p.name for p in folder.iterdir()}
    config = (folder / "config.json").read_bytes()
    effect = say(running, member).json()
    assert effect["share_before"] == pytest.approx(before.get(member, 0.0), abs=ROUNDING)
    assert effect["own"]["before"] == now.route(PROMPT).selected
    assert (effect["others"], effect["saved"]) == (1, None)
    assert effect["retention_before"] == pytest.approx(retention(now.router))
    if member != "base":  # whose examples token vectors are fitted to when it is composed anew
        expected = composed_anew(chatting, member)
        assert effect["share_after"] == pytest.approx(expected.route(PROMPT).prior[member], abs=ROUNDING)
        assert effect["own"]["after"] == expected.route(PROMPT).selected
        assert effect["retention_after"] == pytest.approx(retention(expected.router), abs=0.01)
    assert prior(running, folder) == pytest.approx(before, abs=ROUNDING)
    assert (folder / "config.json").read_bytes() == config
    assert say(running, member, save=True).json() == {**effect, "saved": "the composition's folder"}
    again = checkpoint.load(folder)
    for found in (prior(running, folder), again.route(PROMPT).prior):
        assert found.get(member, 0.0) == pytest.approx(effect["share_after"], abs=ROUNDING)
    entries = {entry["name"]: entry.get("examples") for entry in again.config.members}
    assert entries == {"base": None, "one": ["abc"], "two": None} | {member: [PROMPT]}
    assert {p.name for p in folder.iterdir()} == files
    twice = say(running, member)
    assert twice.status_code == 400
    assert f"an example of {member} already" in twice.text


def test_what_cannot_be_an_example_is_refused(running: Running, folder: Path) -> None:
    before = (folder / "config.json").read_bytes()
    assert say(running, "three").status_code == 404
    assert say(running, "one", "").status_code == 400
    assert say(running, "one", " abc ").status_code == 400
    assert say(running, "one", "a" * 4001).status_code == 400
    assert say(running, "one", "a" * 3000, save=True).status_code == 400  # longer than the context
    assert running.post("/v1/examples", json={"member": "one"}).status_code == 400
    assert (folder / "config.json").read_bytes() == before


def test_a_folder_that_cannot_be_written_changes_nothing(running: Running, folder: Path) -> None:
    before = prior(running, folder)
    (folder / "config.json").write_text("{}")
    assert say(running, "two", save=True).status_code == 400
    assert prior(running, folder) == pytest.approx(before, abs=ROUNDING)


def test_clients_of_other_machines_save_nothing_unless_allowed(folder: Path, tmp_path: Path) -> None:
    options = ("--slots", "1", "--context", "256", "--host", "0.0.0.0")
    for number, (more, status) in enumerate((((), 403), (("--runtime-updates",), 200))):
        with serving(folder, tmp_path / f"{number}.txt", *options, *more) as running:
            assert say(running, "two").status_code == 200
            assert say(running, "two", save=True).status_code == status
