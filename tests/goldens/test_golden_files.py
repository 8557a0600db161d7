"""The goldens are what was recorded, and what compares with them sees what changes: a launch, a logit, a field."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest

from engine_access import Written
from golden_compare import differences, launch_differences, logit_differences, written_differences
from golden_files import DATA, read

HASHES = {  # a golden changes only where the library is meant to do something else: then say so in the commit
    "decoding.json.gz": "9f8db1fe56775e28608f996f95c91b1f5399221d029afed04a86dace003e5347",
    "launches.json.gz": "436c48ed793a92c9ddd89a88213385702faeefefafe84b33f107e36fd74b2276",
    "exchanges.json.gz": "81af2008bf84809c610782cd4f74b27f27b4e4a15cdca1bb162533f301267903",
    "checkpoints": "870091ad10605bcaf4b80c99d84bcfcf8703c559cf9cf924eaed106f3143b236",
}
EDITED = {"expected.json", "changed_replies.json"}  # what old checkpoints load as, which replies changed: by hand


def digest(place: Path) -> str:
    """Hash a file, or the names and contents of a folder's files."""
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    parts = [f for f in files if f.is_file() and f.name not in EDITED and "__pycache__" not in f.parts]
    return hashlib.sha256(
        b"".join(f.relative_to(DATA).as_posix().encode() + hashlib.sha256(f.read_bytes()).digest() for f in parts)
    ).hexdigest()


def test_goldens_are_as_recorded() -> None:
    assert {path.name: digest(path) for path in DATA.iterdir() if path.name not in EDITED} == HASHES


def test_goldens_are_small() -> None:
    sizes = [path.stat().st_size for path in DATA.rglob("*") if path.is_file()]
    assert max(sizes) < 200_000
    assert sum(sizes) < 600_000


def test_launches_are_of_prefill_decode_and_verification() -> None:
    golden = read("launches.json.gz")
    for name, numbers in golden["scenarios"].items():
        lines = [golden["launches"][number] for number in numbers]
        assert any(line.startswith("prompt_attention_kernel") for line in lines), name
        widths = {word for line in lines if line.startswith("attention_kernel") for word in line.split()}
        assert ("TOKENS=4" if "drafts" in name else "TOKENS=1") in widths, name


def test_a_changed_launch_is_seen() -> None:
    launches = read("launches.json.gz")["launches"][:40]
    assert launch_differences("", launches, launches) == []
    changed = [*launches[:7], launches[7].replace("grid=", "grid=2x", 1), *launches[8:]]
    (line,) = launch_differences("decode", launches, changed)
    assert line.startswith(f"decode: launch 7, {launches[7].split()[0]}: expected grid=")
    assert "is missing" in launch_differences("", launches, launches[:-1])[0]
    assert "is new" in launch_differences("", launches[1:], launches)[0]


def test_every_part_of_a_launch_counts() -> None:
    launches = read("launches.json.gz")["launches"]
    line = next(each for each in launches if each.startswith("linear_kernel") and "=bfloat16[" in each)
    words = line.split()
    for n in range(len(words)):
        changed = " ".join([*words[:n], words[n] + "1", *words[n + 1 :]])
        assert launch_differences("", [line], [changed]), words[n]


def test_a_changed_logit_is_seen() -> None:
    rows = read("decoding.json.gz")["cases"]["llama, plain"]["logits"]
    changed = copy.deepcopy(rows)
    changed[2][17] += 1e-2
    assert logit_differences("", rows, rows) == []
    assert [line.split(":")[1] for line in logit_differences("llama", rows, changed)] == [" row 2, token 17"]
    assert logit_differences("", rows, rows[1:])
    changed[2][17] = float("nan")
    assert logit_differences("", rows, changed)


def test_a_changed_token_or_log_probability_is_seen() -> None:
    golden = read("decoding.json.gz")["cases"]["lora, plain"]["greedy"]

    def found(**changes: Any) -> list[Written]:
        one = Written(**{key: golden[0][key] for key in ("tokens", "logprobs", "finish")} | changes)
        return [one, *(Written(row["tokens"], row["logprobs"], row["finish"]) for row in golden[1:])]

    tokens, logprobs = golden[0]["tokens"], golden[0]["logprobs"]
    assert written_differences("", golden, found()) == []
    assert written_differences("", golden, found(tokens=[*tokens[:3], tokens[3] + 1, *tokens[4:]]))
    assert written_differences("", golden, found(tokens=tokens[:-1]))
    assert written_differences("", golden, found(logprobs=[*logprobs[:-1], logprobs[-1] - 1e-2]))
    assert written_differences("", golden, found(finish="stop"))
    assert written_differences("", golden, found()[1:])
    golden[0]["margins"][3] = 1e-6  # a near tie, behind which texts may go on differently
    assert written_differences("", golden, found(tokens=[*tokens[:3], tokens[3] + 1, *tokens[4:]])) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("status",), 500),
        (("body", "choices", 0, "finish_reason"), "stop"),
        (("body", "choices", 0, "logprobs", "token_logprobs", 1), -1.0),
        (("body", "usage", "prompt_tokens"), 12.5),
        (("body", "model"), None),
        (("body", "added"), 1),
    ],
)
def test_a_changed_field_of_a_reply_is_seen(path: tuple[Any, ...], value: Any) -> None:
    exchanges = read("exchanges.json.gz")["exchanges"]
    reply = next(each["reply"] for each in exchanges if each.get("json", {}).get("logprobs") == 2)
    changed = copy.deepcopy(reply)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert differences(reply, reply) == []
    (line,) = differences(reply, changed)
    assert "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path) in line
    assert differences(changed, reply)
