"""Recipes: read, checked before anything is loaded, and composed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

import tessellm
from tessellm.errors import RecipeError
from tessellm.recipe import Recipe, read_recipe

from conftest import logits

FULL = """
base: {source: ./base, dtype: float32}
experts:
  math: ./math
  coding: {source: ./lora_coding, weight: -0.5, any_base: false}
rule: {name: product}
dtype: bfloat16
device_map: {base: cpu, math: cpu, coding: cpu}
attn_implementation: eager
trust_remote_code: false
"""


def recipe_at(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_every_key_reaches_the_composition(own_members: Path) -> None:
    path = recipe_at(own_members, FULL)
    model = read_recipe(path).compose(path.parent)
    assert model.config.member_names == ["base", "math", "coding"]
    assert model.config.weights == (1.0, -0.5)
    assert [model.member(name).dtype for name in ("base", "math")] == [torch.float32, torch.bfloat16]
    assert model.base.config._attn_implementation == "eager"
    assert model.config.members[2]["kind"] == "adapter"


def test_what_is_said_of_routing_reaches_the_composition(own_members: Path) -> None:
    (own_members / "asked.txt").write_text("sort a list\n")
    path = recipe_at(
        own_members,
        """
base: {source: ./base, examples: ["how are you?"]}
experts:
  math: {source: ./math, description: Adds numbers., examples: [1 + 1, 2 + 2]}
  coding: {source: ./lora_coding, examples: ./asked.txt}
rule: {name: mixture, switch_prob: 0.05}
base_retention: 0.8
router: false
""",
    )
    model = read_recipe(path).compose(path.parent)
    assert model.config.routing == {"enabled": False, "base_retention": 0.8}
    assert model.router is None
    assert model.rule.routed.switch_prob == 0.05
    said = [(entry.get("description"), entry.get("examples")) for entry in model.config.members]
    assert said == [(None, ["how are you?"]), ("Adds numbers.", ["1 + 1", "2 + 2"]), (None, ["sort a list"])]


def test_paths_with_a_dot_are_relative_to_the_recipe_wherever_one_is(
    own_members: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe_at(own_members, "base: ./base\nexperts: {math: ../members/math}\n")
    expected = logits(tessellm.compose(own_members / "base", {"math": own_members / "math"}))
    for place in (own_members, own_members.parent, Path("/")):
        monkeypatch.chdir(place)
        given = Path(os.path.relpath(path))
        assert torch.equal(logits(read_recipe(given).compose(given.parent)), expected)
    monkeypatch.chdir(own_members.parent)
    plain = recipe_at(own_members, f"base: members/base\nexperts: {{math: {own_members / 'math'}}}\n")
    assert torch.equal(logits(read_recipe(plain).compose(plain.parent)), expected)


def test_json_says_the_same(own_members: Path) -> None:
    content = {"base": "./base", "experts": {"math": {"source": "./math", "weight": 2}}}
    path = recipe_at(own_members, json.dumps(content), "recipe.json")
    assert read_recipe(path).compose(path.parent).config.weights == (2.0,)


WRONG = {
    "base: ./b\nexperts: {m: {source: ./m, description: 3}}": "m.description: expected one line that says what",
    "base: ./b\nexperts: {m: {source: ./m, examples: {}}}": "experts.m.examples: expected a list of prompts, or a file",
    "base: ./b\nexperts: {m: ./m}\nbase_retention: '1'": "base_retention: expected a share between 0 and 1",
    "base: ./b\nexperts: {m: ./m}\nrouter: 1": "router: expected true or false; got 1",
    "": "expected a mapping with the keys base and experts; got nothing",
    "- a": "got a list",
    "just text": "got text",
    "base: ./b\nexpert: {m: ./m}": "unknown key 'expert'; did you mean 'experts'? Known: attn_implementation, base,",
    "base: ./b\nexperts: {m: {source: ./m, wieght: 2}}": "unknown key 'experts.m.wieght'; did you mean 'weight'?",
    "bsae: ./b\nexperts: {m: ./m}": "unknown key 'bsae'; did you mean 'base'?",
    "experts: {m: ./m}": "the key 'base' is missing",
    "base: ./b\nexperts: {m: {weight: 1}}": "the key 'experts.m.source' is missing",
    "base: ./b\nexperts: {m: {source: ./m, weight: .nan}}": "experts.m.weight: expected a finite number; got nan",
    "base: ./b\nexperts: {m: {source: ./m, weight: -.inf}}": "expected a finite number; got -inf",
    "base: ./b\nexperts: {m: {source: ./m, weight: '1'}}": "expected a finite number; got '1'",
    "base: ./b\nexperts: {m: {source: ./m, weight: true}}": "expected a finite number; got True",
    "base: ./b\nexperts: {m: {source: ./m, any_base: 1}}": "experts.m.any_base: expected true or false; got 1",
    "base: 3\nexperts: {m: ./m}": "base: expected a hub id, a folder, or a mapping with the key source; got 3",
    "base: ./b\nexperts: {m: 4}": "experts.m: expected a hub id, a folder, or a mapping with the key source; got 4",
    "base: ./b\nexperts: {m: }": "experts.m: expected a hub id, a folder, or a mapping with the key source; got noth",
    "base: ./b\nexperts: {}": "experts: expected a mapping from names to hub ids",
    "base: ./b\nexperts: [./m]": "at least one; got a list",
    "base: ./b\nexperts: {1: ./m}": "experts: expected names of letters; got 1",
    "base: ./b\nexperts: {m: ./m}\nrule: 3": "rule: expected a rule's name, or a mapping",
    "base: ./b\nexperts: {m: ./m}\ndevice_map: [cpu]": "device_map: expected a device, or a mapping from members to",
    "base: ./b\nexperts: {m: ./m}\ndtype: 16": "dtype: expected text; got 16",
    "base: ./b\nexperts: {m: ./m}\ntrust_remote_code: sure": "trust_remote_code: expected true or false; got 'sure'",
    "base: ./b\nbase: ./c\nexperts: {m: ./m}": "the key 'base' is there twice, near line 1",
    "base: ./b\nexperts:\n  m: ./m\n  m: ./n": "the key 'm' is there twice, near line 3",
    "base: [./b\nexperts: }": "no valid YAML: while parsing a flow sequence",
    "base: !!python/object/apply:os.getcwd []\nexperts: {m: ./m}": "no valid YAML: could not determine a constructor",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_recipes_are_explained(tmp_path: Path, text: str) -> None:
    path = recipe_at(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}")
    assert WRONG[text] in message
    assert "\n" not in message
    assert "pydantic" not in message.lower()
    assert "MemberSpec" not in message


def test_wrong_json_and_unreadable_files_are_explained(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(RecipeError) as caught:
            read_recipe(path)
        return str(caught.value)

    assert "no valid JSON" in message(recipe_at(tmp_path, '{"base": ', "cut.json"))
    twice = '{"base": "a", "base": "b", "experts": {"m": "c"}}'
    assert "the key 'base' is there twice" in message(recipe_at(tmp_path, twice, "twice.json"))
    not_a_number = '{"base": "a", "experts": {"m": {"source": "c", "weight": NaN}}}'
    assert "expected a finite number; got nan" in message(recipe_at(tmp_path, not_a_number, "nan.json"))
    assert "cannot be read: No such file" in message(tmp_path / "nowhere.yaml")
    assert "cannot be read: Is a directory" in message(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("base: été".encode("latin-1"))
    assert "it is not UTF-8 text" in message(tmp_path / "latin.yaml")


def test_the_ready_recipes_are_valid() -> None:
    found = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
    for path in found:
        assert read_recipe(path).experts


def test_a_recipe_and_compose_take_one_specification() -> None:
    assert Recipe.model_fields["base"].annotation is tessellm.MemberSpec
    assert {"base", "experts", "rule", "dtype", "device_map"} <= set(Recipe.model_fields)


def test_a_number_with_an_exponent_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "base: ./base\nexperts: {a: {source: ./a, weight: 1e-3}, b: {source: ./b, weight: -2E2}}\n"
    )
    experts = read_recipe(tmp_path / "r.yaml").experts
    assert [getattr(experts[name], "weight", None) for name in "ab"] == [0.001, -200.0]


@pytest.mark.parametrize("name", ["recipe.json", "recipe.yaml"])
def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path, name):
    (tmp_path / name).write_text('{"base": "b", "experts": {"math": "m"}}\r\n', encoding="utf-8-sig")
    assert read_recipe(tmp_path / name).base.source == "b"


def bomb(levels: int, form: str) -> str:
    """A recipe of some hundred bytes whose aliases stand for 9 ** levels entries."""
    lines = ["x0: &x0 {a: 1}"]
    for level in range(1, levels + 1):
        nine = ", ".join([f"*x{level - 1}"] * 9)
        lines.append(f"x{level}: &x{level} " + ("{<<: [" + nine + "]}" if form == "merged" else f"[{nine}]"))
    return "\n".join([*lines, "base: ./b", "experts: {m: ./m}"])


@pytest.mark.parametrize("form", ["merged", "listed"])
@pytest.mark.parametrize("levels", [8, 60])
def test_aliases_that_stand_for_billions_are_refused_at_once(tmp_path: Path, form: str, levels: int) -> None:
    begun = time.monotonic()
    with pytest.raises(RecipeError, match="its aliases stand for more than 10,000 entries"):
        read_recipe(recipe_at(tmp_path, bomb(levels, form)))
    assert time.monotonic() - begun < 2


def test_aliases_that_stand_for_themselves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        read_recipe(recipe_at(tmp_path, "base: &b {source: *b}\nexperts: {m: ./m}"))
    with pytest.raises(RecipeError):
        read_recipe(recipe_at(tmp_path, "rule: &r [*r]\nbase: ./b\nexperts: {m: ./m}"))


def test_aliases_are_taken(tmp_path: Path) -> None:
    path = recipe_at(tmp_path, "base: ./b\nexperts: {m: &m {source: ./m, weight: 2}, n: {<<: *m, weight: 3}, o: *m}")
    assert [member.weight for member in read_recipe(path).experts.values()] == [2, 3, 2]


def test_a_file_that_is_too_large_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a recipe has at most 1,048,576"):
        read_recipe(recipe_at(tmp_path, "#" * (1 << 21)))


def test_values_of_a_member_are_checked_when_a_recipe_is_read(tmp_path: Path) -> None:
    for said, wrong in (("unknown dtype 'float23'", "dtype: float23"), ("within ±1,000,000", "weight: 1e9")):
        path = recipe_at(tmp_path, f"base: ./b\nexperts: {{m: {{source: ./m, {wrong}}}}}")
        with pytest.raises(RecipeError, match=said):
            read_recipe(path)
