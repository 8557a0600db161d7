"""The package's shape: imports point one way, importing it is light, its surface is what it says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import tessellm

SOURCE = Path(tessellm.__file__).parent
HEAVY = ["vllm", "lm_eval", "evalplus", "mergekit", "fastapi", "uvicorn", "matplotlib", "peft", "typer", "bitsandbytes"]

LAYERS = [  # a module imports from its own layer and from those above it in this list
    {"config", "errors"},
    {"rules", "evidence", "gates", "termination", "vocabulary_sums"},
    {"sources", "files", "provenance", "stamps", "rows", "quantized"},
    {"speakers", "temperature", "vocabulary", "vocabulary_notes"},
    {"cache", "shared_tensors"},
    {"generation_mixin", "model"},
    {"adapters", "members", "model_card"},
    {"compose", "links"},
    {"checkpoint", "recipe"},
    {"decoding", "particles"},
    {"continuations", "particle_generation"},
    {"generation", "inspection", "planning", "tune"},
    {"theory", "diagnose", "evaluate", "serve", "experiments", "vllm"},
    {"commands"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules() -> dict[Path, str]:
    """Every module, and the layer's name that it belongs to: its own, or its folder's."""
    found = {path: path.relative_to(SOURCE).with_suffix("").parts[0] for path in sorted(SOURCE.rglob("*.py"))}
    return {path: name for path, name in found.items() if name != "__init__"}


def imported_at_once(path: Path) -> set[str]:
    """Names of our modules that a file imports when it is itself imported, not later inside a function."""
    package = ["tessellm", *path.relative_to(SOURCE).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(_without_functions(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            whole = [*start, *(node.module.split(".") if node.module else [])]
            names = [[*whole, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "tessellm" and len(name) > 1}
    return found & set(RANK)


def _without_functions(tree: ast.Module) -> ast.Module:
    class Drop(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node

    return Drop().visit(tree)


def test_every_module_has_a_layer() -> None:
    unknown = sorted({name for name in modules().values() if name not in RANK})
    assert not unknown, f"say in LAYERS where these belong: {unknown}"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {other}"
        for path, name in modules().items()
        for other in imported_at_once(path)
        if RANK[other] > RANK[name]
    ]
    assert not wrong


def test_the_check_sees_imports() -> None:
    assert imported_at_once(SOURCE / "checkpoint.py") >= {"adapters", "compose", "errors", "files", "model", "sources"}
    assert "checkpoint" not in imported_at_once(SOURCE / "model.py")  # inside functions only
    assert "compose" in imported_at_once(SOURCE / "recipe.py")


def test_rules_import_torch_alone() -> None:
    allowed = {"__future__", "collections", "dataclasses", "typing", "torch", "math", "functools"}
    for name in ("rules", "evidence", "gates", "vocabulary_sums"):
        path = SOURCE / f"{name}.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).split(".")[0] in {*allowed, "tessellm"}, name


def test_importing_is_light_and_registers_with_hugging_face() -> None:
    code = f"""
import json, sys, tessellm
from transformers import AutoConfig
assert AutoConfig.for_model("tessellm").model_type == "tessellm"
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(ran.stdout.splitlines()[-1]) == []


def test_the_public_surface_is_what_it_says() -> None:
    promised = {"compose", "ComposedConfig", "ComposedForCausalLM", "MemberSpec", "TessellmError", "trace", "diagnose"}
    assert promised <= set(tessellm.__all__)
    assert sorted(tessellm.__all__) == list(tessellm.__all__)
    for name in tessellm.__all__:
        thing = getattr(tessellm, name)
        assert thing.__module__.startswith("tessellm"), name
        assert thing.__doc__, name
