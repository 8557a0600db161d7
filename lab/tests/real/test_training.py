"""Grouped LoRA training: it learns, groups do not touch each other, it resumes, and what it writes PEFT reads."""

import json
from dataclasses import replace

import pytest
import torch

import tessellm
from tessellm.errors import CheckpointError, TessellmError
from tessellm_lab.real import train
from tessellm_lab.real.grouped_lora import LoraGroups
from tessellm_lab.real.packing import ID, IGNORED, LABEL, POSITION, SEGMENT, Stream, pack
from tessellm_lab.real.peft_files import read_facts
from tessellm_lab.real.training import STATE, Job, Settings, Training

from conftest import build_model
from real_cases import write_base, write_data

SETTINGS = Settings(rows=2, length=32, every=10, dev_rows=2, warmup=3, rank=4, alpha=8, learning_rate=1e-2)
TEXTS = [([1, 5, 6, number], [number, 7, number, 2]) for number in range(8, 20)]
OTHERS = [([1, 9, number], [30, number, 31, 2]) for number in range(8, 20)]


def jobs(steps=20):
    return [Job("math", TEXTS, TEXTS[:4], steps), Job("sql", OTHERS, OTHERS[:4], steps // 2, seed=1)]


def test_rows_hold_texts_whole_with_answers_as_labels():
    rows = pack(TEXTS, 20, torch.Generator().manual_seed(0))
    found = []
    for row in rows:
        for number in range(1, int(row[SEGMENT].max()) + 1):
            at = (row[SEGMENT] == number).nonzero()[:, 0]
            assert row[POSITION, at].tolist() == list(range(len(at)))
            labels = row[LABEL, at]
            assert labels[labels != IGNORED].tolist() == row[ID, at][4:].tolist()
            found.append(tuple(row[ID, at].tolist()))
        assert (row[LABEL, row[SEGMENT] == 0] == IGNORED).all()
    assert sorted(found) == sorted((*prompt, *answer) for prompt, answer in TEXTS)


def test_texts_that_are_too_long_lose_their_ends():
    rows = pack([([1, 2, 3], [4] * 40), ([5] * 50, [6])], 16, torch.Generator())
    assert rows.shape == (2, 4, 16)
    assert sorted((rows[:, LABEL] != IGNORED).sum(1).tolist()) == [0, 13]


def test_a_stream_that_skips_goes_on_where_another_is():
    first, second = Stream(TEXTS, 20, 3), Stream(TEXTS, 20, 3)
    first.take(11)
    second.skip(11)
    assert torch.equal(first.take(7), second.take(7))
    assert first.epoch == second.epoch > 0


def test_a_group_s_loss_is_that_of_its_texts_one_by_one():
    groups = LoraGroups(build_model(), [0, 1], rank=4, alpha=8)
    groups.set(torch.empty_like(groups.values_GP).normal_(0, 0.05, generator=torch.Generator().manual_seed(0)))
    packed = [pack(texts, 20, torch.Generator()) for texts in (TEXTS, OTHERS)]
    rows = min(map(len, packed))
    nats_G, count_G = groups.losses(torch.cat([part[:rows] for part in packed]))
    alone_G, alone_count_G = groups.losses(torch.cat([part[:rows] for part in reversed(packed)]))
    assert count_G.tolist() == alone_count_G.flip(0).tolist()
    assert not torch.allclose(nats_G, alone_G.flip(0))  # the groups have matrices of their own
    one_by_one = torch.zeros(2, dtype=torch.float64)
    for group, part in enumerate(packed):
        for row in part[:rows]:
            for number in range(1, int(row[SEGMENT].max()) + 1):
                single = row[:, row[SEGMENT] == number].clone()
                single[SEGMENT] = 1
                one_by_one[group] += groups.losses(single[None].repeat(2, 1, 1))[0][group].double()
    torch.testing.assert_close(nats_G.double(), one_by_one, rtol=1e-5, atol=1e-4)


def test_training_reduces_the_loss_and_ends_jobs_by_their_own_steps(tmp_path):
    said = []
    training = Training(build_model(), jobs(), SETTINGS, tmp_path)
    facts = training.run(said.append)
    for each in facts:
        assert each.dev_nats < 0.8 * each.base_dev_nats
    assert [(each.name, each.seed, each.steps) for each in facts] == [("math", 0, 20), ("sql", 1, 10)]
    assert [line.split(":")[0].split(",")[0] for line in said] == ["step 0", "step 10 of 20", "step 20 of 20"]
    last = training.progress.history
    assert last[0]["dev"][1] == pytest.approx(last[1]["dev"][1])  # its rate is 0 behind its end
    assert read_facts(tmp_path / "math-0") == facts[0]


def test_a_group_is_trained_as_if_it_were_alone(tmp_path):
    together = Training(build_model(), jobs(), SETTINGS, tmp_path / "both")
    together.run(lambda text: None)
    for group, job in enumerate(jobs()):
        alone = Training(build_model(), [job], SETTINGS, tmp_path / "alone")
        alone.run(lambda text: None)
        torch.testing.assert_close(together.groups.values_GP[group], alone.groups.values_GP[0], atol=2e-4, rtol=1e-3)
        (tmp_path / "alone" / STATE).unlink()


def test_a_training_that_was_cut_off_goes_on(tmp_path, monkeypatch):
    whole = Training(build_model(), jobs(), SETTINGS, tmp_path / "whole")
    whole.run(lambda text: None)

    def cut(text):
        if text.startswith("step 10"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(build_model(), jobs(), SETTINGS, tmp_path / "cut").run(cut)
    assert (tmp_path / "cut" / "math-0" / "adapter_config.json").is_file()
    said = []
    again = Training(build_model(), jobs(), SETTINGS, tmp_path / "cut")
    facts = again.run(said.append)
    assert said[0].startswith("going on from step 10")
    torch.testing.assert_close(again.groups.values_GP, whole.groups.values_GP)
    assert [each.dev_nats for each in facts] == pytest.approx(whole.progress.best_G)
    assert Training(build_model(), jobs(), SETTINGS, tmp_path / "cut").run(lambda text: None) == facts
    with pytest.raises(CheckpointError, match="another training"):
        Training(build_model(), jobs(), replace(SETTINGS, rank=2), tmp_path / "cut").run()
    (tmp_path / "cut" / STATE).write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="damaged"):
        Training(build_model(), jobs(), SETTINGS, tmp_path / "cut").run()


def test_peft_reads_what_was_written_and_says_the_same(tmp_path):
    from peft import PeftModel

    training = Training(build_model(), jobs(), SETTINGS, tmp_path)
    training.run(lambda text: None)
    training.groups.set(training.groups.values_GP.bfloat16().float())  # as the files hold them
    ids = torch.tensor([[1, 5, 6, 11, 11, 7]])
    with torch.no_grad():
        base, said_G = build_model()(ids).logits[0], training.groups.model(ids.repeat(2, 1)).logits
        for group, job in enumerate(jobs()):
            peft_model = PeftModel.from_pretrained(build_model(), str(tmp_path / job.folder))
            torch.testing.assert_close(peft_model(ids).logits[0], said_G[group], atol=1e-4, rtol=1e-4)
            assert not torch.allclose(said_G[group], base, atol=1e-2)
            card = (tmp_path / job.folder / "README.md").read_text()
            assert f"Data: {job.name}" in card
            assert "licence" in card


def test_the_script_trains_experts_blends_and_one_on_all(tmp_path, capsys):
    data, base, out = write_data(tmp_path / "data"), write_base(tmp_path), tmp_path / "out"
    arguments = ["--data", data, "--out", out, "--base", base, "--size", "cpu", "--seed", 1]
    arguments += ["--skills", "math", "all", "blend-sql", "--steps", "math=12", "all=4", "blend-sql=4"]
    assert train.main(list(map(str, arguments))) == 0
    printed = capsys.readouterr().out
    assert "math-1: " in printed
    assert "blend-sql-1: " in printed
    facts = read_facts(out / "math-1")
    assert facts.base == str(base)
    assert facts.dev_nats < facts.base_dev_nats
    composed = tessellm.compose(base, {"math": out / "math-1", "all": out / "all-1"}, rule="product")
    assert len(composed.members) == 3
    assert json.loads((out / "math-1" / "adapter_config.json").read_text())["r"] == 8


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--skills", "mathe"], "did you mean 'math'"),
        (["--steps", "sql=0"], "--steps takes NAME=N"),
        (["--data", "nowhere"], "there is no folder nowhere"),
        (["--rows", "0"], "rows must be at least 1"),
    ],
)
def test_the_script_refuses_what_it_cannot_do(tmp_path, capsys, arguments, told):
    data = write_data(tmp_path / "data")
    given = ["--data", str(data), "--size", "cpu", "--out", str(tmp_path / "out"), *arguments]
    assert train.main(given) == 2
    assert told in capsys.readouterr().err


def test_settings_and_jobs_are_checked(tmp_path):
    with pytest.raises(TessellmError, match="at least one adapter"):
        Training(build_model(), [], SETTINGS, tmp_path)
