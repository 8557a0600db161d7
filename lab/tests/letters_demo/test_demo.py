"""The demo, scaled down to strings of three letters: the whole job in seconds, and the parts it stands on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from tessellm.errors import CheckpointError
from tessellm_lab.letters_demo import letters
from tessellm_lab.letters_demo.experiment import EXPERTS, JOINT, MEMBERS, divergences, run_letters_demo
from tessellm_lab.letters_demo.figure import EXPERT_COLOURS, owners
from tessellm_lab.letters_demo.letters import (
    LetterSettings,
    accuracy,
    build_tokenizer,
    complete,
    sample_strings,
    transform,
)

SMALL = LetterSettings(max_length=3, width=32, base_steps=300, expert_steps=100)
TINY = LetterSettings(max_length=3, width=32, base_steps=4, expert_steps=4)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    out, printed = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    console = Console(file=printed, width=100)
    threads = torch.get_num_threads()
    report = run_letters_demo(out, seed=0, console=console, settings=SMALL, test_strings=300)
    assert torch.get_num_threads() == threads
    return SimpleNamespace(out=out, report=report, printed=printed.getvalue())


def test_composition_does_what_no_member_does(demo: SimpleNamespace) -> None:
    scores = demo.report["accuracy"]
    assert scores["composed"]["joint"] == 1.0
    for name in MEMBERS:
        assert scores[name]["own"] == 1.0
        assert scores[name]["joint"] < 0.8


def test_printed_tables_show_inputs_members_and_composition(demo: SimpleNamespace) -> None:
    row = next(line.split() for line in demo.printed.splitlines() if line.strip().startswith("TOM"))
    assert row == ["TOM", "TOM", "TOM", "TOB", "XOM", "XOB"]
    assert "100.00%" in demo.printed
    assert f'tessellm generate {demo.out / "letters"} "HELLO MATH>"' in demo.printed


def test_files(demo: SimpleNamespace) -> None:
    assert {path.name for path in demo.out.iterdir()} == {"members", "letters", "demo.png", "report.html", "demo.json"}
    assert {path.name for path in (demo.out / "members").iterdir()} == set(MEMBERS)
    assert json.loads((demo.out / "demo.json").read_text(encoding="utf-8")) == demo.report
    header = (demo.out / "demo.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") == 1600


def test_the_report_is_of_this_composition(demo: SimpleNamespace) -> None:
    found, page = demo.report["diagnosis"], (demo.out / "report.html").read_text(encoding="utf-8")
    assert found["members"] == list(MEMBERS)
    assert found["texts"] == 31  # of 32, two are the same
    assert found["clean"]
    assert found["predicted"]["value"] > 0.95
    assert "<title>Diagnosis of a composition</title>" in page
    assert all(name in page for name in EXPERTS)
    assert str(demo.out / "report.html") in demo.printed


def test_checkpoint_is_equation_2_of_the_members(demo: SimpleNamespace) -> None:
    tokens_BT = build_tokenizer()(["TAM>XKB", "A>K"], return_tensors="pt", padding=True, padding_side="right").input_ids
    composed = AutoModelForCausalLM.from_pretrained(demo.out / "letters")
    members = {name: AutoModelForCausalLM.from_pretrained(demo.out / "members" / name) for name in MEMBERS}
    with torch.no_grad():
        logp = {name: model(tokens_BT).logits.double().log_softmax(-1) for name, model in members.items()}
        actual_BTV = composed(tokens_BT).logits.double()
    expected_BTV = (sum(logp[name] for name in EXPERTS) - 2 * logp["base"]).log_softmax(-1)
    torch.testing.assert_close(actual_BTV, expected_BTV, atol=1e-5, rtol=0)


def test_divergence_names_the_owner(demo: SimpleNamespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.out / "letters")
    tokenizer = AutoTokenizer.from_pretrained(demo.out / "letters")
    kl_KT = divergences(model, tokenizer, "TOM", "XOB")
    assert kl_KT.shape == (3, 4)  # three letters and the end
    assert owners(kl_KT.tolist()) == [EXPERT_COLOURS[2], None, EXPERT_COLOURS[1], None]


def test_rerun_replaces_an_earlier_demo_and_nothing_else(demo: SimpleNamespace, tmp_path: Path) -> None:
    out, console = tmp_path / "out", Console(file=io.StringIO())
    first = run_letters_demo(out, 1, console, settings=TINY, test_strings=20)
    second = run_letters_demo(out, 1, console, settings=TINY, test_strings=20)
    assert first["accuracy"] == second["accuracy"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not lose")
    with pytest.raises(CheckpointError, match="mine"):
        run_letters_demo(tmp_path / "mine", 1, console, settings=TINY, test_strings=20)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "do not lose"


def test_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer("HELLO MATH>")["input_ids"]
    assert len(tokens) == 1 + len("HELLO MATH>")
    assert tokenizer.decode(tokens) == "<bos>HELLO MATH>"
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "HELLO MATH>"
    assert tokenizer("hello Math>")["input_ids"] == tokens
    assert tokenizer("É")["input_ids"][1:] == [tokenizer.unk_token_id]


def test_transform_replaces_all_at_once() -> None:
    assert transform("KAYAK", {"A": "K", "K": "A"}) == "AKYKA"
    assert transform("THAT MAMMOTH", JOINT) == "XHKX BKBBOXH"


def test_no_test_string_is_trained_on() -> None:
    tested = set(sample_strings(2000, seed=3, max_length=2))
    generator = torch.Generator().manual_seed(3)
    trained_BN = letters._sample(20_000, (1, 2), generator)
    trained = {"".join(letters.ALPHABET[i] for i in row if i >= 0) for row in trained_BN.tolist()}
    assert len(trained) > 500
    assert not tested & trained


def test_strings_have_the_lengths_and_letters_asked_for() -> None:
    strings = sample_strings(500, seed=0, min_length=2, max_length=5, favoured="AT", share=0.5)
    assert {len(string) for string in strings} == {2, 3, 4, 5}
    inner = "".join(string[:-1] for string in strings)
    assert 0.4 < sum(inner.count(letter) for letter in "AT") / len(inner) < 0.7
    assert strings == sample_strings(500, seed=0, min_length=2, max_length=5, favoured="AT", share=0.5)


def test_training_lines_ask_for_the_answer_and_its_end_only() -> None:
    letters_BN = torch.tensor([[letters.ALPHABET.index("A"), letters.ALPHABET.index("B"), -1]])
    tokens_BT, labels_BT = letters._lines(letters_BN, {"A": "K"}, 0.0, torch.Generator())
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokens_BT[0]) == "<bos>AB>KB<eos><pad><pad>"
    assert tokenizer.decode(labels_BT[labels_BT != letters.NO_LOSS]) == "KB<eos>"


def test_training_depends_on_the_seed_alone() -> None:
    first = letters.train_base(5, TINY).state_dict()
    torch.rand(1)  # moves the global generator, which must not matter
    state = torch.get_rng_state()
    second, other = letters.train_base(5, TINY).state_dict(), letters.train_base(6, TINY).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_fine_tuning_leaves_the_base_alone() -> None:
    base = letters.train_base(5, TINY)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expert = letters.fine_tune(base, {"A": "K"}, 6, TINY)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in expert.state_dict().items())


@pytest.mark.parametrize(("written", "right"), [("AB<eos>", 1.0), ("AB", 0.0), ("ABA", 0.0), ("A<eos>", 0.0)])
def test_an_answer_is_right_only_with_its_end(written: str, right: float) -> None:
    tokenizer = build_tokenizer()
    answer_BT = tokenizer([written], add_special_tokens=False, return_tensors="pt").input_ids
    writer = SimpleNamespace(generate=lambda input_ids, **_: torch.cat([input_ids, answer_BT], dim=1))
    assert accuracy(complete(writer, tokenizer, ["AB"]), ["AB"], {}) == right
