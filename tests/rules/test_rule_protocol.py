"""Rules are asked, never looked at: nobody but rules/ knows of what class one is, and what a rule need not have."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from tessellm.rules import RULES, BaseRule, FunctionRule, product

SOURCE = Path(tessellm.__file__).parent
CLASSES = {"BaseRule", "FunctionRule", "ComposedRule", *(entry.make.__name__ for entry in RULES.values())}


def looked_at(text: str) -> list[str]:
    """Find calls that ask for a rule's class, or whether it has something."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            names = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            asked = ast.unparse(node.args[0]).rpartition(".")[2]
            by_class = node.func.id in ("isinstance", "issubclass") and names & CLASSES
            by_name = (
                node.func.id in ("hasattr", "getattr") and asked == "rule" and isinstance(node.args[1], ast.Constant)
            )
            found += [ast.unparse(node)] if by_class or by_name else []
    return found


def test_what_is_found() -> None:
    assert looked_at("isinstance(x, Mixture)\nhasattr(self.rule, 'explain')\ngetattr(rule, 'stateful', 0)") != []
    assert len(looked_at("isinstance(model.rule.rule, Product | Mixture)\nissubclass(kind, BaseRule)")) == 2
    assert looked_at("isinstance(rule, str)\ngetattr(rule, field.name)\nhasattr(model, 'rule')") == []


def test_nobody_else_looks_at_a_rule() -> None:
    files = [path for path in SOURCE.rglob("*.py") if "rules" not in path.relative_to(SOURCE).parts]
    assert len(files) > 200
    assert {path.name: found for path in files if (found := looked_at(path.read_text(encoding="utf-8")))} == {}


class Own(BaseRule):
    name = "own"

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        return product(logp_MBTV), None


@pytest.mark.parametrize("rule", [Own(), FunctionRule("own", product)], ids=["class", "function"])
def test_a_rule_of_a_users_own_runs_in_the_reference_model(rule: BaseRule, members_dir: Path) -> None:
    model = tessellm.compose(members_dir / "base", {"math": members_dir / "math"}, rule="product")
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    model.set_rule(rule)
    torch.testing.assert_close(model(ids).logits, expected)
