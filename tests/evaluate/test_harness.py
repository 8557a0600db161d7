"""The composition as a model of lm-eval, held to lm-eval's own model on single members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import tessellm
from tessellm.engine.requests import RequestLimits
from tessellm.errors import MemberError
from tessellm.evaluate import writer
from tessellm.evaluate.harness import ComposedLM
from tessellm.evaluate.journal import Journal
from tessellm.evaluate.writer import Ask, BlockWriter
from tessellm.model.variants import alone
from tessellm.text.options import TextOptions

from conftest import build_model, character_tokenizer, perturbed

PAIRS = [
    ("a+b", "=c"),
    ("hello ", "world"),
    ("hello ", "worlt"),  # shares all but its last token
    ("", "from nothing"),
    ("x", "y"),
    ("long " * 40, "after a context that is cut"),
]
TEXTS = ["short", "a text that is longer than one window. " * 8]
PROMPTS = ["abcdef", "1+1=", "who?", "long " * 40]


@pytest.fixture(scope="module")
def members() -> dict[str, Any]:
    base = build_model("gpt2", 0)  # absolute positions: padding on the wrong side would show
    return {"base": base, "math": perturbed(base, 1), "coding": perturbed(base, 2)}


@pytest.fixture(scope="module")
def composed(members: dict[str, Any]) -> Any:
    experts = {name: member for name, member in members.items() if name != "base"}
    return tessellm.compose(members["base"], experts, rule="product", tokenizer=character_tokenizer())


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def reference(model: Any) -> HFLM:
    return HFLM(pretrained=model, tokenizer=character_tokenizer(), batch_size=3)


@pytest.mark.parametrize("name", ["base", "math"])
def test_likelihoods_of_a_member_are_lm_evals_own(members: dict[str, Any], composed: Any, name: str) -> None:
    ours, theirs = ComposedLM(alone(composed, name), batch_size=3), reference(members[name])
    requests = instances("loglikelihood", PAIRS)
    found, expected = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (ours, theirs))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    torch.testing.assert_close(*(torch.tensor([logp for logp, _ in each]) for each in (found, expected)))
    rolling = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    found, expected = (lm.loglikelihood_rolling(rolling, disable_tqdm=True) for lm in (ours, theirs))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def test_one_expert_under_the_product_is_that_expert(members: dict[str, Any]) -> None:
    one = tessellm.compose(members["base"], {"math": members["math"]}, rule="product", tokenizer=character_tokenizer())
    requests = instances("loglikelihood", PAIRS)
    found = ComposedLM(one).loglikelihood(requests, disable_tqdm=True)
    expected = ComposedLM(alone(one, "math")).loglikelihood(requests, disable_tqdm=True)
    assert found == [pytest.approx(each) for each in expected]


def test_is_greedy_is_true_of_what_greedy_decoding_writes_and_of_nothing_else(composed: Any) -> None:
    lm = ComposedLM(composed)
    text = lm.write([("abc", {"until": [], "max_gen_toks": 5, "do_sample": False})])[0].text
    other = text[:-1] + ("x" if text[-1] != "x" else "y")
    pairs = [("abc", text), ("abc", other)]
    assert [greedy for _, greedy in lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)] == [1, 0]


@pytest.mark.parametrize("until", [[], ["\n"], ["b", "zz"]])
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_texts_of_a_member_are_lm_evals_own(
    members: dict[str, Any], composed: Any, until: list[str], engine: str
) -> None:
    asked = {"until": until, "max_gen_toks": 24, "do_sample": False}
    requests = instances("generate_until", [(prompt, dict(asked)) for prompt in PROMPTS])
    ours = ComposedLM(alone(composed, "coding"), batch_size=2, engine=engine)
    found = ours.generate_until(requests)
    assert found == reference(members["coding"]).generate_until(requests, disable_tqdm=True)
    assert ours.writer.use_engine == (engine == "auto")


def test_texts_of_the_composition_are_the_references(composed: Any) -> None:
    asked = [(prompt, {"until": ["."], "max_gen_toks": 16, "do_sample": False}) for prompt in PROMPTS]
    assert ComposedLM(composed).write(asked) == ComposedLM(composed, engine="reference").write(asked)


def test_a_stop_text_ends_decoding(composed: Any) -> None:
    free = ComposedLM(composed).write([("abcdef", {"until": [], "max_gen_toks": 32, "do_sample": False})])[0]
    assert free.finish_reason == "length"
    assert free.tokens == 32
    stop = free.text[6:8]
    first = free.text.index(stop)
    held = ComposedLM(composed).write([("abcdef", {"until": [stop], "max_gen_toks": 32, "do_sample": False})])[0]
    assert (held.text, held.finish_reason) == (free.text[:first], "stop")
    assert held.tokens == first + len(stop)  # one token a character


def test_a_prompt_that_fails_does_not_end_the_others(composed: Any) -> None:

    asks = [Ask((), TextOptions(4)), Ask((5, 6), TextOptions(4)), Ask((5,) * 120, TextOptions(64))]
    written = dict(BlockWriter(composed).write(asks))
    assert [written[number].finish_reason for number in range(3)] == ["error", "length", "error"]
    assert "120 tokens and up to 64 more were asked for, but there is room for 128" in str(written[2].error)


def test_a_run_goes_on_from_its_journal(composed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(prompt, {"until": ["."], "max_gen_toks": 8, "do_sample": False}) for prompt in PROMPTS]
    pairs = instances("loglikelihood", PAIRS)
    whole = ComposedLM(composed)
    expected = whole.write(asked), whole.loglikelihood(pairs, disable_tqdm=True)
    path = tmp_path / "journal.jsonl"
    first = ComposedLM(composed, journal=Journal(path))
    first.write(asked)
    first.loglikelihood(pairs, disable_tqdm=True)
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (7, 2, 0):  # killed while it wrote the next line
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:20])
        counted: list[int] = []
        again = ComposedLM(composed, journal=Journal(path), progress=counted.append)
        assert (again.write(asked), again.loglikelihood(pairs, disable_tqdm=True)) == expected
        assert len(counted) == len(asked) + len(pairs) - kept
    monkeypatch.setattr(composed, "forward", None)  # nothing is left to compute
    last = ComposedLM(composed, journal=Journal(path))
    assert (last.write(asked), last.loglikelihood(pairs, disable_tqdm=True)) == expected


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_block_that_was_cut_short_is_written_again_whole(
    composed: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed together must not depend on what the journal holds, since rounding does depend on it."""
    monkeypatch.setattr(writer, "BLOCK", 2)
    asks = [Ask((1, *range(5, 9 + n)), TextOptions(max_new_tokens=4)) for n in range(7)]  # blocks of 4 and 3
    fed: list[tuple[int, ...]] = []
    check = RequestLimits.check
    monkeypatch.setattr(
        RequestLimits, "check", lambda self, asked: fed.append(tuple(asked.prompt)) or check(self, asked)
    )
    whole = dict(BlockWriter(composed, batch_size=2, engine=engine).write(asks))
    assert sorted(whole) == list(range(7))
    fed.clear()
    part = dict(BlockWriter(composed, batch_size=2, engine=engine).write(asks, wanted={5}))
    assert part == {5: whole[5]}
    assert fed == ([ask.ids for ask in asks[4:]] if engine == "auto" else [])


def test_an_unknown_member_is_named(composed: Any) -> None:
    with pytest.raises(MemberError, match="did you mean 'math'"):
        alone(composed, "maht")
