"""The rule `mixture` in the composed model: every way to generate, held to one forward pass per token and text."""

from __future__ import annotations

import math

import pytest
import torch

from tessellm.routing.route import RoutedPrompt
from tessellm.rules.components import component_logp, mix, update

from conftest import character_tokenizer
from families import composition, family, random_ids
from routers import HandMade

RULE = {"name": "mixture", "alone": 0.9, "switch_prob": 0.05}
NEW = 12


def routed(archs=("llama", "llama", "llama", "llama"), rule=RULE, router=True, template=True, **options):
    model = composition(family(list(archs)), rule=rule, **options)
    model.router = HandMade("one", "two", "three") if router else None
    model.tokenizer = character_tokenizer() if template else character_tokenizer(chat_template=None)
    return model


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2"])
def model(request):
    return routed([request.param] * 4)


@torch.no_grad()
def log_pi_by_hand(model, ids: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of every member, [M, T, V], and log π behind each token from the last of the prompt on."""
    logp_MTV = torch.stack(
        [model.member(name)(torch.tensor([ids])).logits[0].log_softmax(-1) for name in model.members]
    )
    rule = model.rule.routed
    if model.router is None:
        prior_C = rule.unrouted_prior(len(logp_MTV) - 1)
    else:
        with model.router.tap(model.base) as tap:
            model.base(torch.tensor([ids[:start]]))
        prompt = RoutedPrompt(ids[:start], model.markers.read(ids[:start]).user, tap.take()[0])
        route = model.router.route([prompt])[0]
        active = route.active(rule.alone, rule.most)
        shares = [route.prior[name] if name in active else 0.0 for name in ("base", "one", "two", "three")]
        prior_C = rule.component_prior(torch.tensor([shares]) / sum(shares))[0]
    active = [number for number in (1, 2, 3) if prior_C[number] > 0]
    weights_CK, log_pi_1C = rule.component_weights(3, active), prior_C[None].log()
    log_pi = [log_pi_1C]
    for t in range(start, len(ids)):
        loglik_C = component_logp(logp_MTV[:, t - 1 : t], weights_CK)[:, 0, ids[t]]
        log_pi_1C = update(log_pi_1C, loglik_C[None], prior_C[None], rule.switch_prob)
        log_pi.append(log_pi_1C)
    said = [mix(logp_MTV[:, start - 1 + t : start + t], weights_CK, pi)[0] for t, pi in enumerate(log_pi)]
    return torch.stack(said), torch.cat(log_pi)


def greedy_by_hand(model, ids: list[int], steps: int = NEW) -> list[int]:
    start, ids = len(ids), list(ids)
    for _ in range(steps):
        said, _ = log_pi_by_hand(model, ids, start)
        ids.append(int(said[-1].argmax()))
        if ids[-1] in model.config.eos_token_id:
            break
    return ids


def run(model, ids, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, **options)


def prompts(model, *texts: str) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in texts]
    return model.tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]


def left_padded(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


@torch.no_grad()
def test_greedy_with_and_without_a_cache_and_in_chunks(model):
    ids = torch.tensor(prompts(model, "sort: 3 1 2"))
    expected = greedy_by_hand(model, ids[0].tolist())
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 5}, {"cache_implementation": "static"}):
        assert run(model, ids, **options)[0].tolist() == expected, options


@torch.no_grad()
def test_left_padded_batches_equal_single_rows(model):
    rows = prompts(model, "a", "what is it?", "sum of 3 and 4")
    ids, mask = left_padded(rows)
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 5}):
        batch = run(model, ids, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()
        for row, got in zip(rows, batch, strict=True):
            alone = greedy_by_hand(model, row)[len(row) :]
            assert got[: len(alone)] == alone


@torch.no_grad()
def test_beams_score_what_the_posterior_says(model):
    ids = torch.tensor(prompts(model, "abc", "xyz"))
    out = run(
        model, ids, num_beams=4, num_return_sequences=3, max_new_tokens=6, length_penalty=0.0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    start = ids.shape[1]
    for row, sequence in enumerate(out.sequences.tolist()):
        new = sequence[start:]
        new = new[: new.index(2) + 1] if 2 in new else new
        said, _ = log_pi_by_hand(model, sequence[: start + len(new)], start)
        score = sum(said[t, token].item() for t, token in enumerate(new))
        assert math.isclose(score, out.sequences_scores[row].item(), abs_tol=1e-4)


@torch.no_grad()
def test_assisted_generation_takes_back_what_was_refused(model):
    ids = torch.tensor(prompts(model, "tell me more"))
    expected = greedy_by_hand(model, ids[0].tolist())
    assert run(model, ids, assistant_model=model.base)[0].tolist() == expected
    assert run(model, ids, prompt_lookup_num_tokens=3)[0].tolist() == expected


@torch.no_grad()
def test_a_composition_may_assist(model):
    ids = torch.tensor(prompts(model, "tell me more"))
    plain = model.base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    assisted = model.base.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, assistant_model=model
    )
    assert torch.equal(assisted, plain)


@torch.no_grad()
def test_a_cache_goes_on_with_its_answer_and_begins_another_where_the_user_spoke(model):
    ids = torch.tensor(prompts(model, "first"))
    whole = run(model, ids, max_new_tokens=8, min_new_tokens=8)
    cache = model.new_cache()
    half = run(model, ids, max_new_tokens=3, min_new_tokens=3, past_key_values=cache)
    rest = run(model, half, max_new_tokens=5, min_new_tokens=5, past_key_values=cache)
    assert torch.equal(rest, whole)
    more = torch.tensor([model.tokenizer("\nu: second\na: ", add_special_tokens=False).input_ids])
    again = torch.cat([rest, more], 1)
    expected = greedy_by_hand(model, again[0].tolist(), 5)
    assert run(model, again, max_new_tokens=5, past_key_values=cache)[0].tolist() == expected


@torch.no_grad()
def test_sampling_draws_from_the_mixture(model):
    ids = torch.tensor(prompts(model, "dice"))
    torch.manual_seed(0)
    out = run(
        model, ids, do_sample=True, top_k=0, num_return_sequences=3, return_dict_in_generate=True, output_logits=True
    )
    for row, sequence in enumerate(out.sequences.tolist()):
        said, _ = log_pi_by_hand(model, sequence, ids.shape[1])
        for step, logits_BV in enumerate(out.logits):
            torch.testing.assert_close(logits_BV[row], said[step], rtol=0, atol=2e-4)
            if sequence[ids.shape[1] + step] == 2:
                break


@torch.no_grad()
@pytest.mark.parametrize("router", [True, False])
def test_a_forward_pass_that_is_told_where_the_answer_begins(router):
    model = routed(router=router)
    rows = [[5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 7, 6, 5], [20, 21, 22, 23, 24, 25]]
    starts = [3, 2, 5]
    ids, mask = left_padded(rows)
    pads = [ids.shape[1] - len(row) for row in rows]
    start_B = torch.tensor([start + pad for start, pad in zip(starts, pads, strict=True)])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    whole = model(ids, attention_mask=mask, position_ids=positions, answer_start=start_B).logits
    for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
        expected, _ = log_pi_by_hand(model, row, start)
        torch.testing.assert_close(whole[place, pads[place] + start - 1 :], expected, rtol=0, atol=2e-5)
    kept = model(ids, attention_mask=mask, position_ids=positions, answer_start=start_B, logits_to_keep=2).logits
    torch.testing.assert_close(kept, whole[:, -2:], rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("router", [True, False])
@pytest.mark.parametrize("template", [True, False])
def test_a_forward_pass_that_is_told_nothing_is_causal(router, template):
    model, chatting = routed(router=router, template=template), routed()
    ids = prompts(chatting, "hi there")[0] + [7, 9, 30] + model.tokenizer("\nu: why?\na: ").input_ids + [8, 8, 11]
    whole = model(torch.tensor([ids]), use_cache=False).logits[0]
    for length in range(1, len(ids)):
        part = model(torch.tensor([ids[:length]]), use_cache=False, logits_to_keep=1).logits[0, -1]
        torch.testing.assert_close(part, whole[length - 1], rtol=0, atol=2e-5)
    cache, fed = model.new_cache(), []
    for piece in torch.tensor([ids]).split(5, 1):
        fed.append(model(piece, past_key_values=cache).logits[0])
    torch.testing.assert_close(torch.cat(fed), whole, rtol=0, atol=2e-5)


@torch.no_grad()
def test_behind_the_templates_marks_the_posterior_follows_the_answer():
    model = routed()
    first, second = prompts(model, "hi there")[0], model.tokenizer("\nu: why?\na: ").input_ids
    ids = [*first, 7, 9, 30, *second, 8, 8, 11]
    whole = model(torch.tensor([ids])).logits[0]
    answer, _ = log_pi_by_hand(model, ids[: len(first) + 3], len(first))
    torch.testing.assert_close(whole[len(first) - 1 : len(first) + 3], answer, rtol=0, atol=2e-5)
    later, _ = log_pi_by_hand(model, ids, len(ids) - 3)
    torch.testing.assert_close(whole[-4:], later, rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_prompt_without_an_answer_has_at_each_token_the_prior_of_the_tokens_so_far():
    model = routed()
    ids = model.tokenizer("u: some words").input_ids
    whole = model(torch.tensor([ids])).logits[0]
    for length in range(1, len(ids) + 1):
        expected, _ = log_pi_by_hand(model, ids[:length], length)
        torch.testing.assert_close(whole[length - 1], expected[0], rtol=0, atol=2e-5)


@torch.no_grad()
def test_without_marks_and_router_a_text_is_an_answer_from_its_first_token():
    model = routed(router=False, template=False)
    ids = random_ids(1, 9)
    expected, _ = log_pi_by_hand(model, ids[0].tolist(), 1)
    torch.testing.assert_close(model(ids).logits[0], expected, rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_batch_moves_with_its_cache(model):
    rows = prompts(model, "abcd", "wxyz", "1234")
    answers = [[7, 9, 30], [20, 21, 22], [5, 5, 5]]
    ids = torch.tensor([[*row, *answer] for row, answer in zip(rows, answers, strict=True)])
    start = len(rows[0])

    def follow(change, order):
        cache = model.new_cache()
        model(ids[:, :-1], past_key_values=cache, answer_start=torch.full((3,), start))
        change(cache)
        said = model(ids[order, -1:], past_key_values=cache).logits[:, -1]
        for place, row in enumerate(order):
            expected, _ = log_pi_by_hand(model, ids[row].tolist(), start)
            torch.testing.assert_close(said[place], expected[-1], rtol=0, atol=2e-5)

    follow(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])
    follow(lambda cache: cache.batch_select_indices(torch.tensor([1, 2])), [1, 2])
    follow(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])


@torch.no_grad()
def test_the_pipeline_and_styles():
    from transformers import pipeline

    model = routed(rule={**RULE, "styles": (3,)})
    model.router = HandMade("one", "two")
    write = pipeline("text-generation", model=model, tokenizer=model.tokenizer)
    text = write([{"role": "user", "content": "hi"}], max_new_tokens=5, do_sample=False)[0]["generated_text"][-1]
    ids = torch.tensor(prompts(model, "hi"))
    assert text["content"] == model.tokenizer.decode(run(model, ids, max_new_tokens=5)[0, ids.shape[1] :], True)
