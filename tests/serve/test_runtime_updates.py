"""Experts come and go while a server runs: by vLLM's endpoints, without a wrong or lost answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tessellm
from tessellm.checkpoint import changes
from tessellm.members import MemberSpec
from tessellm.routing import calibrated, router
from tessellm.routing.calibration import calibration_prompts
from tessellm.text.answering import LEAST

from clients import with_client
from conftest import save_lora
from servers import PATIENCE, Running, serving

pytestmark = pytest.mark.xdist_group("serve")
TEXTS = ("abc", "what is 2+2?", "hello", "xyz")
UPDATES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="module")
def made(chatting: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A routed composition of one and two, and a folder with adapters of its base: three and four."""
    home = tmp_path_factory.mktemp("updates")
    with pytest.MonkeyPatch.context() as patch:
        few = [text for text in calibration_prompts() if len(text) < 60][:40]
        patch.setattr(calibrated, "calibration_prompts", lambda: few)
        model = tessellm.compose(**chatting, rule="mixture")
    model.save_pretrained(home / "out")
    for seed, name in enumerate(("three", "four")):
        save_lora(Path(chatting["base"]), home / name, seed)
    return model, home


@pytest.fixture
def running(made: tuple[Any, Path], tmp_path: Path) -> Iterator[Running]:
    options = ("--slots", "4", "--context", "256")
    with serving(made[1] / "out", tmp_path / "log.txt", *options, env=UPDATES) as started:
        yield started


def load(running: Running, name: str, path: Path | str, **options: Any) -> httpx.Response:
    return running.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **options})


def unload(running: Running, name: str) -> httpx.Response:
    return running.post("/v1/unload_lora_adapter", json={"lora_name": name})


def ask(running: Running, text: str, model: str = "out", **options: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    return running.post("/v1/chat/completions", json=body | options)


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def names(running: Running) -> list[str]:
    return [each["id"] for each in running.get("/v1/models").json()["data"]]


def test_an_adapter_is_loaded_answers_and_is_unloaded(running: Running, made: tuple[Any, Path]) -> None:
    before = [text_of(ask(running, text)) for text in TEXTS]
    answer = load(running, "three", made[1] / "three")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'three' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")
    assert names(running) == ["out", "base", "one", "two", "three"]
    card = running.get("/v1/models/three").json()
    assert (card["root"], card["parent"]) == (str(made[1] / "three"), "base")
    expected = changes.with_expert(made[0], MemberSpec(str(made[1] / "three")), "three")
    for text in TEXTS:
        found, route = ask(running, text), expected.route(text)
        assert found.headers["x-tessellm-route"] == route.selected
        told = found.json()["choices"][0]["tessellm"]["route"]["prior"]
        assert told == pytest.approx({name: share for name, share in route.prior.items() if share >= LEAST}, abs=1e-3)
        assert ask(running, text, "three").headers["x-tessellm-route"] == "three"
    answer = unload(running, "three")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'three' removed successfully.")
    assert names(running) == ["out", "base", "one", "two"]
    assert ask(running, "abc", "three").status_code == 404
    assert [text_of(ask(running, text)) for text in TEXTS] == before


def test_what_vllm_refuses_is_refused_as_there(running: Running, made: tuple[Any, Path]) -> None:
    assert load(running, "three", made[1] / "three").status_code == 200
    first = text_of(ask(running, "abc", "three"))
    again = load(running, "three", made[1] / "four")
    assert again.status_code == 400
    assert "has already been loaded" in again.json()["error"]["message"]
    assert load(running, "three", made[1] / "four", load_inplace=True).status_code == 200
    assert names(running) == ["out", "base", "one", "two", "three"]
    assert text_of(ask(running, "abc", "three")) != first
    assert unload(running, "nobody").status_code == 404
    assert load(running, "five", made[1] / "nowhere").status_code == 404
    assert load(running, "five", made[1] / "out").status_code == 404
    assert load(running, "a b", made[1] / "four").status_code == 400
    assert load(running, "", made[1] / "four").status_code == 400
    assert load(running, "base", made[1] / "four").status_code == 400
    assert running.post("/v1/load_lora_adapter", json={"lora_name": "five"}).status_code == 400
    assert unload(running, "base").status_code == 404
    for name in ("one", "two"):
        assert unload(running, name).status_code == 200
    last = unload(running, "three")
    assert last.status_code == 400
    assert "the only expert" in last.json()["error"]["message"]
    assert names(running) == ["out", "base", "three"]


def test_damaged_adapters_change_nothing(running: Running, made: tuple[Any, Path], tmp_path: Path) -> None:
    adapter = save_lora(Path(made[0].loaded_members[0].source.path), tmp_path / "broken", 7)
    (adapter / "adapter_model.safetensors").write_bytes(b"no tensors")
    answer = load(running, "broken", adapter)
    assert answer.status_code == 400
    assert "broken" in answer.json()["error"]["message"]
    assert names(running) == ["out", "base", "one", "two"]
    assert ask(running, "abc").status_code == 200


def test_it_is_off_unless_allowed(made: tuple[Any, Path], tmp_path: Path) -> None:
    with serving(made[1] / "out", tmp_path / "log.txt", "--slots", "1", "--context", "64") as running:
        assert load(running, "three", made[1] / "three").status_code == 404
        assert unload(running, "one").status_code == 404


def test_only_the_new_expert_is_measured(made: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    counts, measure = [], router._measure

    def counting(base: Any, own: list[Any], *rest: Any) -> Any:
        counts.append(len(own))
        return measure(base, own, *rest)

    monkeypatch.setattr(router, "_measure", counting)
    few = [text for text in calibration_prompts() if len(text) < 60][:40]
    monkeypatch.setattr(calibrated, "calibration_prompts", lambda: few)
    monkeypatch.setenv("TESSELLM_CACHE", str(made[1] / "another cache"))
    larger = changes.with_expert(made[0], MemberSpec(str(made[1] / "three")), "three")
    changes.without_expert(larger, "three")
    assert counts == [1, 0]


def test_under_load_no_answer_is_wrong_or_lost(running: Running, made: tuple[Any, Path]) -> None:
    """Clients stream from members that stay, while others come and go; who streams from one that goes is answered."""
    alone = {
        (name, text): text_of(ask(running, text, name, max_tokens=24)) for name in ("one", "two") for text in TEXTS
    }
    load(running, "three", made[1] / "three")
    alone |= {("three", text): text_of(ask(running, text, "three", max_tokens=24)) for text in TEXTS}
    unload(running, "three")
    found: list[tuple[tuple[str, str], str]] = []
    refused: list[int] = []

    async def stream(client: httpx.AsyncClient, name: str, text: str) -> None:
        body = {"model": name, "messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0}
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            if answer.status_code == 404:
                refused.append(404)
                return
            assert answer.status_code == 200
            said = ""
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    said += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        assert line == "data: [DONE]" or said
        found.append(((name, text), said))

    async def keep_asking(client: httpx.AsyncClient, name: str, changing: asyncio.Task[None]) -> None:
        number = 0
        while not changing.done():
            await stream(client, name, TEXTS[number % len(TEXTS)])
            number += 1

    async def change(client: httpx.AsyncClient) -> None:
        for _ in range(4):
            body = {"lora_name": "three", "lora_path": str(made[1] / "three")}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
            asking = [asyncio.create_task(stream(client, "three", text)) for text in TEXTS]
            await asyncio.sleep(0.05)
            assert (await client.post("/v1/unload_lora_adapter", json=body)).status_code == 200
            await asyncio.gather(*asking)

    async def work(client: httpx.AsyncClient) -> None:
        changing = asyncio.create_task(change(client))
        await asyncio.gather(changing, *(keep_asking(client, name, changing) for name in ("one", "two") * 3))

    with_client(running, work)
    assert all(alone[asked] == said for asked, said in found)
    assert {name for (name, _), _ in found} == {"one", "two", "three"}
    running.wait_until_idle(PATIENCE)
    assert "Traceback" not in running.log.read_text()
