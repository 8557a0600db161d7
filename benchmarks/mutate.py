"""Change the library one place at a time, and see which changes its tests catch.

    python benchmarks/mutate.py --seed 0 --count 40 --out mutants.jsonl --paths src/tessellm/text src/tessellm/serve

Each mutant swaps one operator, number, truth value or condition. Its tests are those of the file's room that mention
the module, or the whole room. They run until one fails. The sources are changed in place and put back: run it in a
checkout of its own. With the same --out it goes on where it stopped, and with --only it runs the mutants of another
file again, each with the test that caught it there first: what was caught before should be caught still.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "tessellm"
ROOMS = ("rules", "model", "text", "vocabulary", "checkpoint", "members", "engine")
ROOMS_OF_TESTS = {"engine": ("engine", "decoding")}  # as the room was called before
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
TEST_SECONDS, MUTANT_SECONDS = 300, 1800


@dataclass(frozen=True)
class Mutant:
    path: str  # from the repository's root
    line: int
    column: int  # in bytes, as in Python's syntax trees
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.old} → {self.new}"

    def apply(self, source: str) -> str:
        lines = source.encode().splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        after = source.encode()[len(before) :]
        assert after.startswith(self.old.encode()), f"{self.path} is not what the mutant was made for"
        return (before + self.new.encode() + after[len(self.old.encode()) :]).decode()


def mutated(node: ast.expr) -> ast.expr | None:
    """Return the expression with one change, or None where there is nothing to change."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            new.ops = [SWAPS[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            new.op = SWAPS[type(op)]()
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            new = operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value)):
            new.value = value + 1
        case ast.Constant(value=float(value)):
            new.value = value * 2 or 1.0
        case _:
            return None
    return new


def expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield expressions that run: no annotations, no f-strings, which have no places of their own, no messages."""
    if isinstance(tree, (ast.JoinedStr, ast.Raise)):
        return
    if isinstance(tree, ast.expr):
        yield tree
    for name, value in ast.iter_fields(tree):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from expressions(child)


def mutants(path: Path) -> list[Mutant]:
    """List the mutants of a file."""
    source, found = path.read_text(), []
    for node in expressions(ast.parse(source)):
        old, new = ast.get_source_segment(source, node), mutated(node)
        if new is not None and old is not None and "\n" not in old:
            place = str(path.relative_to(ROOT))
            found.append(Mutant(place, node.lineno, node.col_offset, old, f"({ast.unparse(new)})"))
    return found


def concerned(path: Path) -> list[str]:
    """List the test files of a module: those of its room that mention it, most mentions first, else all of them."""
    room, module = path.relative_to(LIBRARY).parts[0], path.stem
    folders = [ROOT / "tests" / name for name in ROOMS_OF_TESTS.get(room, (room,))]
    files = [file for folder in folders for file in sorted(folder.rglob("test_*.py"))]
    public = [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    words = re.compile(rf"\b({'|'.join([f'{module} import', f'import {module}', *public])})\b")
    counts = {file: len(words.findall(file.read_text())) for file in files}
    mentioning = sorted((file for file in files if counts[file]), key=lambda file: -counts[file])
    return [str(file.relative_to(ROOT)) for file in mentioning or files]


def failing(tests: list[str]) -> tuple[str | None, float]:
    """Run tests until one fails: its name, or None, and the seconds of CPU."""
    before, flags = os.times(), ["-x", "-q", "-n", "0", "--tb=no", "-rfE", f"--timeout={TEST_SECONDS}"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags, *tests]
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MUTANT_SECONDS)
    except subprocess.TimeoutExpired:
        return "timeout", 0.0
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    if ran.returncode == 0:
        return None, seconds
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    return found[1] if found else f"pytest ended with {ran.returncode}", seconds


def run(mutant: Mutant, tests: list[str]) -> tuple[str | None, float]:
    """Run tests on a mutant; the file is put back, with its old time, so that compiled files fit."""
    path = ROOT / mutant.path
    source, times = path.read_text(), path.stat()
    try:
        path.write_text(mutant.apply(source))
        return failing(tests)
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def sample(paths: list[Path], seed: int, count: int) -> list[Mutant]:
    files = sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))
    files = [file for file in files if "cuda" not in file.parts]  # kernels need a GPU, or their interpreter
    every = [mutant for file in files for mutant in mutants(file)]
    return random.Random(seed).sample(every, min(count, len(every)))


def read(path: Path) -> dict[str, dict]:
    return {(row := json.loads(line))["name"]: row for line in path.read_text().splitlines()} if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="what was caught, one line of JSON per mutant")
    parser.add_argument("--paths", type=Path, nargs="+", default=[LIBRARY / room for room in ROOMS])
    parser.add_argument("--only", type=Path, help="run the mutants that this file says were caught")
    given = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet", "--", "src"], cwd=ROOT).returncode:
        parser.error("the sources differ from the last commit: commit first, or `git checkout src`")
    before = read(given.only) if given.only else {}
    paths = [path.resolve() for path in given.paths if path.exists()]
    chosen = [Mutant(**row["mutant"]) for row in before.values() if row["by"]]
    chosen = chosen if given.only else sample(paths, given.seed, given.count)
    done, clean = read(given.out), dict[tuple[str, ...], str | None]()
    for mutant in chosen:
        if mutant.name in done:
            continue
        tests, began = concerned(ROOT / mutant.path), time.monotonic()
        first = before.get(mutant.name, {}).get("by", "").split("::")[0]
        tests = [first, *(each for each in tests if each != first)] if (ROOT / first).is_file() else tests
        by, cpu = run(mutant, tests)
        if by is not None and (key := (by.split("::")[0],)) not in clean and (ROOT / key[0]).is_file():
            clean[key] = failing(list(key))[0]
            if clean[key]:
                sys.exit(f"{clean[key]} fails without any mutant")
        row = {"name": mutant.name, "mutant": asdict(mutant), "by": by, "tests": tests, "cpu": round(cpu, 1)}
        with given.out.open("a") as out:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
        done[mutant.name] = row
        print(
            f"{'caught  ' if by else 'SURVIVED'} {mutant.name}  {by or ''}  {time.monotonic() - began:.0f} s",
            flush=True,
        )
    rows = [done[mutant.name] for mutant in chosen]
    print(f"{sum(row['by'] is not None for row in rows)} of {len(rows)} mutants were caught")


if __name__ == "__main__":
    main()
