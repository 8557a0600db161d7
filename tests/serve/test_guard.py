"""Who may ask, how much, and what leaves the server: against real processes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tessellm.serve.guard import _host
from tessellm.serve.settings import Settings

from servers import PATIENCE, Running, serving

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that servers are started once
SMALL = {"model": "tiny", "prompt": "a", "max_tokens": 2}


def test_a_key_is_needed_where_there_is_something_to_see(locked: Running) -> None:
    """The key has a letter that is no ASCII, and stands in the environment with a new line behind it."""
    with httpx.Client(base_url=locked.url, timeout=PATIENCE) as stranger:
        assert [stranger.get(path).status_code for path in ("/health", "/health/ready", "/", "/play.js")] == [200] * 4
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            answer = stranger.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer", "Bearer sesame", "sésame", "Basic sésame", "Bearer sésamee"):
            headers = {b"authorization": wrong.encode()}
            assert stranger.post("/v1/completions", json=SMALL, headers=headers).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        locked.client("other").models.list()
    assert locked.post("/v1/completions", json=SMALL).status_code == 200


def test_prompts_are_not_logged(locked: Running) -> None:
    assert locked.post("/v1/completions", json={**SMALL, "prompt": "secretword 12345"}).status_code == 200
    log = locked.log.read_text()
    assert "16 tokens read" in log
    assert "secretword" not in log
    assert "sésame" not in log


def test_bodies_have_a_limit(server: Running) -> None:
    large = json.dumps({**SMALL, "prompt": "a" * (2 << 20)}).encode()

    def in_parts() -> Iterator[bytes]:
        for start in range(0, len(large), 1 << 16):
            yield large[start : start + (1 << 16)]

    for content in (large, in_parts()):
        headers = {"content-type": "application/json"}
        try:
            answer = server.post("/v1/completions", content=content, headers=headers)
        except httpx.WriteError:
            continue  # it closed the connection on us
        assert answer.status_code == 413
        assert "1048576 bytes" in answer.json()["error"]["message"]


CHANGES: list[dict[str, Any]] = [
    {"prompt": "\ud800"},
    {"model": "\ud800"},
    {"prompt": [[]]},
    {"prompt": []},
    {"temperature": float("nan")},
    {"temperature": "0.5"},
    {"stream": "yes"},
    {"n": True},
    {"prompt": {}},
    {"prompt": [1, "a"]},
    {"stop": ["a"] * 17},
    {"prompt": [True] * 150_000},
    {f"k{number}": 1 for number in range(60_000)},
    {"tessellm": {"weights": {str(number): "x" for number in range(60_000)}}},
]
MALFORMED = [b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"model": 1e999}']
MALFORMED += [b'{"seed": ' + b"9" * 5000 + b"}", *(json.dumps({**SMALL, **change}).encode() for change in CHANGES)]


@pytest.mark.parametrize("body", MALFORMED, ids=[str(body[-40:]) for body in MALFORMED])
def test_malformed_bodies_are_refused(server: Running, body: bytes) -> None:
    answer = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_what_is_wrong_is_said_of_the_parameter(server: Running) -> None:
    """Whatever forms a value may have, the sentence is about the one that was meant."""
    for change, param, message in [
        ({"prompt": 5}, "prompt", "expected a text, token ids, or a list of either"),
        ({"prompt": [1, "a"]}, "prompt", "valid integer"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"tessellm": {"weights": {"math": "x"}}}, "tessellm.weights.math", "valid number"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "leave it out"),
        ({"temprature": 1}, "temprature", "there is no such parameter"),
        ({"prompt": "a" * 1_000_000}, "prompt", "at least 200000 tokens"),  # "<unk>" has five bytes
        ({"prompt": [5] * 100_000}, "prompt", "has 100000 tokens"),
    ]:
        error = server.post("/v1/completions", json={**SMALL, **change}).json()["error"]
        assert error["param"] == param
        assert message in error["message"]


@pytest.mark.parametrize("name", ["tools", "tool_choice", "functions", "function_call"])
def test_tools_are_refused_by_name(server: Running, name: str) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for value in ([{"type": "function", "function": {"name": "f"}}], "auto", {"type": "function"}, 5):
        answer = server.post("/v1/chat/completions", json={**chat, name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert "this server calls no tools" in answer.json()["error"]["message"]
    nothing = [] if name in ("tools", "functions") else "none"
    for value in (None, nothing):
        allowed = {**chat, name: value, "parallel_tool_calls": False}
        assert server.post("/v1/chat/completions", json=allowed).status_code == 200


def test_only_json_is_read(server: Running) -> None:
    """A form on another site could send anything else without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        content = json.dumps(SMALL).encode()
        answer = server.post("/v1/completions", content=content, headers={"content-type": kind})
        assert answer.status_code == 400, kind
        assert "Content-Type: application/json" in answer.json()["error"]["message"], kind


def test_browsers_are_kept_in_check(server: Running) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        answer = server.get(path, headers={"origin": "https://elsewhere.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
    asks = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    assert server.http.options("/v1/completions", headers=asks).status_code == 405
    answer = server.get("/v1/models", headers={"host": "rebound.example"})
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize(
    ("header", "host"),
    [("localhost:8000", "localhost"), ("127.0.0.1", "127.0.0.1"), ("[::1]:80", "::1"), ("a.b:1:2", "a.b:1"), ("", "")],
)
def test_hosts(header: str, host: str) -> None:
    assert _host(header.encode()) == host


def test_names_that_a_page_elsewhere_could_rebind_are_refused() -> None:
    own = socket.gethostname().lower()
    for host, allowed, refused in [
        ("127.0.0.1", ["localhost", "127.0.0.1", "::1"], ["rebound.example", "192.0.2.1", own + "x", ""]),
        ("127.0.0.2", ["localhost", "127.0.0.2"], ["rebound.example", "192.0.2.1"]),
        ("0.0.0.0", ["localhost", "192.0.2.1", "2001:db8::1", own, ""], ["rebound.example", "192.0.2.1.example"]),
        ("Box.example", ["box.example", "192.0.2.1"], ["rebound.example"]),
    ]:
        settings = Settings(host=host)
        assert settings.local == host.startswith("127.")
        assert [name for name in allowed if not settings.answers_to(name)] == []
        assert [name for name in refused if settings.answers_to(name)] == []
        assert Settings(host=host, allowed_hosts=("rebound.example",)).answers_to("rebound.example")
        assert Settings(host=host, allowed_hosts=("*",)).answers_to("anything.example")


def test_hosts_are_checked_wherever_it_listens(composed: tuple[Any, Path], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with serving(composed[1], log, "--host", "0.0.0.0", "--allowed-host", "proxy.example", "--slots", "1") as server:
        for host, status in {"rebound.example": 421, "proxy.example:80": 200, "192.0.2.1:8000": 200}.items():
            assert server.get("/v1/models", headers={"host": host}).status_code == status
        told = server.get("/health", headers={"host": "rebound.example"}).json()["error"]["message"]
        assert "--allowed-host" in told


def test_head_is_get_without_a_body(server: Running) -> None:
    for path, status in {
        "/health": 200,
        "/ready": 200,
        "/health/ready": 200,
        "/": 200,
        "/v1/models": 200,
        "/v1/completions": 405,
    }.items():
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (status, b"")


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/v1/models/..%2f..%2fx"]
)
def test_no_path_reaches_the_file_system(server: Running, path: str) -> None:
    assert server.get(f"{server.url}{path}").status_code == 404
    asked = {**SMALL, "model": path}
    assert server.post("/v1/completions", json=asked).status_code == 404


def test_a_taken_port_is_told_before_anything_is_loaded(cli: Any, server: Running, composed: tuple[Any, Path]) -> None:
    port = server.url.rpartition(":")[2]
    ran = cli("serve", composed[1], "--port", port)
    assert ran.code == 2
    assert "cannot listen" in ran.err
    assert "--port" in ran.err


def test_bad_options_are_refused(cli: Any, composed: tuple[Any, Path], tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").touch()
    for options, message in {
        ("--", "--tensor-parallel-size", "2"): "--engine vllm",
        ("--timeout", "0"): "positive",
        ("--timeout", "nan"): "positive",
        ("--api-key", " "): "empty",
        ("--api-key-file", tmp_path / "none"): "No such file",
        ("--api-key-file", tmp_path): "Is a directory",
        ("--api-key-file", tmp_path / "bytes"): "not UTF-8",
        ("--api-key-file", tmp_path / "empty"): "empty",
        ("--host", "192.0.2.1"): "cannot listen",
        ("--engine", "fast"): "plain",
    }.items():
        ran = cli("serve", composed[1], "--port", "0", *options)
        assert ran.code == 2, options
        assert message in ran.err


def test_an_empty_key_in_the_environment_lets_nobody_in_by_accident(
    cli: Any, composed: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("", " \n"):
        monkeypatch.setenv("TESSELLM_API_KEY", key)
        ran = cli("serve", composed[1], "--port", "0")
        assert (ran.code, "the API key is empty" in ran.err, "TESSELLM_API_KEY" in ran.err) == (2, True, True)


def test_a_wrong_model_is_told_in_a_sentence(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("base: [")
    for model in (tmp_path / "none", tmp_path, tmp_path / "recipe.yaml"):
        ran = cli("serve", model, "--port", "0")
        assert ran.code == 2, model
        assert "Traceback" not in ran.err
        assert str(model) in ran.err.replace("\n", "")


def test_long_names_are_not_sent_back(server: Running) -> None:
    long = "a" * 500_000
    for changed in ({"model": long}, {"tessellm": {"rule": long}}, {"tessellm": {"weights": {long: 1.0}}}, {long: 1}):
        answer = server.post("/v1/completions", json={**SMALL, **changed})
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 2000


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}", b"\x1f\x8b\x08"])
def test_bodies_that_cannot_be_read_say_what_was_expected(server: Running, body: bytes) -> None:
    answer = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, "Expected JSON in UTF-8" in answer.json()["error"]["message"]) == (400, True)
