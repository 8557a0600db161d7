"""No function takes more than eight parameters: more are a dataclass."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tessellm

SOURCE = Path(tessellm.__file__).parent
MOST = 8
PRESCRIBED = {  # signatures of transformers'
    ("model/composed.py", "forward"),
    ("engine/members/attention.py", "slot_attention"),
}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def is_kernel(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Kernels are called with pointers, strides and sizes one by one; what they are made of is inlined."""
    return "kernel" in path.stem or any("jit" in ast.unparse(each) for each in function.decorator_list)


def crowded(source: Path) -> set[tuple[str, str]]:
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(path, node):
                continue
            if len(parameters(node)) > MOST:
                found.add((path.relative_to(source).as_posix(), node.name))
    return found


def test_no_function_takes_more_than_eight_parameters() -> None:
    assert crowded(SOURCE) == PRESCRIBED


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(a, b, c, d, /, e, f, g, *, h, i): ...", True),
        ("class C:\n    def f(self, a, b, c, d, e, f, g, h): ...", False),
        ("@triton.jit\ndef f(a, b, c, d, e, f, g, h, i): ...", False),
    ],
)
def test_the_check_counts(tmp_path: Path, text: str, found: bool) -> None:
    (tmp_path / "module.py").write_text(text)
    assert bool(crowded(tmp_path)) is found
