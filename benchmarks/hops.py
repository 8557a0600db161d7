"""Count the functions of ours that a token passes through, from the command to the first token, and for each later one.

    python benchmarks/hops.py [--list] [--write]

`tessellm generate` is asked one question, greedily, of a chat composition on disk: three tiny Llamas, the default rule
with its router, several members active. A function counts once however often it is called: every named function,
method or property whose code lies in src/tessellm. Comprehensions, lambdas and what Hugging Face and torch run beneath
do not count. Nor does what happens once per process before there is a prompt: the composition is loaded, its router
measured and an engine made by one function each, whose insides are left out. All else counts: options, chat template,
tokens, scheduler, router, members, rule, sampling, text. The command runs once before, so that nothing is imported.

A later token's count is that of one in the middle of the text; the last token's also frees the slot. The engine's part
is what runs between `Engine.step` and its return. `--write` keeps the counts in results/hops.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tessellm
from tessellm.commands.app import app

ROOT = Path(__file__).resolve().parent.parent
SOURCE = str(Path(tessellm.__file__).parent)
NEW = 6
GOALS = {"first": (40, 14), "later": (20, 8)}  # functions, files; from the command, rule and router included
BEFORE = {"first": (66, 20), "later": (41, 14)}  # at 5bd08e1, from `Engine.generate` on
ONCE = ("SpeakerOptions.load", "Engine.__init__")  # per process, before there is a prompt
STEP = "Engine.step"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
CHARACTERS = [chr(code) for code in range(32, 127)]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}a: "


class Hops:
    """Functions of ours that were called, by number of tokens that the engine's one request had by then."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.request: Any = None
        self.once = self.steps = 0  # how deep we are in functions of ONCE, in steps
        self.called: dict[int, dict[tuple[str, str], bool]] = {}  # whether in a step

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(SOURCE) or code.co_name.startswith("<"):
            return
        name = code.co_qualname.replace(".<locals>", "")
        change = 1 if event == "call" else -1
        if name == STEP:
            self.engine = frame.f_locals["self"]
        if event == "call" and not self.once:
            self.note(os.path.relpath(code.co_filename, SOURCE), name)
        self.once += change * (name in ONCE)
        self.steps += change * (name == STEP)

    def note(self, file: str, name: str) -> None:
        if self.request is None and self.engine is not None:
            self.request = next((each for each in (*self.engine.in_slot, *self.engine.waiting) if each), None)
        called = self.called.setdefault(0 if self.request is None else len(self.request.tokens), {})
        called[file, name] = called.get((file, name), False) or self.steps > 0 or name == STEP


def composition(folder: Path) -> Path:
    """A chat composition on disk; no member answers alone, so that there is a mixture in each step."""
    core = Tokenizer(models.BPE({text: n for n, text in enumerate(["<pad>", "</s>", *CHARACTERS, "\n"])}, []))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    for name in ("base", "one", "two"):
        config = LlamaConfig(**SIZES, **ids, max_position_embeddings=1024, initializer_range=0.2)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    recipe = {"base": "./base", "experts": {"one": "./one", "two": "./two"}, "rule": {"name": "mixture", "alone": 1.0}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    app(["compose", str(folder / "recipe.yaml"), "-o", str(folder / "out")], standalone_mode=False)
    return folder / "out"


def measure() -> dict[str, dict[tuple[str, str], bool]]:
    """The functions on the way to the first token, to a later one, and to the last."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        os.environ["TESSELLM_CACHE"] = name
        command = ["generate", str(composition(Path(name))), "What is 3 + 4?", "--max-new-tokens", str(NEW)]
        app(command, standalone_mode=False)  # imports are done
        hops = Hops()
        sys.setprofile(hops)
        try:
            app(command, standalone_mode=False)
        finally:
            sys.setprofile(None)
    assert hops.request is not None
    assert len(hops.request.tokens) == NEW, "the text ended early"
    return {name: hops.called[tokens] for name, tokens in (("first", 0), ("later", NEW // 2), ("last", NEW - 1))}


def counted(called: dict[tuple[str, str], bool], in_step: bool = False) -> tuple[int, int]:
    """Functions and files."""
    chosen = [file for (file, _), stepping in called.items() if stepping or not in_step]
    return len(chosen), len(set(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions, too; * those of a step")
    parser.add_argument("--write", action="store_true", help="write results/hops.json; needs the lab")
    given = parser.parse_args()
    start, found = time.perf_counter(), measure()
    rows: list[tuple[str, str, tuple[int, int], tuple[int, int] | None]] = []
    for token, called in found.items():
        before = f" (at 5bd08e1, from the engine on: {BEFORE[token]})" if token in BEFORE else ""
        rows.append(
            (token, f"{token} token, from the command: functions, files{before}", counted(called), GOALS.get(token))
        )
        rows.append((f"{token}, step", f"{token} token, in the engine's steps", counted(called, in_step=True), None))
        if given.list:
            print("\n".join(f"  {'*' if step else ' '} {file}: {name}" for (file, name), step in called.items()))
    for _, words, count, goal in rows:
        print(f"{words}: {count[0]}, {count[1]}" + (f" (goal {goal[0]}, {goal[1]})" if goal else ""))
    if given.write:
        write(rows, found, time.perf_counter() - start)


def write(rows: list[Any], found: dict[str, dict[tuple[str, str], bool]], seconds: float) -> None:
    from tessellm_lab.common.claims import Claim, Result

    claims = []
    for name, words, count, goal in rows:
        holds = None if goal is None else count[0] <= goal[0] and count[1] <= goal[1]
        claims.append(Claim(name, words, list(count), None if goal is None else f"≤ {goal[0]}, {goal[1]}", holds))
    tables = {token: [[file, name, step] for (file, name), step in called.items()] for token, called in found.items()}
    Result("hops", claims, 0, "cpu", seconds, tables=tables).write(ROOT / "results")


if __name__ == "__main__":
    main()
