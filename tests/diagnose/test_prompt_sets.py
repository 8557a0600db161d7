"""Prompt files: every format, and every way to be malformed, with the line and the reason."""

import json

import pytest

import tessellm
from tessellm.diagnose.prompts import Example, read_examples
from tessellm.errors import PromptError

from planted import composition


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", '{"prompt": "ab"}\n\n"cd"\n{"prompt": "e", "text": "f"}\r\n{"text": "gh"}'),
        ("p.json", json.dumps([{"prompt": "ab"}, "cd", {"prompt": "e", "text": "f"}, {"text": "gh"}])),
    ],
)
def test_prompts_and_texts(tmp_path, name, content):
    examples, problems = read_examples(write(tmp_path / name, content))
    assert [(each.prompt, each.text) for each in examples] == [("ab", None), ("cd", None), ("e", "f"), ("", "gh")]
    assert problems == []


def test_lines_of_text(tmp_path):
    examples, _ = read_examples(write(tmp_path / "p.txt", b"\xef\xbb\xbfab c\r\n\n  d\n"))
    assert [each.prompt for each in examples] == ["ab c", "  d"]


BAD = {
    '{"prompt": "ab"': "no valid JSON",
    "[1]": "expected a string",
    "17": "expected a string",
    '{"question": "ab"}': "expected a string",
    '{"prompt": 3}': "prompt should be a string; got 3",
    '{"prompt": "a", "text": null}': "text should be a string; got None",
    '""': "the prompt is empty",
    '{"prompt": "a", "text": ""}': "the text is empty. Leave it out",
    "[" * 100_000: "no valid JSON (maximum recursion depth",
    '"a\\ud800"': "character 2 is half a character",
    b'"\xff"': "it is not UTF-8 text",
}


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=map(str, BAD.values()))
def test_malformed_lines_are_named_and_the_rest_runs_if_asked_to(tmp_path, line, reason):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "p.jsonl", b'"ab"\n\n' + line + b'\n"cd"\n')
    with pytest.raises(PromptError) as caught:
        read_examples(path)
    assert f"{path}, line 3" in str(caught.value)
    assert reason in str(caught.value)
    assert "--skip-malformed" in str(caught.value)
    examples, problems = read_examples(path, skip_malformed=True)
    assert [each.prompt for each in examples] == ["ab", "cd"]
    assert len(problems) == 1


def test_texts_of_which_nothing_would_be_judged_are_named():
    given = [{"text": "a"}, {"text": "ab"}, {"prompt": "a", "text": "b"}]
    model = composition("three")
    with pytest.raises(
        PromptError, match=r"prompt 1: too short, it has 1 tokens; the first that is judged .* number 2"
    ):
        tessellm.diagnose(model, given)
    assert tessellm.diagnose(model, given, skip_malformed=True).tokens == 2
    model.tokenizer.add_tokens(["ab"])  # the prompt's last token and the text become one
    with pytest.raises(PromptError, match="prompt 2: too short"):
        tessellm.diagnose(model, given[1:])


def test_many_problems_are_counted(tmp_path):
    with pytest.raises(PromptError, match="and 3 more"):
        read_examples(write(tmp_path / "p.jsonl", "x\n" * 8))


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(PromptError, match="nothing to diagnose"):
        read_examples(write(tmp_path / "p.txt", "\n\n"))
    with pytest.raises(PromptError, match=r"line 1"):
        read_examples(write(tmp_path / "q.jsonl", "x"), skip_malformed=True)


def test_prompts_that_do_not_fit_are_named():
    model = composition("three")
    given = ["ab", Example("a" * 100, None, "here, line 2"), {"prompt": "a", "text": "b" * 200}]
    with pytest.raises(PromptError, match="here, line 2 has 100 tokens and up to 64 more") as caught:
        tessellm.diagnose(model, given)
    assert "prompt 3 has 201 tokens, but there is room for 128 (the shortest context" in str(caught.value)
    assert "Fix: correct them, lower --max-new-tokens, or leave them out" in str(caught.value)
    diagnosis = tessellm.diagnose(model, given, skip_malformed=True, max_new_tokens=5)
    assert diagnosis.texts == 2
    assert len(diagnosis.skipped) == 1
