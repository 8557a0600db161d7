"""Merges as columns: made of the same members, their strength chosen on development problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.checkpoint import load
from tessellm.errors import MemberError
from tessellm.evaluate import tasks
from tessellm.model.variants import alone
from tessellm_lab.merging.development import choose
from tessellm_lab.merging.merged import Merged
from tessellm_lab.merging.splits import Part
from tessellm_lab.merging.table import MergePlan

from conftest import CHARACTERS, SPECIAL, build_model, character_tokenizer, logits, perturbed, save_member

DATA = Path(__file__).resolve().parents[3] / "tests" / "evaluate" / "data"


@pytest.mark.parametrize("expert", ["lora_math", "coding"])
@pytest.mark.parametrize("kept", ["linked", "inside"])
def test_a_task_vector_of_one_is_the_expert_again(members_dir: Path, tmp_path: Path, expert: str, kept: str) -> None:
    """Whether the expert is an adapter or full, and wherever its tensors are."""
    model = tessellm.compose(members_dir / "base", {"expert": members_dir / expert}, rule="product")
    if kept == "inside":
        model.save_pretrained(tmp_path / "whole", self_contained=True)
        model = load(tmp_path / "whole")
    merged = Merged(model, tmp_path / "merges").load("task-arithmetic", 1.0)
    torch.testing.assert_close(logits(merged), logits(alone(model, "expert")), atol=1e-4, rtol=0)
    assert merged.config.eos_token_id == model.config.eos_token_id
    assert merged.tokenizer is model.tokenizer


def test_a_model_in_memory_is_merged_too(tmp_path: Path) -> None:
    base = build_model("llama", 0)
    experts = {"math": perturbed(base, 1), "coding": perturbed(base, 2)}
    model = tessellm.compose(base, experts, tokenizer=character_tokenizer())
    merged = Merged(model, tmp_path).load("linear", None)
    weight = merged.member("linear").get_input_embeddings().weight
    mean = torch.stack([model.member(name).get_input_embeddings().weight for name in experts]).mean(0)
    torch.testing.assert_close(weight, mean)


def test_the_strength_with_the_best_mean_is_chosen_and_never_tried_twice(members_dir: Path, tmp_path: Path) -> None:
    model = tessellm.compose(members_dir / "base", {"math": members_dir / "math"})
    merged = Merged(model, tmp_path / "merges")
    wanted = logits(merged.load("task-arithmetic", 0.4))

    def near(candidate: Any, name: str, journals: Path) -> dict[str, float]:
        return {"near": -(logits(candidate) - wanted).abs().mean().item(), "other": 0.0}

    def never(candidate: Any, name: str, journals: Path) -> dict[str, float]:
        raise AssertionError("was scored before")

    choice = choose(merged, "task-arithmetic", (0.2, 0.4, 0.8), near, tmp_path / "development")
    assert choice.chosen == 0.4
    assert str(choice) == "task-arithmetic: lambda = 0.4, chosen among 0.2, 0.4, 0.8"
    assert [path.name for path in (tmp_path / "merges").iterdir()] == []  # a merge is as large as a member
    assert choose(merged, "task-arithmetic", (0.2, 0.4, 0.8), never, tmp_path / "development") == choice
    assert choose(merged, "dare", (0.3,), never, tmp_path / "none").chosen == 0.3
    equal = choose(merged, "task-arithmetic", (0.2, 0.7), lambda *_: {"any": 0.5}, tmp_path / "equal")
    assert equal.chosen == 0.7  # nearer to the usual


def test_members_with_other_ids_are_not_merged(tmp_path: Path) -> None:
    base = build_model("llama", 0)
    save_member(base, tmp_path / "base", character_tokenizer())
    save_member(perturbed(base, 1), tmp_path / "other", character_tokenizer())
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    swapped = [*SPECIAL, *CHARACTERS[::-1]]
    content["model"]["vocab"] = {token: number for number, token in enumerate(swapped)}
    path.write_text(json.dumps(content))
    model = tessellm.compose(tmp_path / "base", {"other": tmp_path / "other"})
    with pytest.raises(MemberError, match="'other' numbers its tokens otherwise than the base"):
        Merged(model, tmp_path / "merges")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    base = build_model("llama", 0, max_position_embeddings=4096)
    save_member(base, folder / "base", character_tokenizer())
    for seed, name in enumerate(("math", "coding"), 1):
        save_member(perturbed(base, seed), folder / name, character_tokenizer())
    path = folder / "recipe.yaml"
    path.write_text("base: ./base\nexperts:\n  math: ./math\n  coding: ./coding\nrule: product\n")
    return path


def test_rules_and_merges_are_columns_with_their_strengths_stated(
    cli: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tasks.GREEDY, "max_gen_toks", 6)
    arguments = ("merges", recipe, "--tasks", "math,gsm8k", "--data", DATA, "-o", tmp_path / "out")
    choosing = ("--rules", "product,mixture", "--methods", "linear,ties", "--strengths", "0.5,1", "--develop", 2)
    ran = cli(*arguments, *choosing, "--seed", 3)
    assert ran.code == 0, ran.err
    assert "- ties: lambda = 1, chosen among 0.5, 1\n" in ran.out
    assert "MATH: 1 set aside from the 4 of its test split; GSM8K: 2 of the 10 of its train split." in ran.out
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert table["columns"] == ["base", "math", "coding", "product", "mixture", "linear", "ties"]
    assert table["subject"] == "product"
    assert {task: row["ties"]["problems"] for task, row in table["cells"].items()} == {"math": 3, "gsm8k": 3}
    assert table["choices"]["ties"]["chosen"] == 1.0
    assert set(table["choices"]["ties"]["tried"]["0.5"]) == {"math", "gsm8k"}
    assert table["choices"]["linear"]["chosen"] is None
    assert (table["development"]["math"]["set_aside"], len(table["development"]["gsm8k"]["places"])) == (True, 2)
    assert table["seed"] == 3
    assert set(table["versions"]) == {"python", "torch", "transformers", "lm_eval", "evalplus", "mergekit"}
    assert None not in table["versions"].values()
    assert {"commit", "hardware", "threads"} <= set(table)
    asked = {
        path.parent.name: {json.loads(line)["key"] for line in path.read_text().splitlines()}
        for path in (tmp_path / "out").rglob("gsm8k.jsonl")
    }
    assert set(asked) == {*table["columns"], "0.5", "1"}
    assert asked["ties"] == asked["base"]  # the same prompts in every column
    assert not asked["0.5"] & asked["ties"]
    assert cli(*arguments, *choosing, "--seed", 4).code == 2  # other development problems: another evaluation


def test_problems_that_something_was_chosen_on_before_are_kept_out_too() -> None:
    assert MergePlan(("linear",)).part == Part(0)  # nothing to choose
    assert MergePlan(("ties",), strengths=(0.5,)).part == Part(0)
    assert MergePlan(("ties",), seed=2).part == Part(50, 2)
    assert MergePlan(("linear",), develop=7).part == Part(7)


def test_bad_usage_is_named(cli: Any, recipe: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--methods", "tise"), "did you mean 'ties'"),
        (("--methods", "slerp", "--strengths", "0.5,1.5"), "slerp's t is between 0 and 1; got 1.5"),
        (("--rules", "prodct"), "did you mean 'product'"),
        (("--methods", "ties", "--strengths", "0.5,x"), "--strengths: expected numbers with commas between them"),
        (("--develop", 9, "--tasks", "gsm8k"), "gsm8k needs 8 worked examples"),
    ):
        ran = cli("merges", recipe, "--tasks", "math", *arguments, "--data", DATA, "-o", tmp_path / "out")
        assert ran.code == 2, message
        assert message in ran.err
        assert not (tmp_path / "out").exists()
