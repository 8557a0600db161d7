"""The server on a real model under real load: streaming clients for minutes, a third of which hang up, beside idle
connections and odd requests; then SIGTERM in the middle of it.

    python benchmarks/serve_load.py --minutes 10 [--model FOLDER]

Every finished text must be the one that the server writes alone. Writes results/serve-load.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx
from tessellm.model.usual import PROMPTS

from odd_requests import odd_requests
from reference_overhead import RESULTS
from serve_latency import resident_mib
from tessellm.serve.freed_memory import EVERY
from tessellm_lab.common.claims import Claim, Result, at_least, at_most

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from servers import Running, serving

EXPERTS = ("math", "bash", "sql")
NEW, ASKED = 16, PROMPTS[:16]
CLIENTS, IDLE, ODD, ODD_AT_ONCE = 50, 1000, 2000, 16
OPTIONS = ("--slots", "8", "--context", "512", "--drain-timeout", "600")


@dataclass
class Seen:
    """What the clients saw."""

    finished: list[tuple[int, str]] = field(default_factory=list)  # prompt and text
    hung_up: int = 0
    failed: list[str] = field(default_factory=list)
    odd: Counter[int] = field(default_factory=Counter)
    opened: int = 0  # idle connections, those in place of dropped ones too
    most_idle: int = 0
    memory: list[int] = field(default_factory=list)  # MiB

    def others(self, alone: list[str]) -> int:
        return sum(text != alone[number] for number, text in self.finished)


async def ask(client: httpx.AsyncClient, model: str, number: int, leave_after: int | None = None) -> str | None:
    """The streamed text; None where the client hung up after so many pieces."""
    asked = {"model": model, "messages": [{"role": "user", "content": ASKED[number]}], "max_tokens": NEW}
    text, pieces = "", 0
    body = {**asked, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if pieces == leave_after:
                return None
            if line == "data: [DONE]":
                return text
            if line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
                pieces += 1
    raise AssertionError("the stream was cut off")


async def streaming(client: httpx.AsyncClient, model: str, seen: Seen, first: int, until: float) -> None:
    """One client, which asks again when it is done; every third time it hangs up in the middle."""
    turn = first
    while time.monotonic() < until:
        leave_after = turn % 7 if turn % 3 == 0 else None
        try:
            text = await ask(client, model, turn % len(ASKED), leave_after)
        except Exception as error:
            seen.failed.append(repr(error)[:300])
            await asyncio.sleep(1)
        else:
            seen.hung_up += text is None
            seen.finished += [] if text is None else [(turn % len(ASKED), text)]
        turn += CLIENTS + 1  # not a multiple of three: everybody hangs up at times


async def idle(host: str, port: int, seen: Seen, until: float) -> None:
    """A connection that asks once and then says nothing; when it is dropped, another."""
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            seen.failed.append(f"idle: {error!r}")
            await asyncio.sleep(1)
            continue
        seen.opened += 1
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        try:
            async with asyncio.timeout(max(0.1, until - time.monotonic())):
                while await reader.read(4096):
                    pass
        except (TimeoutError, OSError):
            pass
        writer.close()


async def odd(client: httpx.AsyncClient, requests: Any, seen: Seen) -> None:
    for path, body in requests:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        seen.odd[answer.status_code] += 1


def client_of(running: Running, kept: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept)
    return httpx.AsyncClient(base_url=running.url, timeout=900, limits=limits)


async def load(running: Running, model: str, seconds: float, seen: Seen, odd_ones: int) -> None:
    until, requests = time.monotonic() + seconds, islice(odd_requests(model, 0), odd_ones)
    host, _, port = running.url.removeprefix("http://").partition(":")
    async with client_of(running, CLIENTS) as client:
        await asyncio.gather(
            *(idle(host, int(port), seen, until) for _ in range(IDLE)),
            *(streaming(client, model, seen, number, until) for number in range(CLIENTS)),
            *(odd(client, requests, seen) for _ in range(ODD_AT_ONCE)),
            watch(running, seen, until),
        )


async def watch(running: Running, seen: Seen, until: float) -> None:
    """How many descriptors the server's process has open, at most, and its memory every half minute."""
    for turn in count():
        descriptors = os.listdir(f"/proc/{running.process.pid}/fd")
        seen.most_idle = max(seen.most_idle, len(descriptors))
        if turn % 6 == 0:
            seen.memory.append(round(resident_mib(running.process.pid)))
        if time.monotonic() > until:
            return
        await asyncio.sleep(5)


async def drain(running: Running, model: str, seen: Seen) -> dict[str, Any]:
    """Ask with all clients, tell the server to end once all slots are taken, and wait for the answers."""
    async with client_of(running, CLIENTS) as client:
        asked = [asyncio.create_task(ask(client, model, number % len(ASKED))) for number in range(CLIENTS)]
        used, all_of_them, since = 0.0, running.metric("tessellm_slots"), time.monotonic()
        while used < all_of_them and time.monotonic() - since < 60:
            await asyncio.sleep(0.2)
            used = max(used, running.metric("tessellm_slots_used"))
        running.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        for number, each in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
            if isinstance(each, str):
                seen.finished.append((number % len(ASKED), each))
            else:
                seen.failed.append(f"drain: {each!r}"[:300])
    code = await asyncio.to_thread(running.process.wait, 60)
    return {"slots_used": used, "seconds": round(time.monotonic() - began, 1), "exit_code": code}


def idle_mib(running: Running) -> float:
    """The server's memory once it has nothing to do, and has had the time to give back what it does not use."""
    running.wait_until_idle(900)
    time.sleep(2 * EVERY)
    return resident_mib(running.process.pid)


def measure(folder: Path, home: Path, seconds: float) -> dict[str, Any]:
    with serving(folder, home / "log.txt", *OPTIONS) as running:
        model = running.get("/v1/models").json()["data"][0]["id"]
        slots = running.metric("tessellm_slots")

        async def one_by_one() -> list[str]:
            async with client_of(running, 1) as client:
                return [str(await ask(client, model, number)) for number in range(len(ASKED))]

        alone = asyncio.run(one_by_one())
        warm = Seen()
        asyncio.run(load(running, model, 10.0, warm, 0))  # what is allocated once, for batches
        before, seen = idle_mib(running), Seen()
        asyncio.run(load(running, model, seconds, seen, ODD))
        after, ended = idle_mib(running), Seen()
        drained = asyncio.run(drain(running, model, ended))
    tail = (home / "log.txt").read_text(errors="replace")
    return {
        "answers": len(seen.finished),
        "hung_up": seen.hung_up,
        "other_texts": seen.others(alone) + warm.others(alone) + ended.others(alone),
        "failed": seen.failed + ended.failed,
        "odd": {str(status): times for status, times in sorted(seen.odd.items())},
        "idle": {"opened": seen.opened, "descriptors_at_most": seen.most_idle},
        "memory_mib": round(before, 1),
        "memory_every_half_minute_mib": seen.memory,
        "memory_growth_mib": round(after - before, 1),
        "slots": slots,
        "drain": {**drained, "answers": len(ended.finished)},
        "tracebacks": tail.count("Traceback"),
        "log_lines": tail.count("\n"),
    }


def claims_of(found: dict[str, Any], minutes: float) -> list[Claim]:
    what, drained = (
        f"{CLIENTS} streaming clients for {minutes:g} minutes, a third of the answers cut off",
        found["drain"],
    )
    server_errors = sum(times for status, times in found["odd"].items() if int(status) >= 500)
    growth = round(found["memory_growth_mib"] / found["memory_mib"], 4)
    descriptors = found["idle"]["descriptors_at_most"]
    return [
        Claim("answers", f"{what}: whole answers", found["answers"]),
        at_most("same-text", f"{what}: answers with another text than alone", found["other_texts"], 0),
        at_most("failed", f"{what}: answers that failed", len(found["failed"]), 0),
        at_most("memory", f"{what}: share of its memory that the process grew by", growth, 0.05),
        at_least("idle", "descriptors of the server at most, idle connections among them", descriptors, IDLE),
        at_least("odd", "odd requests beside it", sum(found["odd"].values()), ODD),
        at_most("server-errors", "of these, answered by 5xx", server_errors, 0),
        at_least("slots", "slots in use afterwards, under full load", drained["slots_used"], found["slots"]),
        at_least("drained", f"of {CLIENTS} answers under way at SIGTERM: finished", drained["answers"], CLIENTS),
        at_most("exit", "exit code of the server", drained["exit_code"], 0),
    ]  # fmt: skip


def composed(home: Path) -> Path:
    import tessellm

    adapters = Path(__file__).resolve().parent.parent / "adapters" / "smollm2"
    model = tessellm.compose("smollm2", {name: str(adapters / name) for name in EXPERTS})
    model.save_pretrained(home / "smollm2-experts")
    return home / "smollm2-experts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", type=Path, help="a composition; without it, SmolLM2 with three experts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    start, others = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        found = measure(given.model or composed(home), home, 60 * given.minutes)
    machine = {"cores": os.cpu_count(), "load_average_before": others, "load_average_after": os.getloadavg()[0]}
    claims = claims_of(found, given.minutes)
    seconds = round(time.perf_counter() - start, 1)
    Result("serve-load", claims, 0, "cpu", seconds, tables={"load": found, "machine": machine}).write(given.out)
    for claim in claims:
        print(json.dumps({key: value for key, value in asdict(claim).items() if key != "id"}, ensure_ascii=False))


if __name__ == "__main__":
    main()
