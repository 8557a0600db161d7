"""Data are read with clear errors; answers are judged as the page says."""

import gzip
import json

import pytest

from tessellm.demo.adapters import REPOSITORY, adapters_folder
from tessellm.errors import PromptError, TessellmError
from tessellm_lab.real.programs import exit_codes
from tessellm_lab.real.skills import SKILLS, Example, data_folder, read
from tessellm_lab.real.tasks import (
    PASSED,
    encode,
    end_of_answer,
    function_prompt,
    judge,
    number_of,
    occurs,
    program,
    share_of_capitals,
)

from conftest import character_tokenizer
from real_cases import PROBLEM, write_data, write_lines


def test_examples_are_read_and_encoded_with_the_end_token(tmp_path):
    examples = read(write_data(tmp_path), "math", "test", 2)
    assert [example.prompt for example in examples] == ["add 0 and 1", "add 1 and 1"]
    tokenizer = character_tokenizer()
    (prompt, answer), _ = encode(tokenizer, examples)
    assert tokenizer.decode(prompt) == "u: add 0 and 1\na: "
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer[:-1]) == examples[0].answer
    assert read(tmp_path, "humaneval", "test")[0].facts["entry_point"] == "one"


def test_answers_end_as_the_chat_template_ends_them_whatever_the_end_token_is_called():
    template = "{% for m in messages %}<s>{{ m['content'] }}</s>\n{% endfor %}"
    wrong = character_tokenizer(chat_template=template, eos_token="<s>", extra_special_tokens=["</s>"])
    assert wrong.eos_token_id == 1
    assert end_of_answer(wrong) == 2
    assert end_of_answer(character_tokenizer()) == 2  # whose template marks no end


def test_wrong_files_are_one_message(tmp_path):
    with pytest.raises(PromptError, match=r"math\.test\.jsonl\.gz is missing"):
        read(tmp_path, "math", "test")
    (tmp_path / "math.test.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(PromptError, match="no gzip file"):
        read(tmp_path, "math", "test")
    whole = gzip.compress(b'{"prompt": "a", "answer": "b"}\n' * 999)
    (tmp_path / "math.test.jsonl.gz").write_bytes(whole[:40])
    with pytest.raises(PromptError, match="cut off"):
        read(tmp_path, "math", "test")
    write_lines(tmp_path / "math.test.jsonl.gz", [{"prompt": "a"}])
    with pytest.raises(PromptError, match="line 1: expected"):
        read(tmp_path, "math", "test")
    write_lines(tmp_path / "math.test.jsonl.gz", [{"prompt": "a", "answer": 3}])
    with pytest.raises(PromptError, match="expected texts"):
        read(tmp_path, "math", "test")


def test_folders_come_from_the_caller_the_environment_or_the_repository(tmp_path, monkeypatch):
    assert data_folder(tmp_path) == tmp_path
    monkeypatch.setenv("TESSELLM_REAL_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.setenv("TESSELLM_REAL_ADAPTERS", str(tmp_path / "none"))
    with pytest.raises(TessellmError, match="TESSELLM_REAL_ADAPTERS"):
        adapters_folder()


@pytest.mark.parametrize(
    ("name", "text", "answer", "right"),
    [
        ("math", "so\n#### 1,200", "#### 1200", 1),
        ("math", "#### $5", "#### 5", 1),
        ("math", "#### 5.50", "#### 5.5", 1),
        ("math", "#### -3", "#### 3", 0),
        ("math", "it is 5", "#### 5", 0),
        ("bash", "ls  -l \n", "ls -l", 1),
        ("bash", "LS -l", "ls -l", 0),
        ("sql", "select A  from T", "SELECT a FROM t", 1),
        ("sql", "SELECT a", "SELECT b", 0),
        ("intents", '{"b": 1, "a": 2}', '{"a": 2, "b": 1}', 1),
        ("intents", "no object", '{"a": 2}', 0),
        ("intents", "[1]", "[1]", 0),
    ],
)
def test_answers_are_judged(name, text, answer, right):
    assert judge(name, text, answer) == right


def test_blends_are_judged_without_case():
    assert judge("intents", '{"A": "X"}', '{"a": "x"}', fold=True) == 1
    assert judge("intents", '{"A": "X"}', '{"a": "x"}') == 0
    assert judge("capitals", "ABcd 12", "") == 0.5
    assert share_of_capitals("12") == 0
    assert number_of("#### 0.5") == 0.5


@pytest.mark.parametrize(
    ("name", "answer"),
    [("math", "#### 12"), ("bash", "ls -l | wc"), ("sql", "SELECT a FROM t"), ("intents", '{"a": {"b": 1}}')],
)
def test_an_answer_is_found_among_others(name, answer):
    text = 'First: #### 7\n\nls  -l | wc\nselect A from t; {"x": 1} {"a": {"b": 1}}\n#### 12'
    assert occurs(name, text, answer) == 1
    assert occurs(name, "First: #### 7 { select", answer) == 0


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("    return 1\n", True),
        ("def one():\n    return 1\n", True),
        ("Sure:\n```python\ndef one():\n    return 1\n```\nDone.", True),
        ("    return 2\n", False),
        ("    import sys; sys.exit(0)\n", False),
        ("    while True: pass\n", False),
        ("    return (\n", False),
    ],
)
def test_functions_are_run_confined_with_their_tests(text, passes):
    fields = dict(PROBLEM)
    problem = function_prompt(Example(fields.pop("prompt"), fields["canonical_solution"], fields))
    assert problem.prompt.startswith("Complete this Python function.\ndef one()")
    codes = exit_codes([program(problem, text)], seconds=2.0, workers=1)
    assert [code == PASSED for code in codes] == [passes]


def test_no_programs_need_no_run():
    assert exit_codes([]) == []


def test_the_committed_adapters_fit_the_base_and_are_small():
    for name in SKILLS:
        folder = REPOSITORY / "adapters" / "smollm2" / name
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert config["r"] <= 16
        assert (folder / "adapter_model.safetensors").stat().st_size <= 6_000_000
        assert "licence" in (folder / "README.md").read_text()
