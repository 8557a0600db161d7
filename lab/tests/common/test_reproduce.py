"""`tessellm reproduce`: names, exit codes, the page of all claims."""

import json

import pytest
import torch

from tessellm.errors import TessellmError
from tessellm_lab.common import registry
from tessellm_lab.common.claims import Claim, Result
from tessellm_lab.common.page import write_page

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c4944415408d763f8cfc000000301010018dd8db00000000049454e44ae426082"
)


def made(out, name="letters", holds=True):
    (out / f"{name}.png").write_bytes(PIXEL)
    claims = [Claim("a", "x < y & <script>", 0.25, "≥ 0.2", holds), Claim("b", "measured", [1, 2])]
    return Result(name, claims, 3, "cpu", 1.5, [f"{name}.png"])


def test_every_experiment_can_be_imported_and_run():
    for experiment in registry.EXPERIMENTS.values():
        module = __import__(f"tessellm_lab.{experiment.module}", fromlist=["run"])
        assert callable(module.run)


def test_a_result_carries_what_it_was_measured_on(tmp_path):
    content = made(tmp_path).write(tmp_path)
    stored = json.loads((tmp_path / "letters.json").read_text())
    assert stored["seed"] == 3
    assert stored["claims"][0] == {
        "id": "a", "statement": "x < y & <script>", "value": 0.25, "target": "≥ 0.2", "holds": True,
    }  # fmt: skip
    assert {"commit", "versions", "hardware"} <= set(content)


def test_the_page_shows_every_claim_and_escapes_it(tmp_path):
    made(tmp_path).write(tmp_path)
    made(tmp_path, "styles", holds=False).write(tmp_path)
    text = write_page(["letters", "styles"], tmp_path).read_text()
    assert "1 hold, 1 do not" in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert text.count("data:image/png;base64,") == 2
    assert "does not hold" in text


@pytest.mark.parametrize("error", [TessellmError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("wrote", [True, False])
def test_a_run_that_fails_leaves_no_empty_folder(tmp_path, monkeypatch, error, wrote):
    import tessellm_lab.letters.experiment as experiment

    def fails(seed, out, size, log):
        if wrote:
            (out / "part").touch()
        raise error

    monkeypatch.setattr(experiment, "run", fails)
    (tmp_path / "there").mkdir()
    for folder in ("there", "new/folder"):
        with pytest.raises(type(error)):
            registry.run_experiment("letters", 0, tmp_path / folder, "cpu")
    assert (tmp_path / "there").is_dir()
    assert (tmp_path / "new").exists() == wrote


@pytest.mark.parametrize("holds", [True, False])
def test_the_exit_code_says_whether_all_claims_hold(cli, tmp_path, monkeypatch, holds):
    import tessellm_lab.letters.experiment as experiment

    monkeypatch.setattr(experiment, "run", lambda seed, out, size, log: made(out, holds=holds))
    ran = cli("reproduce", "letters", "--out", tmp_path, "--json", tmp_path / "all.json")
    assert ran.code == (0 if holds else 1)
    assert json.loads((tmp_path / "all.json").read_text())["name"] == "letters"
    assert (tmp_path / "letters.json").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name", ["bridge", "scale", "skills", "many-experts", "images", "endings", "rule-cost", "prediction"]
)
def test_the_full_size_is_refused_where_there_is_no_gpu(cli, tmp_path, name):
    ran = cli("reproduce", name, "--size", "full", "-o", tmp_path / "out")
    assert ran.code == 2
    assert "--size full trains on a GPU, and PyTorch finds none here" in ran.err
    assert not (tmp_path / "out").exists()


def test_wrong_names_and_sizes_are_refused(cli, tmp_path):
    assert "did you mean 'letters'" in cli("reproduce", "leters").err
    assert cli("reproduce", "leters").code == 2
    assert cli("reproduce").code == 2
    assert cli("reproduce", "letters", "--all").code == 2
    assert "expected one of cpu, full" in cli("reproduce", "letters", "--size", "huge").err
    for command in ("reproduce letters", "tune m d", "generate m p", "probe m d"):
        for seed in ("-1", str(2**32)):  # torch would draw what it draws for another seed
            refused = cli(*command.split(), "--seed", seed)
            assert refused.code == 2
            assert "Invalid value for '--seed'" in refused.err
    listed = cli("reproduce", "--list")
    assert listed.code == 0
    assert all(name in listed.out for name in registry.EXPERIMENTS)


def test_all_runs_the_marked_ones_and_writes_one_page(cli, tmp_path, monkeypatch):
    import tessellm_lab.letters.experiment as letters
    import tessellm_lab.trig.experiment as trig

    monkeypatch.setattr(letters, "run", lambda seed, out, size, log: (log("heard"), made(out))[1])
    monkeypatch.setattr(trig, "run", lambda seed, out, size, log: made(out, "trig"))
    few = {name: registry.EXPERIMENTS[name] for name in ("letters", "trig", "skills")}
    monkeypatch.setattr(registry, "EXPERIMENTS", few)
    ran = cli("reproduce", "--all", "--out", tmp_path)
    assert ran.code == 0
    assert "heard" in ran.err
    assert "trig (2 of 2)" in ran.err
    assert "skills" not in ran.out
    text = (tmp_path / "index.html").read_text()
    assert text.count("<section") == 2
    assert "App. C.1" in text
    assert "http" not in text  # nothing is fetched


def test_claims_wrap_at_the_width_of_the_screen(cli, tmp_path, monkeypatch):
    import tessellm_lab.letters.experiment as experiment

    claim = Claim("long", "a statement that goes on " * 8, 0.123456789, "≥ 0.1", True)
    monkeypatch.setattr(experiment, "run", lambda *given: Result("letters", [claim], 0, "cpu", 1.0))
    monkeypatch.setattr("tessellm.commands.shared.out._width", 80)
    lines = cli("reproduce", "letters", "--out", tmp_path).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  holds ")
    assert "0.1235 (target ≥ 0.1)" in " ".join(line.strip() for line in lines)
