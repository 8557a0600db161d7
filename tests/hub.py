"""A hub on this machine, for HF_ENDPOINT: folders as repositories, some gated, some private, some cut short."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"


@contextmanager
def serve(
    repositories: dict[str, Path], gated: set[str] = frozenset(), private: set[str] = frozenset()
) -> Iterator[str]:  # type: ignore[assignment]
    """Serve folders under their hub ids; yields the endpoint. `gated` and `private` ones ask for TOKEN."""

    class Handler(_Handler):
        folders, behind_gate, hidden = repositories, gated, private

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    folders: dict[str, Path]
    behind_gate: set[str]
    hidden: set[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        parts = path.removeprefix("api/models/").split("/")
        hub_id, rest = "/".join(parts[:2]), parts[2:]
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if hub_id not in self.folders or (hub_id in self.hidden and not allowed):
            return self._fail(401, "RepoNotFound")
        if path.startswith("api/models/"):
            return self._describe(hub_id, rest)
        if hub_id in self.behind_gate and not allowed:
            return self._fail(403, "GatedRepo")
        return self._send_file(self.folders[hub_id] / "/".join(rest[2:]))

    def _describe(self, hub_id: str, rest: list[str]) -> None:
        if rest and rest[1] not in ("main", COMMIT):
            return self._fail(404, "RevisionNotFound")
        files = [file for file in sorted(self.folders[hub_id].rglob("*")) if file.is_file()]
        names = [file.relative_to(self.folders[hub_id]).as_posix() for file in files]
        if rest and rest[0] == "tree":
            return self._send_json(
                [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)}
                    for name, file in zip(names, files, strict=True)
                ]
            )
        return self._send_json({"id": hub_id, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})

    def _send_file(self, file: Path) -> None:
        if not file.is_file():
            return self._fail(404, "EntryNotFound")
        return self._send(200, file.read_bytes(), {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
