"""Record the goldens: `python tests/goldens/make_goldens.py [FOLDER]`, by default over those in data/.

Run it by hand, and only to record what the library should do from now on. test_golden_files.py holds the hashes of what
it wrote. Into another folder it shows whether results are equal to the bit: numbers are written in full.
"""

# ruff: noqa: E402
from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "benchmarks")]
sys.path.append(str(ROOT / ".venv" / "triton"))  # where `make test-kernels` puts it
os.environ["TRITON_INTERPRET"] = "1"

import checkpoint_goldens
import decoding_goldens as decoding
import launch_goldens
import server_goldens
from engine_access import write, write_texts
from golden_compare import written_differences
from golden_files import DATA


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "changed_replies.json").write_text("[]\n")
    with tempfile.TemporaryDirectory() as home:
        _write(folder / "decoding.json.gz", record_decoding(Path(home) / "decoding"))
        _write(folder / "launches.json.gz", record_launches(Path(home) / "launches"))
        _write(folder / "exchanges.json.gz", record_exchanges(Path(home) / "server"))
    record_checkpoints(folder / "checkpoints")


def record_decoding(folder: Path) -> dict[str, Any]:
    given, long = decoding.given(), decoding.long_prompts()
    cases = {}
    for name, model in decoding.cases(folder):
        cases[name] = {
            "fingerprint": decoding.fingerprint(model),
            "logits": decoding.logit_rows(model, given[0]),
            "greedy": _written(model, given, [decoding.GREEDY] * len(given)),
            "sampled": _written(model, given, decoding.SAMPLED),
            "generate, sampled": decoding.sampled_by_generate(model, given[1]),
        }
        if name.endswith("plain"):
            cases[name]["long"] = _written(model, long, [decoding.GREEDY] * len(long), chunk=decoding.CHUNK)
            cases[name]["texts"] = _texts(model)
    return {"commit": _commit(), "prompts": given, "long prompts": long, "cases": cases}


def _written(model: Any, prompts: list[list[int]], asked: list[Any], **options: Any) -> list[dict[str, Any]]:
    found = write(model, prompts, asked, slots=len(prompts), **options)
    rows = []
    for prompt, each, one in zip(prompts, asked, found, strict=True):
        margins = decoding.margins(model, prompt, one.tokens, each)
        logprobs = [float(f"{x:.9g}") for x in one.logprobs]
        rows.append({"tokens": one.tokens, "logprobs": logprobs, "margins": margins, "finish": one.finish})
    if "temperature" not in asked[0] and "chunk" not in options:  # the reference writes the same
        wrong = written_differences("reference", rows, decoding.reference_written(model, prompts))
        if wrong:
            raise AssertionError("\n".join(wrong))
    return rows


def _texts(model: Any) -> list[dict[str, Any]]:
    """Texts with stop texts, which are parts of what the model writes without any."""
    prompts = ["what is 2+2?", "abc", "1, 2, 3"]
    rows = []
    for options in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 4}):
        asked = {"max_new_tokens": decoding.NEW, **options}
        text = max((each["text"] for each in write_texts(model, prompts, "auto", **asked)), key=len)
        for stop in ([], [text[3:5]], [text[2], text[-3:]]):
            found = write_texts(model, prompts, "auto", **asked, stop=tuple(stop))
            rows.append({"prompts": prompts, "options": {**asked, "stop": stop}, "found": found})
    return rows


def record_launches(folder: Path) -> dict[str, Any]:
    """Every distinct launch once; scenarios are lists of their numbers."""
    found = {name: launch_goldens.launches(each, folder / name) for name, each in launch_goldens.SCENARIOS.items()}
    table = sorted({line for lines in found.values() for line in lines})
    number = {line: n for n, line in enumerate(table)}
    scenarios = {name: [number[line] for line in lines] for name, lines in found.items()}
    return {"commit": _commit(), "launches": table, "scenarios": scenarios}


def record_exchanges(home: Path) -> dict[str, Any]:
    home.mkdir()
    with server_goldens.server(home) as running:
        asked = server_goldens.requests()
        return {
            "commit": _commit(),
            "exchanges": [{**each, "reply": server_goldens.exchange(running, each)} for each in asked],
        }


def record_checkpoints(folder: Path) -> None:
    checkpoint_goldens.save_all(folder)
    with tempfile.TemporaryDirectory() as home:  # loading must leave nothing beside what is kept
        copy = Path(shutil.copytree(folder, Path(home) / "checkpoints"))
        found = {kind: checkpoint_goldens.loaded(copy / kind) for kind in checkpoint_goldens.KINDS}
    expected = {kind: {key: each.pop(key) for key in ("rule", "termination")} for kind, each in found.items()}
    _write(folder / "loaded.json.gz", found)
    (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")


def _write(file: Path, content: Any) -> None:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), indent=None)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{file.name}: {file.stat().st_size} bytes")


def _commit() -> str:
    """The last commit that changed the library."""
    asked = ["git", "log", "-1", "--format=%h", "--", "src"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
