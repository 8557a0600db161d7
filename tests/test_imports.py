"""The package's shape: imports point one way, importing it is light, its surface is what it says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tessellm

SOURCE = Path(tessellm.__file__).parent
HEAVY = ["vllm", "lm_eval", "evalplus", "mergekit", "fastapi", "uvicorn", "matplotlib", "peft", "typer", "bitsandbytes"]

LIBRARY = [  # the path of a token, upwards: a module imports from its own folder and from those above it in this list
    "errors",
    "validation",
    "files",
    "provenance",
    "rules",
    "members",
    "vocabulary",
    "routing",
    "model",
    "statistics",
    "compose",
    "checkpoint",
    "recipe",
    "load",
    "engine",
    "text",
]
USES: dict[str, set[str]] = {  # what is made of the library: any of it, and of each other no more than this
    "inspect": set(),
    "diagnose": set(),
    "evaluate": set(),
    "tune": set(),
    "bench": set(),
    "serve": {"diagnose"},
    "vllm": {"serve"},
    "demo": {"diagnose"},
    "commands": {"inspect", "diagnose", "evaluate", "tune", "bench", "serve", "vllm", "demo"},
    "cli": {"commands"},
}
LATER = {  # imports against the order, inside functions alone
    ("model", "checkpoint"),  # from_pretrained and save_pretrained
}
PLACES = {*LIBRARY, *USES}
TORCH_ALONE = {"__future__", "collections", "dataclasses", "functools", "importlib", "math", "typing", "torch"}


def allowed(place: str) -> set[str]:
    """What the modules of a folder, or one module at the top, may import."""
    if place in USES:
        return {place, *LIBRARY, *USES[place]}
    return set(LIBRARY[: LIBRARY.index(place) + 1])


def modules() -> dict[Path, str]:
    """Every module, and its place: the folder that it is in, or its own name at the top."""
    found = {path: path.relative_to(SOURCE).with_suffix("").parts[0] for path in sorted(SOURCE.rglob("*.py"))}
    return {path: name for path, name in found.items() if name != "__init__"}


def imported(path: Path, later: bool) -> set[str]:
    """Places that a file imports from: when it is itself imported, or, if `later`, inside functions and for types."""
    whole = ast.parse(path.read_text(encoding="utf-8"))
    every = set(ast.walk(whole))
    at_once = set(ast.walk(_without_functions(whole)))
    package = ["tessellm", *path.relative_to(SOURCE).parts[:-1]]
    found: set[str] = set()
    for node in every - at_once if later else at_once:
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = [*start, *(node.module.split(".") if node.module else [])]
            names = [[*origin, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "tessellm" and len(name) > 1}
    return found & PLACES


def _without_functions(tree: ast.Module) -> ast.Module:
    class Drop(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node

    return Drop().visit(tree)


def test_every_module_has_a_place() -> None:
    assert set(modules().values()) == PLACES, "say in LIBRARY or USES where these belong"


def test_few_modules_stand_at_the_top() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 10


def test_imports_point_one_way() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {other}"
        for path, place in modules().items()
        for other in imported(path, later=False) - allowed(place)
    ]
    assert not wrong


def test_imports_inside_functions_do_too_but_for_a_few() -> None:
    against = {
        (path.relative_to(SOURCE).as_posix(), place, other)
        for path, place in modules().items()
        for other in imported(path, later=True) - allowed(place)
    }
    assert not [each for each in against if each[::2] not in LATER and each[1:] not in LATER]
    seen = {pair for path, place, other in against for pair in ((path, other), (place, other))}
    assert seen >= LATER, "leave out of LATER what is not needed any more"


def test_the_library_does_not_know_the_lab() -> None:
    assert not [path for path in SOURCE.rglob("*.py") if "tessellm_lab" in path.read_text(encoding="utf-8")]


def test_the_check_sees_imports() -> None:
    saving = imported(SOURCE / "checkpoint" / "save.py", later=False)
    assert saving >= {"checkpoint", "errors", "files", "members", "model", "rules"}
    composed = SOURCE / "model" / "composed.py"
    assert "checkpoint" not in imported(composed, later=False)
    assert "checkpoint" in imported(composed, later=True)
    assert "compose" in imported(SOURCE / "recipe.py", later=False)
    assert "engine" in imported(SOURCE / "engine" / "cuda" / "fused" / "decoder.py", later=False)


def test_rules_import_torch_alone() -> None:
    for path in (SOURCE / "rules").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= TORCH_ALONE, path.name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).split(".")[0] in TORCH_ALONE, path.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1, path.name


def printed(code: str) -> str:
    """The last line that a new interpreter prints."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return ran.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "first",
    [
        "import tessellm",
        "from transformers import AutoModelForCausalLM; import tessellm",
        "import tessellm, importlib.util as u; u.find_spec('transformers'); import transformers.generation.utils",
        "import tessellm.engine.engine",
    ],
)
def test_importing_is_light_and_registers_with_hugging_face(first: str) -> None:
    """Whichever of the two is imported first, and whatever of it."""
    code = f"""
import json, sys
{first}
from transformers import AutoConfig, AutoModelForCausalLM
assert AutoConfig.for_model("tessellm").model_type == "tessellm"
from tessellm import ComposedConfig, ComposedForCausalLM, compose, diagnose
assert AutoModelForCausalLM._model_mapping[ComposedConfig] is ComposedForCausalLM
assert compose.__module__ == "tessellm.compose" and diagnose.__module__ == "tessellm.diagnose.diagnosis"
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    assert json.loads(printed(code)) == []


def test_importing_imports_no_library() -> None:
    code = "import sys, tessellm; print({'torch', 'transformers', 'numpy', 'rich'} & {*sys.modules} or 'none')"
    assert printed(code) == "none"


def test_what_the_model_is_made_of_does_not_import_transformers() -> None:
    """Transformers, once imported, has `tessellm.model` imported: what that needs cannot be half imported then."""
    parts = (imported(path, later=False) for path in (SOURCE / "model").glob("*.py"))
    needed = set().union(*parts) - {"model"}
    assert needed
    named = ", ".join(f"tessellm.{place}" for place in needed)
    assert printed(f"import sys, {named}; print('transformers' in sys.modules)") == "False"


def test_the_public_surface_is_what_it_says() -> None:
    promised = {"compose", "ComposedConfig", "ComposedForCausalLM", "MemberSpec", "TessellmError", "trace", "diagnose"}
    assert promised <= set(tessellm.__all__)
    assert sorted(tessellm.__all__) == list(tessellm.__all__)
    for name in tessellm.__all__:
        thing = getattr(tessellm, name)
        assert thing.__module__.startswith("tessellm"), name
        assert thing.__doc__, name
