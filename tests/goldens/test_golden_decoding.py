"""The reference and the engine compute and write what they did when the goldens were recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import decoding_goldens as decoding
from engine_access import alone, write, write_texts
from golden_compare import differences, logit_differences, written_differences
from golden_files import read

GOLDEN = read("decoding.json.gz")
PROMPTS, LONG, CASES = GOLDEN["prompts"], GOLDEN["long prompts"], GOLDEN["cases"]
NAMES = [f"{kind}, {weighting}" for kind in decoding.KINDS for weighting in decoding.WEIGHTS]
PLAIN = [name for name in NAMES if name.endswith("plain")]
GREEDY = [decoding.GREEDY] * len(PROMPTS)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("goldens")


def composition(name: str, folder: Path) -> Any:
    """Return the composition of a case, of the very members that it was recorded with."""
    model = decoding.composition(*name.split(", ")[:1], folder, name.split(", ")[1])
    assert decoding.fingerprint(model) == pytest.approx(CASES[name]["fingerprint"], abs=1e-2), "other random members"
    return model


def test_every_case_was_recorded() -> None:
    assert list(CASES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_reference(name: str, folder: Path) -> None:
    model, case = composition(name, folder), CASES[name]
    assert logit_differences(name, case["logits"], decoding.logit_rows(model, PROMPTS[0])) == []
    assert written_differences(name, case["greedy"], decoding.reference_written(model, PROMPTS)) == []
    assert decoding.sampled_by_generate(model, PROMPTS[1]) == case["generate, sampled"]


@pytest.mark.parametrize("name", NAMES)
def test_the_engine(name: str, folder: Path) -> None:
    """Eight prompts at once; some alone, one behind the other in one slot."""
    model, case = composition(name, folder), CASES[name]
    for kind, asked in (("greedy", GREEDY), ("sampled", decoding.SAMPLED)):
        assert written_differences(f"{name}, {kind}", case[kind], write(model, PROMPTS, asked, slots=8)) == []
        few = write(model, PROMPTS[:3], asked[:3], slots=1)
        assert written_differences(f"{name}, {kind}, alone", case[kind][:3], few) == []


@pytest.mark.parametrize("name", PLAIN)
def test_drafts_change_nothing(name: str, folder: Path) -> None:
    model, case = composition(name, folder), CASES[name]
    assert written_differences(name, case["greedy"], write(model, PROMPTS, GREEDY, slots=4, lookup=True)) == []


@pytest.mark.parametrize("name", PLAIN)
def test_prompts_of_several_chunks(name: str, folder: Path) -> None:
    model, golden, asked = composition(name, folder), CASES[name]["long"], [decoding.GREEDY] * len(LONG)
    assert written_differences(name, golden, write(model, LONG, asked, slots=3, chunk=decoding.CHUNK)) == []
    assert written_differences(name, golden, write(model, LONG, asked, slots=2)) == []


@pytest.mark.parametrize("kind", decoding.KINDS)
def test_one_member_alone(kind: str, folder: Path) -> None:
    """A weight of one and zeros beside it is that member, which is a model of its own, too."""
    name = f"{kind}, one member"
    model, case = composition(name, folder), CASES[name]
    member = alone(model, "a")
    assert logit_differences(name, case["logits"], decoding.logit_rows(member, PROMPTS[0])) == []
    with torch.no_grad():
        own = model.member("a")(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
    assert logit_differences(name, case["logits"], own[-decoding.LOGIT_ROWS :].tolist()) == []
    assert written_differences(name, case["greedy"][:4], write(member, PROMPTS[:4], GREEDY[:4], slots=4)) == []


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_cancelled_request_changes_no_other(tokens: int, folder: Path) -> None:
    name = "llama, plain"
    found = write(composition(name, folder), PROMPTS, GREEDY, slots=3, cancel=(1, tokens))
    golden = CASES[name]["greedy"]
    cut = found.pop(1)
    assert written_differences(name, [row for n, row in enumerate(golden) if n != 1], found) == []
    assert cut.finish == "cancelled"
    assert tokens <= len(cut.tokens) < len(golden[1]["tokens"])
    assert cut.tokens == golden[1]["tokens"][: len(cut.tokens)]


@pytest.mark.parametrize("name", PLAIN)
def test_stop_texts(name: str, folder: Path) -> None:
    model = composition(name, folder)
    for asked in CASES[name]["texts"]:
        options = {**asked["options"], "stop": tuple(asked["options"]["stop"])}
        engines = ("auto", "reference") if options["temperature"] == 0 else ("auto",)
        for engine in engines:
            found = write_texts(model, asked["prompts"], engine, **options)
            kept = [{k: v for k, v in each.items() if k != "ids"} for each in (*asked["found"], *found)]
            half = len(found)
            assert differences(kept[:half], kept[half:], f"{name}, {engine}") == []
            if engine == "auto":
                assert [each["ids"] for each in found] == [each["ids"] for each in asked["found"]]
