"""`tessellm diagnose` and `tessellm generate --trace`, through the command line."""

import json
from pathlib import Path

import pytest

from conftest import character_tokenizer
from planted import composition, prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("planted") / "model"
    model = composition("three", "other_three", "six", rule="product")
    model.save_pretrained(path, self_contained=True)
    character_tokenizer().save_pretrained(path)
    return path


def test_diagnose(cli, folder, tmp_path):
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts()]
    (tmp_path / "p.jsonl").write_text("\n".join([*lines, '{"prompt": 1}']))
    ran = cli("diagnose", folder, tmp_path / "p.jsonl", "-o", tmp_path / "r.html")
    assert ran.code == 2
    assert "p.jsonl, line 13: prompt should be a string; got 1" in ran.err
    assert not (tmp_path / "r.html").exists()
    ran = cli(
        "diagnose", folder, tmp_path / "p.jsonl", "-o", tmp_path / "r.html", "--json", tmp_path / "r.json",
        "--skip-malformed", "--max-new-tokens", 24,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "skipped:" in ran.err
    assert "three and other_three contradict each other" in ran.out
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["texts"] == 12
    assert len(content["skipped"]) == 1
    assert "<title>Diagnosis of a composition</title>" in (tmp_path / "r.html").read_text()


def test_a_file_that_is_not_there(cli, folder, tmp_path):
    ran = cli("diagnose", folder, tmp_path / "none.jsonl")
    assert ran.code == 2
    assert "cannot be read: No such file" in ran.err


def test_generate_with_its_trace(cli, folder, tmp_path):
    ran = cli("generate", folder, "ab", "--trace", "--max-new-tokens", 6, "--json", tmp_path / "t.json")
    assert ran.code == 0, ran.err
    (row,) = json.loads((tmp_path / "t.json").read_text())
    owners = [token["owner"] for token in row["trace"]]
    assert owners[0] == "base"
    assert owners[1] in ("three", "other_three")
    assert ran.out == f"c[{owners[1]}|{row['text'][1]}]def[six|6]\n"
    several = cli("generate", folder, "ab", "de", "--trace", "--max-new-tokens", 3)
    assert several.out == f"abc[{owners[1]}|{row['text'][1]}]d\ndef[six|6]g\n"
