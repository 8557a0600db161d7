"""Tuning by task score, on members whose answers are known: what comes after a colon is a table of logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tessellm
from tessellm.evaluate import tasks
from tessellm.evaluate.runner import Runner
from tessellm.evaluate.splits import Part
from tessellm.tune.score import Search, tune_by_score

from conftest import VOCAB, build_model, character_tokenizer, save_member

IDS = character_tokenizer().get_vocab()


def answering(**digits: float) -> Any:
    """A model that, after a colon, writes one of these digits by their logits, and then ends."""
    model: Any = build_model(
        "llama", hidden_size=VOCAB, num_hidden_layers=1, max_position_embeddings=4096, tie_word_embeddings=False
    )
    table_VV = torch.zeros(VOCAB, VOCAB)
    table_VV[:, IDS["</s>"]] = 9.0
    table_VV[IDS[":"]] = -9.0
    for digit, logit in digits.items():
        table_VV[IDS[":"], IDS[digit[-1]]] = logit
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.lm_head.weight.copy_(table_VV.T / VOCAB**0.5)  # the norm makes a unit vector that long
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every answer is 7. The base says 3; with weights of 1 no expert is strong enough, and more of both is a tie."""
    made = tmp_path_factory.mktemp("answering")
    members = {
        "base": answering(_3=2.2, _7=0.0, _9=0.0),
        "math": answering(_3=2.2, _7=2.0, _9=0.0),
        "coding": answering(_3=2.2, _7=0.0, _9=2.0),
    }
    for name, model in members.items():
        save_member(model, made / name, character_tokenizer())
    (made / "recipe.yaml").write_text(
        "base: ./base\nexperts:\n  math: ./math\n  coding: ./coding\nrule: product\n", encoding="utf-8"
    )
    (made / "data" / "gsm8k").mkdir(parents=True)
    for split, count in (("train", 12), ("test", 2)):
        rows = [{"question": f"what is {n} + {7 - n}, {split}?", "answer": "so\n#### 7"} for n in range(count)]
        (made / "data" / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.GREEDY, "max_gen_toks", 6)


def test_weights_that_solve_the_problems_are_found(folder: Path) -> None:
    model = tessellm.compose(folder / "base", {name: folder / name for name in ("math", "coding")}, rule="product")
    seen: list[Any] = []
    values = (1.25, 1.5)
    search = Search(model, Runner(folder / "data"), ["gsm8k"], Part(4), tried=seen.append)
    tuning = tune_by_score(search, values)
    assert tuning.weights == {"math": 1.25, "coding": 1.0}
    assert (tuning.before, tuning.after) == (0.0, 1.0)
    assert (tuning.problems, tuning.held_out_before, tuning.held_out_after) == (3, 0.0, 1.0)
    assert tuning.held_out_problems == 1
    assert tuning.difference is not None
    assert tuning.difference.interval.mean == 1.0
    assert tuning.trials == seen
    settings = [tuple(trial.weights.values()) for trial in seen]
    assert len(set(settings)) == len(settings)  # nothing is tried twice
    assert (1.25, 1.5) in settings  # the second expert is tried from where the first is best
    assert model.config.weights == (1.0, 1.0)  # the model itself is left as it was


def test_what_is_worse_held_out_is_not_taken(folder: Path) -> None:
    model = tessellm.compose(folder / "base", {name: folder / name for name in ("math", "coding")}, rule="product")
    search = Search(model, Runner(folder / "data"), ["gsm8k"], Part(4))
    as_it_is = search.trial((1.0, 1.0))
    search.held_out = lambda trial: {"gsm8k": [float(trial == as_it_is)]}  # type: ignore[method-assign]
    tuning = tune_by_score(search, (1.25,))
    assert (tuning.held_out_before, tuning.held_out_after) == (1.0, 1.0)
    assert tuning.weights == {"math": 1.0, "coding": 1.0}


def test_the_command_goes_on_after_a_stop_and_saves_what_it_found(cli: Any, folder: Path, tmp_path: Path) -> None:
    arguments = ("tune", folder / "recipe.yaml", "--tasks", "gsm8k", "--data", folder / "data", "--try-weights", "1.25")
    arguments += ("--develop", 3, "--held-out", 0, "-o", tmp_path / "out", "--json", tmp_path / "tuning.json")
    ran = cli(*arguments, "--save", tmp_path / "tuned")
    assert ran.code == 0, ran.err
    assert "score: 0.0 % → 100.0 % on 3 problems" in ran.out
    assert "gsm8k: 3 of the 12 of its train split" in ran.out
    assert "math 1.25, coding 1: 100.0 %" in ran.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").config.weights == (1.25, 1.0)
    first = json.loads((tmp_path / "tuning.json").read_text())
    assert (first["held_out_after"], first["development"]["gsm8k"]["split"]) == (None, "train")
    journal = next((tmp_path / "out").rglob("gsm8k.jsonl"))
    journal.write_bytes(journal.read_bytes()[:-30])
    assert cli(*arguments).code == 0
    assert json.loads((tmp_path / "tuning.json").read_text()) == first
    assert cli(*arguments, "--seed", 1).code == 2  # other problems: not the same search


def test_bad_usage_is_named(cli: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.txt").write_text("abc\n")
    given = ("--data", folder / "data", "-o", tmp_path / "out")
    for arguments, message in (
        ((), "expected either texts, to tune by likelihood"),
        ((tmp_path / "dev.txt", "--tasks", "gsm8k"), "got both"),
        ((tmp_path / "dev.txt", "--batch-size", 2), "--batch-size goes with --tasks"),
        ((tmp_path / "dev.txt", "--self-contained"), "--self-contained goes with --save"),
        (("--tasks", "gsm8k", "--rule", "mixture", *given), "tuning finds weights for the rule product"),
        (("--tasks", "gsm8k", "--try-weights", "a", *given), "--try-weights: expected numbers"),
        (("--tasks", "gsm8k", "--develop", 9, *given), "gsm8k needs 8 worked examples"),
    ):
        ran = cli("tune", folder / "recipe.yaml", *arguments)
        assert ran.code == 2, message
        assert message in ran.err
        assert not (tmp_path / "out").exists()
