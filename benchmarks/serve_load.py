"""The server on a real model under real load: streaming clients for minutes, a third of which hang up, beside idle
connections and odd requests, while an expert is loaded and unloaded; then SIGTERM in the middle of it.

    python benchmarks/serve_load.py --minutes 10 [--clients 50 --idle 1000 --odd 2000] [--model FOLDER]

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
from dataclasses import asdict, dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx

from odd_requests import odd_requests
from reference_overhead import RESULTS
from serve_latency import resident_mib
from tessellm.routing.calibration import calibration_prompts
from tessellm.serve.freed_memory import EVERY
from tessellm_lab.common.claims import Claim, Result, at_least, at_most

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from servers import Running, serving

ADAPTERS = Path(__file__).resolve().parent.parent / "adapters" / "smollm2"
EXPERTS, COMES_AND_GOES = ("math", "bash", "sql"), "intents"
SKILLS = (  # a prompt of each expert, beside ordinary ones
    "A baker makes 12 rolls an hour for 5 hours and sells 47 of them. How many are left?",
    "Write a bash command for this: Find all SUID set files",
    "Write a SQL query for the table games (date, opponent, record): What was the record on july 28 ?",
)
NEW, ASKED = 16, [*SKILLS, *(text for text in calibration_prompts() if len(text) < 60)][:16]
ODD_AT_ONCE = 16
OPTIONS = ("--slots", "8", "--context", "512", "--drain-timeout", "600", "--runtime-updates")


@dataclass(frozen=True)
class Load:
    """How much there is of everything."""

    minutes: float
    clients: int
    idle: int
    odd: int


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
    changes: list[int] = field(default_factory=list)  # statuses of loading and unloading
    gone: list[str] = field(default_factory=list)  # what the expert that comes and goes wrote, by its name

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


async def streaming(client: httpx.AsyncClient, model: str, seen: Seen, first: int, clients: int, until: float) -> None:
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
        turn += clients + 1  # not a multiple of three: everybody hangs up at times


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


async def changing(client: httpx.AsyncClient, seen: Seen, until: float) -> None:
    """Load an expert, ask it for a text, unload it while it writes; again and again."""
    body = {"lora_name": COMES_AND_GOES, "lora_path": str(ADAPTERS / COMES_AND_GOES)}
    while time.monotonic() < until:
        seen.changes.append((await client.post("/v1/load_lora_adapter", json=body)).status_code)
        asking = asyncio.create_task(ask(client, COMES_AND_GOES, 0))
        await asyncio.sleep(0.5)
        seen.changes.append((await client.post("/v1/unload_lora_adapter", json=body)).status_code)
        try:
            seen.gone.append(str(await asking))
        except Exception as error:
            seen.failed.append(f"{COMES_AND_GOES}: {error!r}"[:300])


def client_of(running: Running, kept: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept)
    return httpx.AsyncClient(base_url=running.url, timeout=900, limits=limits)


async def put(running: Running, model: str, much: Load, seen: Seen) -> None:
    """Put load on a server."""
    until, requests = time.monotonic() + 60 * much.minutes, islice(odd_requests(model, 0), much.odd)
    host, _, port = running.url.removeprefix("http://").partition(":")
    async with client_of(running, much.clients) as client:
        await asyncio.gather(
            *(idle(host, int(port), seen, until) for _ in range(much.idle)),
            *(streaming(client, model, seen, number, much.clients, until) for number in range(much.clients)),
            *(odd(client, requests, seen) for _ in range(ODD_AT_ONCE)),
            changing(client, seen, until),
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


async def drain(running: Running, model: str, clients: int, seen: Seen) -> dict[str, Any]:
    """Ask with all clients, tell the server to end once all slots are taken, and wait for the answers."""
    async with client_of(running, clients) as client:
        asked = [asyncio.create_task(ask(client, model, number % len(ASKED))) for number in range(clients)]
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


def measure(folder: Path, home: Path, much: Load) -> dict[str, Any]:
    with serving(folder, home / "log.txt", *OPTIONS) as running:
        model = running.get("/v1/models").json()["data"][0]["id"]
        slots = running.metric("tessellm_slots")

        async def one_by_one() -> list[str]:
            async with client_of(running, 1) as client:
                return [str(await ask(client, model, number)) for number in range(len(ASKED))]

        alone = asyncio.run(one_by_one())
        warm = Seen()
        asyncio.run(put(running, model, replace(much, minutes=0.1, odd=0), warm))  # what is allocated once
        before, seen = idle_mib(running), Seen()
        asyncio.run(put(running, model, much, seen))
        after, ended = idle_mib(running), Seen()
        drained = asyncio.run(drain(running, model, much.clients, ended))
    tail = (home / "log.txt").read_text(errors="replace")
    return {
        "answers": len(seen.finished),
        "hung_up": seen.hung_up,
        "other_texts": seen.others(alone) + warm.others(alone) + ended.others(alone),
        "failed": seen.failed + ended.failed,
        "changes": {str(status): times for status, times in sorted(Counter(seen.changes).items())},
        "answers_of_the_expert_that_went": len(seen.gone),
        "other_texts_of_it": len({*seen.gone, *warm.gone}) - 1,
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


def claims_of(found: dict[str, Any], much: Load) -> list[Claim]:
    what, drained = (
        f"{much.clients} streaming clients for {much.minutes:g} minutes, a third of the answers cut off",
        found["drain"],
    )
    server_errors = sum(times for status, times in found["odd"].items() if int(status) >= 500)
    growth = round(found["memory_growth_mib"] / found["memory_mib"], 4)
    changes = found["changes"].get("200", 0)
    descriptors = found["idle"]["descriptors_at_most"]
    return [
        Claim("answers", f"{what}: whole answers", found["answers"]),
        at_most("same-text", f"{what}: answers with another text than alone", found["other_texts"], 0),
        at_most("failed", f"{what}: answers that failed", len(found["failed"]), 0),
        at_most("memory", f"{what}: share of its memory that the process grew by", growth, 0.05),
        at_least("idle", "descriptors of the server at most, idle connections among them", descriptors, much.idle),
        at_least("odd", "odd requests beside it", sum(found["odd"].values()), much.odd),
        at_most("server-errors", "of these, answered by 5xx", server_errors, 0),
        at_least("changes", "an expert loaded and unloaded meanwhile, times", changes, 2),
        at_most("changes-failed", "of these, refused", sum(found["changes"].values()) - changes, 0),
        at_most("gone", "different texts of that expert, beyond one", found["other_texts_of_it"], 0),
        at_least("slots", "slots in use afterwards, under full load", drained["slots_used"], found["slots"]),
        at_least("drained", "answers under way at SIGTERM: finished", drained["answers"], much.clients),
        at_most("exit", "exit code of the server", drained["exit_code"], 0),
    ]  # fmt: skip


def composed(home: Path) -> Path:
    import tessellm

    model = tessellm.compose("smollm2", {name: str(ADAPTERS / name) for name in EXPERTS})
    model.save_pretrained(home / "smollm2-experts")
    return home / "smollm2-experts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--idle", type=int, default=1000, help="connections that ask once and then say nothing")
    parser.add_argument("--odd", type=int, default=2000, help="odd requests")
    parser.add_argument("--model", type=Path, help="a composition; without it, SmolLM2 with three experts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    start, others = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        much = Load(given.minutes, given.clients, given.idle, given.odd)
        found = measure(given.model or composed(home), home, much)
    machine = {"cores": os.cpu_count(), "load_average_before": others, "load_average_after": os.getloadavg()[0]}
    claims = claims_of(found, much)
    seconds = round(time.perf_counter() - start, 1)
    Result("serve-load", claims, 0, "cpu", seconds, tables={"load": found, "machine": machine}).write(given.out)
    for claim in claims:
        print(json.dumps({key: value for key, value in asdict(claim).items() if key != "id"}, ensure_ascii=False))


if __name__ == "__main__":
    main()
