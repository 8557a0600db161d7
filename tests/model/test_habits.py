"""How experts act on usual prompts: what is measured, where there is nothing to measure, and what is saved of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import tessellm
from draft_distribution import draft_always
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.model import habits
from tessellm.model.usual import PROMPTS
from tessellm.rules.belief import Belief

from conftest import build_model, character_tokenizer, perturbed, save_member


def test_composing_by_belief_measures_habits_and_saves_them(chatting, tmp_path):
    model = tessellm.compose(**chatting, rule="belief")
    rule = model.rule.rule
    assert isinstance(rule, Belief)
    assert rule.calibrated
    assert len(rule.habits) == 2
    prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": "ABC"}], add_generation_prompt=True)
    ids = prompt["input_ids"] if not isinstance(prompt, list) else prompt
    assert tuple(ids[: len(rule.opening)]) == rule.opening
    assert tuple(ids[-len(rule.turn) :]) == rule.turn
    assert set(spoken_again(model.tokenizer, rule.user)) == {"Yes", "HOW?"}
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.rule == model.rule
    tokens = torch.tensor([ids])
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def spoken_again(tokenizer, user):
    """What comes right before and behind the only place of these tokens."""
    said = [("user", "HI"), ("assistant", "Yes"), ("user", "HOW?")]
    text = tokenizer.apply_chat_template([{"role": role, "content": each} for role, each in said], tokenize=False)
    before, _, behind = text.rpartition(tokenizer.decode(list(user)))
    return before[-3:], behind[:4]


def test_scores_of_the_same_prompts_spread_around_zero(chatting):
    model = tessellm.compose(**chatting, rule="belief")
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = model.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    scores = []
    for text in texts:
        tokens = torch.tensor([model.tokenizer(text, add_special_tokens=False).input_ids])
        logp = model(tokens, output_member_logprobs=True).member_logprobs
        _, _, why = model.rule.explain(logp, tokens, torch.ones_like(tokens, dtype=torch.bool), None)
        scores.append(why.more["score_BTK"][0, -1])
    torch.testing.assert_close(torch.stack(scores).mean(0), torch.zeros(2), atol=1e-2, rtol=0)


def test_the_engine_writes_what_generate_writes(chatting):
    model = tessellm.compose(**chatting, rule="belief")
    texts = ("HELLO", "a longer question, which tells more", "7")
    prompts = [
        model.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in texts
    ]
    requests = Engine(model, slots=2).generate(prompts, Sampling(12))
    for prompt, request in zip(prompts, requests, strict=True):
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert request.tokens == whole[: len(request.tokens)].tolist()


def test_conversations_are_written_alike_also_while_members_rest(chatting):
    model = tessellm.compose(**chatting, rule="belief")
    turns = [{"role": role, "content": text} for role, text in (("user", "HOW?"), ("assistant", "so, 42\n"))]
    asked = {"role": "user", "content": "\n\nAND " + "abc " * 20}
    chats = [
        [*turns, asked],
        [*turns * 6, asked],
        turns,
        [{"role": "system", "content": "x"}],
        [*turns, turns[0] | {"content": ""}],
    ]
    prompts = [
        model.tokenizer(text, add_special_tokens=False).input_ids for text in in_template(model.tokenizer, chats)
    ]
    awake = Engine(model, slots=1, speculation=Speculation("none")).generate(prompts, Sampling(12))
    resting = draft_always(Engine(model, slots=3, speculation=Speculation("belief")), 5).generate(prompts, Sampling(12))
    for prompt, one, other in zip(prompts, awake, resting, strict=True):
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert one.tokens == other.tokens == whole[: len(one.tokens)].tolist()


def in_template(tokenizer, chats):
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)


def test_setting_the_rule_by_its_name_learns_the_habits_of_weighted_experts(chatting):
    model = tessellm.compose(**chatting)
    model.set_rule("belief")
    assert model.rule.rule == tessellm.compose(**chatting, rule="belief").rule.rule
    model.set_rule("belief", weights=[1.0, 0.5])
    other = model.rule.rule
    assert other.calibrated
    assert other.habits[1] != tessellm.compose(**chatting, rule="belief").rule.rule.habits[1]
    model.set_rule("product")
    assert model.config.rule == {"name": "product"}


@pytest.mark.parametrize(("rows", "at_once"), [(1, 1), (100, 1 << 10), (1 << 20, 1 << 30)])
def test_habits_are_the_same_however_many_rows_are_read_at_once(chatting, monkeypatch, rows, at_once):
    wanted = tessellm.compose(**chatting, rule="belief").rule.rule.habits
    monkeypatch.setattr(habits, "ROWS_ON_CPU", rows)
    monkeypatch.setattr(habits, "READ_ON_CPU", at_once)
    found = tessellm.compose(**chatting, rule="belief").rule.rule.habits
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-5)


def test_without_a_chat_template_there_is_nothing_to_measure(chatting, tmp_path):
    base = build_model(max_position_embeddings=512)
    plain = character_tokenizer(chat_template=None)
    sources = [str(save_member(perturbed(base, seed), tmp_path / str(seed), plain)) for seed in range(3)]
    model = tessellm.compose(sources[0], {"one": sources[1], "two": sources[2]}, rule="belief")
    assert model.rule.rule == Belief()


@pytest.mark.parametrize("refused", ["true", "'capital' in messages[0]['content']"])
def test_a_template_that_refuses_a_prompt_measures_nothing(tmp_path, refused):
    """As those do that want a system prompt first."""
    base, refusing = build_model(max_position_embeddings=512), character_tokenizer()
    refusing.chat_template = (
        f"{{% if {refused} %}}{{{{ raise_exception('no') }}}}{{% endif %}}" + refusing.chat_template
    )
    sources = [str(save_member(perturbed(base, seed), tmp_path / str(seed), refusing)) for seed in range(3)]
    experts = {"one": sources[1], "two": sources[2]}
    assert tessellm.compose(sources[0], experts, rule="belief").rule.rule == Belief()
    assert tessellm.compose(sources[0], experts).rule.rule.name != "belief"


def test_a_template_that_the_user_gives_says_where_answers_begin(tmp_path):
    base = build_model(max_position_embeddings=512)
    plain = character_tokenizer(chat_template=None)
    sources = [str(save_member(perturbed(base, seed), tmp_path / str(seed), plain)) for seed in range(3)]
    experts = {"one": sources[1], "two": sources[2]}
    model = tessellm.compose(sources[0], experts, chat_template="ask: {{ messages[-1]['content'] }}\n=: ")
    assert model.rule.rule.calibrated
    assert plain.decode(model.rule.rule.turn) == "\n=: "
    assert plain.decode(model.rule.rule.opening) == "ask: "
    assert tessellm.compose(sources[0], experts).rule.rule.name != "belief"


def test_a_context_too_short_for_the_prompts_measures_nothing(tmp_path):
    base, tokenizer = build_model(max_position_embeddings=16), character_tokenizer()
    sources = [str(save_member(perturbed(base, seed), tmp_path / str(seed), tokenizer)) for seed in range(3)]
    model = tessellm.compose(sources[0], {"one": sources[1], "two": sources[2]}, rule="belief")
    assert model.rule.rule == Belief()
