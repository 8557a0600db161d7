"""Diagnoses of members trained here, whose interference was planted: found, named, located; or called clean."""

import json

import pytest
import torch

import tessellm
from tessellm.diagnose.rates import rate
from tessellm.diagnose.trace import finite
from tessellm.errors import PromptError

from conftest import build_model
from planted import composition, prompts

RULES = ["product", "mixture"]


def diagnosed(*experts: str, rule: str = "product", **options):
    return tessellm.diagnose(composition(*experts, rule=rule), prompts(), max_new_tokens=24, **options)


def test_a_clean_pair_is_called_clean():
    diagnosis = diagnosed("three", "six")
    assert diagnosis.clean
    assert [advice.kind for advice in diagnosis.advice] == ["clean"]
    (pair,) = diagnosis.found.pairs
    assert pair.overlap.value == pair.contradict.value == pair.repeat.value == 0
    assert pair.places == pair.texts == ()
    assert diagnosis.found.active["three"].value > 0.05
    assert diagnosis.found.owned["three"].value == pytest.approx(diagnosis.found.active["three"].value, abs=0.02)


def test_a_clean_pair_that_is_unsure_of_its_texts_is_told_so():
    diagnosis = diagnosed("three", "six", temperature=3.0)
    assert diagnosis.predicted.value < 0.8
    assert "Nothing needs to be changed" not in diagnosis.advice[0].text
    assert diagnosis.advice[-1].kind == "unsure"
    assert f"Only {diagnosis.predicted} of these texts" in diagnosis.advice[-1].text


@pytest.mark.parametrize("rule", RULES)
def test_planted_interference_is_found_named_and_located(rule):
    diagnosis = diagnosed("six", "three", "other_three", rule=rule)
    worst = diagnosis.advice[0]
    assert (worst.kind, worst.experts) == ("contradict", ("three", "other_three"))
    assert not diagnosis.clean
    assert any(advice.kind == "rule" for advice in diagnosis.advice) == (rule == "product")
    pair = next(pair for pair in diagnosis.found.pairs if pair.experts == ("three", "other_three"))
    others = [other for other in diagnosis.found.pairs if other is not pair]
    assert all(other.contradict.value == 0 for other in others)
    after_c = 0
    for trace in diagnosis.traces:
        texts = trace.token_texts(0)
        after_c += sum(texts[t - 1] == "c" for t in trace.scored[0].nonzero()[:, 0].tolist())
    assert pair.contradict.value == pytest.approx(after_c / diagnosis.tokens)
    for place in pair.places:
        assert place.before.endswith("c")
        assert place.token in "37"
        assert diagnosis.traces[place.text].token_texts(0)[place.position] == place.token
    assert f"prompt {pair.places[0].text + 1}" in worst.text


def test_two_experts_with_one_skill_are_told_apart_from_a_contradiction():
    diagnosis = diagnosed("three", "three_again")
    assert (diagnosis.advice[0].kind, diagnosis.advice[0].experts) == ("repeat", ("three", "three_again"))


def test_an_idle_expert_is_named():
    assert ("idle", ("idle",)) in [(advice.kind, advice.experts) for advice in diagnosed("three", "idle").advice]


def test_an_expert_of_weight_zero_is_told_so():
    model = composition("three", "six", rule="product")
    model.set_rule(weights=[1.0, 0.0])
    found = tessellm.diagnose(model, prompts(), max_new_tokens=24)
    said = [advice.text for advice in found.advice if advice.kind == "idle"]
    assert said == ["six has the weight 0: it says nothing, and costs a model. Give it a weight, or drop it."]


@pytest.mark.parametrize("prompts", ["abc", None, 3])
def test_prompts_are_a_list(prompts):  # a string would be read letter by letter
    with pytest.raises(PromptError, match="expected a list of prompts; got"):
        tessellm.diagnose(composition("three", "six"), prompts)


def test_one_text_is_one_text():
    model = composition("three", "six", rule="mixture")
    alone = tessellm.diagnose(model, prompts()[:1], max_new_tokens=8)
    assert alone.advice[-1].text.startswith("1 text is too few")
    assert "1 text, " in alone.to_html()


def test_an_expert_against_all_is_named():
    diagnosis = diagnosed("three", "other_three", "three_again")
    assert ("crowd", ("other_three",)) in [(advice.kind, advice.experts) for advice in diagnosis.advice]


def test_texts_may_be_given_and_prompts_are_not_scored():
    model = composition("three", "six")
    given = [{"prompt": "ab", "text": "c3def"}, {"text": "abcdef6gh"}]
    diagnosis = tessellm.diagnose(model, given)
    assert diagnosis.tokens == 5 + 8
    assert diagnosis.traces[0].token_texts(0) == [*"abc3def"]
    alone = tessellm.trace(model, torch.tensor([model.tokenizer("abc3def")["input_ids"]]))
    assert torch.allclose(diagnosis.traces[0].log_z[0, 2:], alone.log_z[0, 2:], atol=1e-5)
    assert [advice.kind for advice in diagnosis.advice][-1] == "few"
    mixed = tessellm.diagnose(model, ["abc", {"text": "abcd"}, "bcd"], max_new_tokens=4)
    assert [len(trace.token_texts(0)) for trace in mixed.traces] == [7, 4, 7]


def test_batches_and_seeds_change_nothing_that_they_should_not():
    one, other = diagnosed("three", "other_three", batch_size=1), diagnosed("three", "other_three", batch_size=5)
    assert [advice.text for advice in one.advice] == [advice.text for advice in other.advice]
    assert one.found.log_z.value == pytest.approx(other.found.log_z.value, abs=1e-4)


def test_it_is_json():
    content = json.loads(diagnosed("three", "six").to_json())
    assert content["clean"] is True
    assert content["texts"] == 12
    assert content["found"]["pairs"][0]["experts"] == ["three", "six"]


def test_json_lacks_infinity_and_tuples():
    assert finite({"epsilon": (0.5, float("inf")), "nan": [float("nan")], "clean": True}) == {
        "epsilon": [0.5, None], "nan": [None], "clean": True,
    }  # fmt: skip


def test_without_a_tokenizer_it_says_so():
    model = tessellm.compose(build_model("gpt2"), {"one": build_model("gpt2", 1)})
    with pytest.raises(PromptError, match="tokenizer"):
        tessellm.diagnose(model, ["abc"])


def test_rates_are_clustered_by_text():
    text = torch.arange(20).repeat_interleave(50)
    by_text = (text < 10).float()
    apart = rate(by_text, text, 20)
    assert apart.low < 0.35 < 0.65 < apart.high  # twenty coins, not a thousand
    assert rate(torch.zeros(1000), text, 20).high == pytest.approx(1 - 0.05 ** (1 / 20))
    assert rate(torch.ones(1000), text, 20).low == pytest.approx(0.05 ** (1 / 20))
