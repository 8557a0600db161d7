"""Who may ask, how much, and what leaves the server: against real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tessellm.serve.guard import _host

from servers import Running, serving

SMALL = {"model": "tiny", "prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def locked(composed: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("log") / "locked.txt"
    with serving(composed[1], log, "--slots", "2", env={"TESSELLM_API_KEY": "sésame"}) as running:
        yield running


def test_a_key_is_needed_where_there_is_something_to_see(locked: Running) -> None:
    assert [httpx.get(f"{locked.url}{path}").status_code for path in ("/health", "/ready")] == [200, 200]
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
        answer = httpx.get(f"{locked.url}{path}")
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for wrong in ("Bearer", "Bearer sesame", "sésame", "Basic sésame", "Bearer sésamee"):
        headers = {b"authorization": wrong.encode()}
        assert httpx.post(f"{locked.url}/v1/completions", json=SMALL, headers=headers).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        locked.client("other").models.list()
    headers = {b"authorization": "Bearer sésame".encode()}
    assert httpx.post(f"{locked.url}/v1/completions", json=SMALL, headers=headers).status_code == 200


def test_prompts_are_not_logged(locked: Running) -> None:
    headers = {b"authorization": "Bearer sésame".encode()}
    asked = {**SMALL, "prompt": "secretword 12345"}
    assert httpx.post(f"{locked.url}/v1/completions", json=asked, headers=headers).status_code == 200
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
            answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
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
    {"n": True},
]
MALFORMED = [b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"model": 1e999}']
MALFORMED += [b'{"seed": ' + b"9" * 5000 + b"}", *(json.dumps({**SMALL, **change}).encode() for change in CHANGES)]


@pytest.mark.parametrize("body", MALFORMED, ids=[str(body[:30]) for body in MALFORMED])
def test_malformed_bodies_are_refused(server: Running, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_only_json_is_read(server: Running) -> None:
    """A form on another site could send anything else without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        content = json.dumps(SMALL).encode()
        answer = httpx.post(f"{server.url}/v1/completions", content=content, headers={"content-type": kind})
        assert answer.status_code == 400, kind


def test_browsers_are_kept_in_check(server: Running) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        answer = httpx.get(f"{server.url}{path}", headers={"origin": "https://elsewhere.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
    asks = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    assert httpx.options(f"{server.url}/v1/completions", headers=asks).status_code == 405
    answer = httpx.get(f"{server.url}/v1/models", headers={"host": "rebound.example"})
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize(
    ("header", "host"),
    [("localhost:8000", "localhost"), ("127.0.0.1", "127.0.0.1"), ("[::1]:80", "::1"), ("a.b:1:2", "a.b:1"), ("", "")],
)
def test_hosts(header: str, host: str) -> None:
    assert _host(header.encode()) == host


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/v1/models/..%2f..%2fx"]
)
def test_no_path_reaches_the_file_system(server: Running, path: str) -> None:
    assert httpx.get(f"{server.url}{path}").status_code == 404
    asked = {**SMALL, "model": path}
    assert httpx.post(f"{server.url}/v1/completions", json=asked).status_code == 404


def test_a_taken_port_is_told_before_anything_is_loaded(cli: Any, server: Running, composed: tuple[Any, Path]) -> None:
    port = server.url.rpartition(":")[2]
    ran = cli("serve", composed[1], "--port", port)
    assert ran.code == 2
    assert "cannot listen" in ran.err
    assert "--port" in ran.err


def test_bad_options_are_refused(cli: Any, composed: tuple[Any, Path]) -> None:
    for options, message in {
        ("--", "--tensor-parallel-size", "2"): "--engine vllm",
        ("--timeout", "0"): "positive",
        ("--api-key", " "): "empty",
    }.items():
        ran = cli("serve", composed[1], "--port", "0", *options)
        assert ran.code == 2
        assert message in ran.err
