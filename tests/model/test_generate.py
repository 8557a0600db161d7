"""Every mode of generate(), each against the same decoding done by hand from composed log-probabilities."""

import math

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from tessellm.errors import GenerationError, PromptError

from chi_square import chi_square_p_value
from conftest import build_model
from families import composition, family, random_ids
from stateful import BestPredictor

FAMILIES = [["gpt2"] * 3, ["llama"] * 3, ["gemma2"] * 3, ["qwen2", "gpt2", "llama"]]
RULES = ["product", BestPredictor(window=8)]
NEW = 30  # with prompts of 24, past the tiny Gemma's window of 16


@pytest.fixture(scope="module", params=range(len(FAMILIES)), ids=lambda n: "+".join(dict.fromkeys(FAMILIES[n])))
def models(request):
    return family(FAMILIES[request.param])


@pytest.fixture(scope="module", params=RULES, ids=["product", "stateful"])
def model(request, models):
    return composition(models, [1.0, 0.8], rule=request.param)


def greedy_by_hand(model, ids: torch.Tensor, steps: int = NEW) -> torch.Tensor:
    """No cache, no generate: the whole text again for every token."""
    ends = torch.tensor(model.config.eos_token_id)
    finished = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(steps):
        token_B = model(ids, use_cache=False).logits[:, -1].argmax(-1).masked_fill(finished, 0)
        ids = torch.cat([ids, token_B[:, None]], dim=1)
        finished |= torch.isin(token_B, ends)
        if finished.all():
            break
    return ids


def run(model, ids, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, **options)


@torch.no_grad()
def test_greedy_cached_and_uncached(model):
    ids = random_ids()
    expected = greedy_by_hand(model, ids)
    assert torch.equal(run(model, ids), expected)
    assert torch.equal(run(model, ids, use_cache=False), expected)
    assert torch.equal(run(model, ids, cache_implementation="static"), expected)
    assert torch.equal(run(model, ids, prefill_chunk_size=7), expected)


@torch.no_grad()
def test_left_padded_batches_equal_single_rows(model):
    rows = [random_ids(1, length, seed=length)[0] for length in (3, 11, 24)]
    ids = torch.stack([torch.cat([torch.zeros(24 - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([torch.cat([torch.zeros(24 - len(row)), torch.ones(len(row))]) for row in rows]).long()
    batch = run(model, ids, attention_mask=mask)[:, 24:]
    for row, got in zip(rows, batch, strict=True):
        alone = run(model, row[None])[0, len(row) :]
        assert torch.equal(got[: len(alone)], alone)
        assert (got[len(alone) :] == 0).all()


@torch.no_grad()
def test_beam_search_scores_are_the_composed_log_probabilities(model):
    ids = random_ids(2, 9)
    out = run(
        model,
        ids,
        num_beams=4,
        num_return_sequences=3,
        max_new_tokens=8,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for row, sequence in enumerate(out.sequences):
        new = sequence[9:].tolist()
        new = new[: new.index(2) + 1] if 2 in new else new
        logp_TV = model(sequence[None, : 9 + len(new)], use_cache=False).logits[0]
        score = sum(logp_TV[8 + t, token].item() for t, token in enumerate(new))
        assert math.isclose(score, out.sequences_scores[row].item(), abs_tol=1e-4)
    assert out.sequences_scores[0] >= out.sequences_scores[1]


@torch.no_grad()
def test_one_beam_search_equals_exhaustive_search(models):
    """With as many beams as tokens, two steps of beam search are exact."""
    model = composition(models)
    ids = random_ids(1, 6)
    vocabulary = model.config.vocab_size
    first_V = model(ids).logits[0, -1]
    both_VV = torch.stack(
        [first_V[v] + model(torch.cat([ids, torch.tensor([[v]])], 1)).logits[0, -1] for v in range(vocabulary)]
    )
    both_VV[2] = -torch.inf  # the end token ends
    best = divmod(both_VV.argmax().item(), vocabulary)
    found = run(model, ids, num_beams=vocabulary, max_new_tokens=2, min_new_tokens=2, length_penalty=0.0)
    assert tuple(found[0, 6:].tolist()) == best


@torch.no_grad()
def test_assisted_generation_with_the_base_as_assistant(model):
    ids = random_ids(1)
    plain = run(model, ids)
    assert torch.equal(run(model, ids, assistant_model=model.base), plain)
    assert torch.equal(run(model, ids, prompt_lookup_num_tokens=3), plain)
    with pytest.raises(ValueError, match=r"not supported with Static cache|static cache cannot go back"):
        run(model, ids, assistant_model=model.base, cache_implementation="static")


@torch.no_grad()
def test_sampling_follows_the_exact_distribution():
    """Pearson's test on 20,000 first tokens; a wrong weight is found by the same test."""
    model = composition(family(["llama"] * 3), [1.0, 0.8])
    ids = random_ids(1, 7)
    torch.manual_seed(0)
    drawn = run(model, ids.expand(20_000, -1), do_sample=True, top_k=0, max_new_tokens=1)[:, -1]
    count_V = torch.bincount(drawn, minlength=model.config.vocab_size).double()
    right_V = model(ids).logits[0, -1].double().exp()
    model.set_rule(weights=[0.6, 0.8])
    wrong_V = model(ids).logits[0, -1].double().exp()
    model.set_rule(weights=[1.0, 0.8])
    assert chi_square_p_value(count_V, right_V) > 1e-4
    assert chi_square_p_value(count_V, wrong_V) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1e-40, 9e-5, math.inf])
def test_a_temperature_that_leaves_no_law_is_refused(temperature):
    model, ids = composition(family(["llama"] * 2)), random_ids(1, 4)
    with pytest.raises(GenerationError, match=r"decodes greedily, or from 0.0001"):
        run(model, ids, do_sample=True, temperature=temperature)
    coldest = run(model, ids, do_sample=True, temperature=1e-4, top_k=0)
    assert torch.equal(coldest, run(model, ids))


def test_speculative_sampling_follows_the_exact_distribution():
    """First tokens of assisted sampling, where a draft of the base may have been accepted or refused."""
    model = composition(family(["llama"] * 3), [1.0, 0.8])
    ids = random_ids(1, 7)
    generation = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": 2,
        "min_new_tokens": 2,
        "assistant_model": model.base,
    }
    torch.manual_seed(1)
    drawn = torch.stack([run(model, ids, **generation)[0, 7] for _ in range(300)])
    count_V = torch.bincount(drawn, minlength=model.config.vocab_size).double()
    p_V = model(ids).logits[0, -1].double().exp()
    p_V[2] = 0  # min_new_tokens forbids the end token
    assert chi_square_p_value(count_V, p_V / p_V.sum()) > 1e-4


@torch.no_grad()
def test_several_return_sequences_and_seeds(model):
    ids = random_ids(2)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5}
    torch.manual_seed(3)
    once = run(model, ids, **options)
    torch.manual_seed(3)
    assert torch.equal(once, run(model, ids, **options))
    assert once.shape[0] == 6


@torch.no_grad()
def test_scores_are_the_composed_log_probabilities(model):
    ids = random_ids()
    out = run(model, ids, max_new_tokens=6, return_dict_in_generate=True, output_scores=True, output_logits=True)
    logp_BTV = model(out.sequences, use_cache=False).logits
    for step, (scores_BV, logits_BV) in enumerate(zip(out.scores, out.logits, strict=True)):
        torch.testing.assert_close(scores_BV, logp_BTV[:, 23 + step], rtol=0, atol=2e-5)
        torch.testing.assert_close(logits_BV, logp_BTV[:, 23 + step], rtol=0, atol=2e-5)


class Ban(LogitsProcessor):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores):
        return scores.index_fill(-1, torch.tensor([self.token]), -torch.inf)


@torch.no_grad()
def test_logits_processors_several_end_tokens_and_streamers(model, tiny_tokenizer, capsys):
    ids = random_ids(1)
    plain = run(model, ids)[0, 24:].tolist()
    banned = run(model, ids, logits_processor=LogitsProcessorList([Ban(plain[0])]))[0, 24:].tolist()
    assert plain[0] not in banned
    ended = run(model, ids, eos_token_id=[plain[4], plain[2]])[0, 24:].tolist()
    first = min(plain.index(plain[4]), plain.index(plain[2]))
    assert ended == plain[: first + 1]
    run(model, ids, streamer=TextStreamer(tiny_tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == tiny_tokenizer.decode(plain).rstrip("\n")


@torch.no_grad()
def test_stop_strings_end_while_decoding(model, tiny_tokenizer):
    ids = random_ids(1)
    plain = run(model, ids)[0, 24:]
    text = tiny_tokenizer.decode(plain[3:5])
    stopped = run(model, ids, stop_strings=[text], tokenizer=tiny_tokenizer)[0]  # a match may begin in the prompt
    assert len(stopped) <= 24 + 5
    assert tiny_tokenizer.decode(stopped).endswith(text)


@torch.no_grad()
def test_a_cache_goes_on_where_it_stopped(model):
    ids = random_ids(2)
    whole = run(model, ids, max_new_tokens=12, min_new_tokens=12)
    cache = model.new_cache()
    half = run(model, ids, max_new_tokens=5, min_new_tokens=5, past_key_values=cache)
    rest = run(model, half, max_new_tokens=7, min_new_tokens=7, past_key_values=cache)
    assert torch.equal(rest, whole)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    ("prompt", "options"),
    [(4, {"max_new_tokens": 45}), (4, {"max_length": 49}), (49, {})],
)
def test_more_than_the_shortest_context_is_refused_before_any_work(prompt, options):
    models = [build_model("llama", 0), build_model("llama", 1, max_position_embeddings=48)]
    model, ids, fed = composition(models), random_ids(1, prompt), []
    models[0].register_forward_pre_hook(lambda *_: fed.append(1))
    told = rf"has {prompt} tokens and up to \d+ more .* room for 48 .*lower max_new_tokens"
    if prompt > 48:  # however little follows
        told = rf"has {prompt} tokens, but there is room for 48 with what follows .*Shorten it$"
    with pytest.raises(PromptError, match=told):
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert not fed


def test_the_shortest_context_can_be_filled():
    model = composition([build_model("llama", 0), build_model("llama", 1, max_position_embeddings=48)])
    assert run(model, random_ids(1, 4), max_new_tokens=44, min_new_tokens=44).shape == (1, 48)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_members_that_state_no_context_have_none():
    model = composition([build_model("llama", 0), build_model("llama", 1)])
    model.config.max_position_embeddings = 0
    ids = random_ids(1, 4)
    options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(ids, max_new_tokens=200, **options).shape == (1, 204)
    assert model.generate(ids, **options).shape == (1, 24)  # Hugging Face's default
