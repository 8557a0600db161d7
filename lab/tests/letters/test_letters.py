"""`letters`: both forms' data are right, members keep apart, and a short run goes through."""

import json

import pytest
import torch

from tessellm_lab.letters import experiment as letters_experiment
from tessellm_lab.letters import positions as letters_positions
from tessellm_lab.letters import writing as letters_writing
from tessellm_lab.letters.positions import ALPHABET, REPLACEMENTS, transform
from tessellm_lab.letters.writing import DOT, END, FIELD, PROMPT_END, answers, fields, lines, random_strings


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def letters(text):
    return torch.tensor([[ALPHABET.index(letter) for letter in text]])


def test_transform_is_the_papers():
    assert torch.equal(transform(letters("AM ZK"), REPLACEMENTS), letters("KB ZK"))
    assert torch.equal(transform(letters("AM"), [REPLACEMENTS[0]]), letters("AM"))


def test_the_papers_settings():
    shape = letters_positions.SHAPE
    assert (shape.vocabulary, shape.context, shape.width, shape.layers, shape.heads) == (27, 32, 64, 2, 2)
    full = letters_experiment.SIZES["full"]
    assert (full.seeds, full.strings, full.epochs, letters_positions.RATE) == (10, 2000, 5, 3e-4)


def test_a_seeds_members_do_not_depend_on_the_others(generator):
    """Gradients of the summed loss stay apart: training with another member beside changes nothing."""
    torch.manual_seed(0)
    strings = torch.randint(27, (2, 6, 16), generator=generator)
    start = letters_positions.initialise_gpt2(letters_positions.SHAPE, 2, generator)

    def trained(members):
        one = {name: p[members].clone() for name, p in start.items()}
        order = torch.Generator().manual_seed(3)
        fixed = strings[members][:, :1].expand(-1, 6, -1)  # all strings alike: the order does not matter
        return letters_positions._train(one, fixed, fixed, 1, order, None)

    torch.manual_seed(1)
    before = letters_positions.logits_gpt2
    letters_positions.logits_gpt2 = lambda *arguments, training: before(*arguments)  # no dropout
    try:
        both, alone = trained([0, 1]), trained([1])
    finally:
        letters_positions.logits_gpt2 = before
    for name in both:
        torch.testing.assert_close(both[name][1], alone[name][0], rtol=1e-4, atol=1e-6)


def test_lines_hold_the_field_the_answer_and_its_end(generator, monkeypatch):
    strings = random_strings(torch.tensor([1, 31, 5]), generator)
    assert (strings >= 0).sum(1).tolist() == [1, 31, 5]
    prompt, answer = fields(strings), answers(strings, REPLACEMENTS)
    assert prompt.shape == (3, FIELD + 1)
    assert prompt[:, -1].tolist() == [PROMPT_END] * 3
    assert (prompt[0, 1:-1] == DOT).all()
    assert answer[0, 1:].tolist() == [END] * FIELD
    inputs, targets, mask = lines(1, 8, generator)
    assert inputs.shape == targets.shape == mask.shape == (8, 2 * FIELD + 1)
    assert (mask.sum(1) == (inputs[:, :FIELD] != DOT).sum(1) + 1).all()
    monkeypatch.setattr(letters_writing, "SMOOTHING", 0.0)
    _, targets, mask = lines(1, 50, generator)
    counted = targets[mask.bool()]
    assert ((counted < len(ALPHABET)) | (counted == END)).all()
    assert not (counted == ALPHABET.index("A")).any()  # expert 1 writes K instead


def test_every_length_is_trained_on(generator):
    counts = torch.bincount(letters_writing.random_lengths(20_000, generator), minlength=FIELD + 1)
    assert counts[0] == 0
    assert (counts[1:] > 0.015 * 20_000).all()


def test_a_short_run_writes_claims_and_figure(tmp_path, monkeypatch):
    monkeypatch.setitem(letters_experiment.SIZES, "cpu", letters_experiment.Effort(2, 4, 1, (2, 2), 4, (3, 1)))
    result = letters_experiment.run(seed=0, out=tmp_path, size="cpu")
    assert result.name == "letters"
    written = json.loads((tmp_path / "letters.json").read_text())
    assert {"position-wise-composed", "autoregressive-composed"} <= {claim["id"] for claim in written["claims"]}
    assert [row["length"] for row in written["tables"]["autoregressive"]] == list(range(1, 32))
    assert not result.holds  # untrained members cannot
    assert (tmp_path / "letters.png").stat().st_size > 10_000


def test_a_member_trained_a_little_longer_learns_its_task(generator):
    torch.manual_seed(0)
    members = letters_writing.train_members(1, (250, 2), 16, generator)
    strings = random_strings(torch.full((64,), 8), generator)
    with torch.no_grad():
        prompt, answer = fields(strings), answers(strings, [{}])
        tokens = torch.cat([prompt, answer[:, :-1]], dim=1)
        logits = letters_writing.logits_gpt2(members, letters_writing.SHAPE, tokens.expand(3, -1, -1))
    guesses = logits[0, :, FIELD : FIELD + 8].argmax(-1)
    assert float((guesses == answer[:, :8]).float().mean()) > 0.2  # one in 27 by chance
