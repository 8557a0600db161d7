"""A server with a tiny composition by `product`, what is asked of it, and its replies with all left out that differs
from run to run."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tessellm

from conftest import build_model, character_tokenizer, perturbed, save_member
from servers import Running, serving

KEY = "golden"
Exchange = dict[str, Any]
LATER = frozenset({"route", "root", "parent", "max_model_len"})  # said since the goldens were recorded
LEFT_OUT = frozenset({"created", "rules", "summaries", "resting", "belief"}) | LATER
COUNTED = re.compile(r"^(tessellm_(?:slots|queue|responses|tokens_total..kind=.prompt)\S*) (\S+)$", re.MULTILINE)
COMPLETION = {"model": "tiny", "prompt": "what is 2+2?", "max_tokens": 10, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "temperature": 0}
SAMPLED = {"temperature": 0.9, "seed": 3}


@contextmanager
def server(home: Path) -> Iterator[Running]:
    """Run `tessellm serve` on the composition that the exchanges are about."""
    base, tokenizer = build_model("llama", 3), character_tokenizer()
    members = {"base": base, "math": perturbed(base, 1), "coding": perturbed(base, 2, only="layers.1")}
    places = {name: str(save_member(member, home / name, tokenizer)) for name, member in members.items()}
    tessellm.compose(places.pop("base"), places, rule="product").save_pretrained(home / "tiny")
    with serving(home / "tiny", home / "log.txt", "--slots", "4", env={"TESSELLM_API_KEY": KEY}) as running:
        running.http.headers["authorization"] = f"Bearer {KEY}"
        yield running


def changed(exchanges: list[Exchange], changes: list[dict[str, Any]]) -> list[Exchange]:
    """Return exchanges with replies as they were changed on purpose since: each change says why and names either keys
    that are gone from all replies, or a request and a path into its reply with the value that is there now."""
    gone = {key for change in changes for key in change.get("gone", ())}
    exchanges = [{**each, "reply": _without(each["reply"], gone)} for each in copy.deepcopy(exchanges)]
    for change in (each for each in changes if "path" in each):
        *path, last = ("reply", *change["path"])
        place: Any = next(each for each in exchanges if {**each, "reply": 0} == {**change["request"], "reply": 0})
        for key in path:
            place = place[key]
        place[last] = change["value"]
    return exchanges


def _without(value: Any, gone: Collection[str]) -> Any:
    """Leave out keys that were null."""
    if isinstance(value, dict):
        return {key: _without(each, gone) for key, each in value.items() if key not in gone or each is not None}
    return [_without(each, gone) for each in value] if isinstance(value, list) else value


def exchange(running: Running, asked: Exchange) -> Exchange:
    """Ask once; return the reply."""
    if asked["path"] == "/metrics":
        running.wait_until_idle()
    body: dict[str, Any] = {"json": asked["json"]} if "json" in asked else {}
    if "content" in asked:
        body = {"content": asked["content"].encode("latin-1")}
    elif "zeros" in asked:
        body = {"content": b"0" * asked["zeros"]}
    answer = running.http.request(asked["method"], asked["path"], headers=asked.get("headers"), **body)
    kind = answer.headers.get("content-type", "")
    reply: Exchange = {"status": answer.status_code, "type": kind}
    reply |= {
        name: answer.headers[name] for name in ("retry-after", "www-authenticate", "allow") if name in answer.headers
    }
    if kind.startswith("text/event-stream"):
        return reply | {"events": joined(answer.text)}
    if kind.startswith("application/json") and answer.content:
        return reply | {"body": normalised(described(answer.json()))}
    return reply | ({"metrics": counted(answer.text)} if asked["path"] == "/metrics" else {})


def normalised(value: Any) -> Any:
    """Leave out identifiers, times, and what is said of other rules than `product`."""
    if isinstance(value, dict):
        kept = {key: normalised(each) for key, each in value.items() if key not in LEFT_OUT}
        return {key: each for key, each in kept.items() if key != "tessellm" or each}
    if isinstance(value, list):
        return [normalised(each) for each in value]
    return re.sub(r"cmpl-[0-9a-f]{32}", "cmpl-ID", value) if isinstance(value, str) else value


def described(body: Any) -> Any:
    """Of an API's description: paths with their methods and statuses, and what the parameters are called."""
    if not isinstance(body, dict) or "openapi" not in body:
        return body
    paths = {path: {m: sorted(o["responses"]) for m, o in each.items()} for path, each in body["paths"].items()}
    schemas = body["components"]["schemas"]
    asked = {name: sorted(schemas[name]["properties"]) for name in ("CompletionRequest", "ChatRequest")}
    return {"paths": paths, "parameters": asked}


def joined(text: str) -> dict[str, Any]:
    """Join a stream's events: how tokens are spread over events depends on time, what they say together does not."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    events = [normalised(json.loads(line)) for line in lines if line != "[DONE]"]
    found: dict[str, Any] = {"done": lines[-1] == "[DONE]", "choices": {}, "heads": [], "rest": []}
    for event in events:
        choices = event.pop("choices", [])
        found["rest" if not choices else "heads"].append(event)
        for choice in choices:
            index = str(choice.pop("index"))
            found["choices"][index] = _added(found["choices"].get(index), choice)
    found["heads"] = [head for n, head in enumerate(found["heads"]) if head not in found["heads"][:n]]
    return found


def _added(before: Any, now: Any) -> Any:
    """Add what an event says to what those before it said: texts and lists are joined, the last of all else holds."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return {
            key: _added(before[key], now[key]) if key in before and key in now else {**now, **before}[key]
            for key in keys
        }
    if (isinstance(before, str) and isinstance(now, str)) or (isinstance(before, list) and isinstance(now, list)):
        return before + now
    return before if now is None else now


def counted(page: str) -> dict[str, float]:
    """Return the numbers of a page of metrics that do not depend on time, or on how often somebody looked."""
    return {name: float(value) for name, value in COUNTED.findall(page) if "/metrics" not in name}


def requests() -> list[Exchange]:
    """List what is asked, in order."""
    completions = [
        {},
        {"max_tokens": 40},
        {"model": "tiny:math"},
        {"model": "tiny:base"},
        {"prompt": ["abc", "2+2="], "n": 2, **SAMPLED},
        {"prompt": [5, 6, 7], "top_p": 0.7, **SAMPLED},
        {"prompt": [[5, 6, 7], [9]], "top_k": 5, **SAMPLED},
        {"logprobs": 2, "max_tokens": 4},
        {"logprobs": 0, "max_tokens": 4, "model": "tiny:coding"},
        {"echo": True, "stop": "e"},
        {"stop": ["z", "q9", "a"], "max_tokens": 40, **SAMPLED},
        {"frequency_penalty": 0.9, "presence_penalty": 0.4},
        {"tessellm": {"weights": {"math": 0.3, "coding": -0.5}}},
        {"tessellm": {"rule": "product"}},
        {"tessellm": {"trace": True}, "max_tokens": 3},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 1, "n": 2, **SAMPLED},
        {"stream": True, "tessellm": {"trace": True}, "max_tokens": 3},
        {"stream": True, "stop": "a", "max_tokens": 40, **SAMPLED},
    ]
    chats = [
        {},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
        {"model": "tiny:math", "n": 2, **SAMPLED},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 3},
        {"max_tokens": None, "max_completion_tokens": 5},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 2, **SAMPLED},
        {"stream": True, "logprobs": True, "max_tokens": 3},
    ]
    wrong_completions = [
        {"model": "other"},
        {"model": "tiny:nobody"},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [64]},
        {"prompt": [5, "a"]},
        {"prompt": "a" * 200},
        {"prompt": {"a": 1}},
        {"max_tokens": 0},
        {"max_tokens": 1000},
        {"temperature": 2.5},
        {"temperature": "hot"},
        {"top_p": -0.1},
        {"n": 17},
        {"n": 129},
        {"seed": 1.5},
        {"stop": [""]},
        {"stop": ["a"] * 17},
        {"logprobs": 21},
        {"echo": True, "logprobs": 1},
        {"best_of": 2},
        {"suffix": "a"},
        {"logit_bias": {"5": 1}},
        {"stream_options": {"include_usage": True}},
        {"unknown": 1},
        {"tessellm": {"weights": {"nobody": 1}}},
        {"tessellm": {"weights": {"math": 1e9}}},
        {"tessellm": {"unknown": 1}},
        {"tessellm": {"weights": {"math": 1}}, "model": "tiny:math"},
    ]
    wrong_chats = [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user"}]},
        {"top_logprobs": 2},
        {"tools": [{}]},
        {"response_format": {"type": "json_object"}},
        {"prompt": "a"},
    ]
    posts = [
        ("/v1/completions", COMPLETION, completions + wrong_completions),
        ("/v1/chat/completions", CHAT, chats + wrong_chats),
    ]
    asked = [{"method": "GET", "path": path} for path in ("/health", "/ready", "/health/ready", "/v1/models")]
    asked += [{"method": "GET", "path": f"/v1/models/{name}"} for name in ("tiny", "tiny:math", "other")]
    asked += [{"method": "POST", "path": path, "json": {**own, **each}} for path, own, all_ in posts for each in all_]
    post = {"method": "POST", "path": "/v1/completions"}
    as_json = {"content-type": "application/json"}
    asked += [
        {**post, "content": "{", "headers": as_json},
        {**post, "content": "[1]", "headers": as_json},
        {**post, "content": '{"model": "\xff"}', "headers": as_json},
        {**post, "content": json.dumps(COMPLETION), "headers": {"content-type": "text/plain"}},
        {**post, "zeros": (1 << 20) + 1, "headers": as_json},
        {**post, "json": COMPLETION, "headers": {"authorization": "Bearer wrong"}},
        {**post, "json": COMPLETION, "headers": {"host": "evil.example"}},
        {"method": "GET", "path": "/v1/completions"},
        {"method": "DELETE", "path": "/v1/models"},
        {"method": "GET", "path": "/v1/nothing"},
        {"method": "HEAD", "path": "/v1/models"},
        {"method": "GET", "path": "/v1/models", "headers": {"authorization": ""}},
        {"method": "GET", "path": "/health", "headers": {"authorization": ""}},
        {"method": "GET", "path": "/openapi.json"},
    ]
    asked += [{"method": "GET", "path": path} for path in ("/", "/play.js", "/play.css", "/metrics")]
    return asked
