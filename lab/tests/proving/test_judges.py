"""The judges on the repository's data: a reference is right, another line's, the prompt and small talk are not."""

import random
from statistics import fmean

import pytest

from tessellm_lab.proving.judges import JUDGES, judge
from tessellm_lab.proving.same_regex import same_on_probes
from tessellm_lab.proving.skills import TWENTY, Places

TALK = "Sure! I'd be happy to help you with that. Could you tell me more?"
LINES = 60


def test_every_skill_has_a_judge() -> None:
    assert set(JUDGES) == set(TWENTY)


@pytest.mark.parametrize("name", TWENTY)
def test_references_are_right_and_other_texts_are_not(name: str) -> None:
    lines = Places.found().examples(name, "unseen", LINES)
    assert min(judge(name, each.prompt, each.answer, each.answer) for each in lines) == 1.0
    order = random.Random(0).sample(range(len(lines)), len(lines))
    others = [(each, lines[n].answer) for each, n in zip(lines, order, strict=True) if each.answer != lines[n].answer]
    assert fmean(judge(name, each.prompt, other, each.answer) for each, other in others) < 0.3
    for text, most in (("", 0.0), (TALK, 0.2)):
        assert fmean(judge(name, each.prompt, text, each.answer) for each in lines) <= most
    assert fmean(judge(name, each.prompt, each.prompt, each.answer) for each in lines) < 0.3


@pytest.mark.parametrize(
    ("name", "written", "answer", "score"),
    [
        ("equation", "88 - 48 = 41", "(88 - 48) = 40", 0.5),
        ("equation", "x = 80 / 2 = 40", "(88 - 48) = 40", 1.0),
        ("isodate", "1992-02-14", "1992-02-14 20:30", 0.5),
        ("clinc", "Label: Account blocked.", "account_blocked", 1.0),
        ("emotion", "Emotion: joy", "joy", 1.0),
        ("intents", '```json\n{"b": 1, "a": 2}\n```', '{"a": 2, "b": 1}', 1.0),
        ("sql", "select a from t;", "SELECT a FROM t", 1.0),
        ("math", "so it is 1,200 dollars", "#### 1200", 1.0),
        ("regex", "/(.*dog.*)/", ".*dog.*", 1.0),
    ],
)
def test_what_is_put_around_an_answer_is_forgiven(name: str, written: str, answer: str, score: float) -> None:
    assert judge(name, "", written, answer) == score


def test_expressions_are_compared_by_what_they_match() -> None:
    assert same_on_probes("[a-e]+", "[abcde][a-e]*")
    assert not same_on_probes("[a-e]+", "[a-f]*")
    assert not same_on_probes("(a", "a")
