"""Rules are asked, never looked at: nobody but rules/ knows of what class one is, and what a rule need not have."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tessellm
from tessellm.rules import RULES, Explanation, Rule, make_rule, product

SOURCE = Path(tessellm.__file__).parent
CLASSES = {"Rule", "BaseRule", "FunctionRule", "ComposedRule", *(entry.make.__name__ for entry in RULES.values())}


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
    assert looked_at("isinstance(x, Mixture)\nhasattr(self.rule, 'explain')\ngetattr(rule, 'window', 0)") != []
    assert len(looked_at("isinstance(model.rule.rule, Product | Evidence)\nissubclass(kind, Rule)")) == 2
    assert looked_at("isinstance(rule, str)\ngetattr(rule, field.name)\nhasattr(model, 'rule')") == []


def test_nobody_else_looks_at_a_rule() -> None:
    files = [path for path in SOURCE.rglob("*.py") if "rules" not in path.relative_to(SOURCE).parts]
    assert len(files) > 200
    assert {path.name: found for path in files if (found := looked_at(path.read_text(encoding="utf-8")))} == {}


class Own:
    """The protocol and no more of it: no BaseRule, nothing that may be left out."""

    name, window, weights, is_product, tells = "own", 0, None, False, frozenset[str]()

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        return product(logp_MBTV), None

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> Any:
        return make_rule("product").explain(logp_MBTV, tokens_BT, mask_BT, state)

    def weighted(self, weights: Any) -> Rule | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def idle_budget(self, kl_BTK: Tensor, epsilon_BTK: Tensor, why: Explanation) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def test_a_rule_without_what_it_need_not_have(members_dir: Path) -> None:
    model = tessellm.compose(members_dir / "base", {"math": members_dir / "math"}, rule="product")
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    model.set_rule(Own())  # type: ignore[arg-type]
    torch.testing.assert_close(model(ids).logits, expected)
