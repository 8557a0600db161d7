"""What generation does to a cache, done to every member's and to the rule's state."""

import pytest
import torch

from families import composition, family, random_ids
from stateful import BestPredictor

FAMILIES = [["gpt2"] * 3, ["gemma2"] * 3, ["llama", "gpt2", "gemma2"]]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda archs: "+".join(dict.fromkeys(archs)))
def models(request):
    return family(request.param)


@pytest.fixture(scope="module", params=["product", BestPredictor()], ids=["product", "stateful"])
def model(request, models):
    return composition(models, rule=request.param)


def filled(model, ids, record=False):
    cache = model.new_cache()
    if record:
        cache.activate_past_recording()
    model(ids, past_key_values=cache)
    return cache


def next_logits(model, token_B, cache):
    return model(token_B[:, None], past_key_values=cache).logits[:, -1]


@torch.no_grad()
def check(model, cache, ids, rows=None):
    """The cache holds `ids`: the next token's distribution equals that of the whole text without a cache."""
    token_B = torch.full((len(ids),), 7)
    expected = model(torch.cat([ids, token_B[:, None]], 1), use_cache=False).logits[:, -1]
    torch.testing.assert_close(next_logits(model, token_B, cache), expected, rtol=0, atol=2e-5)


@torch.no_grad()
def test_reorder_select_and_repeat(model):
    ids = random_ids(3, 20)
    cache = filled(model, ids)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    check(model, cache, ids[[2, 0, 0]])
    cache = filled(model, ids)
    cache.batch_select_indices(torch.tensor([1, 2]))
    check(model, cache, ids[[1, 2]])
    cache = filled(model, ids)
    cache.batch_repeat_interleave(2)
    check(model, cache, ids.repeat_interleave(2, 0))


@torch.no_grad()
@pytest.mark.parametrize("length", [10, 30])  # inside and past the tiny Gemma's window of 16
@pytest.mark.parametrize("removed", [0, 1, 3])
def test_crop_after_recording(model, length, removed):
    ids = random_ids(2, length)
    cache = filled(model, ids[:, :-5], record=True)
    cache.crop(0)
    model(ids[:, -5:-2], past_key_values=cache)
    model(ids[:, -2:], past_key_values=cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == length - removed
    check(model, cache, ids[:, : length - removed])


@torch.no_grad()
def test_crop_survives_beams(model):
    ids = random_ids(2, 12)
    cache = filled(model, ids[:, :-3], record=True)
    cache.crop(0)
    model(ids[:, -3:], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(-2)
    check(model, cache, ids[[1, 1], :-2])


@torch.no_grad()
def test_a_rule_with_state_says_what_crop_needs(models):
    model = composition(models, rule=BestPredictor())
    cache = filled(model, random_ids(1, 8))
    with pytest.raises(RuntimeError, match=r"cannot crop 2 tokens.*activate_past_recording"):
        cache.crop(-2)


@torch.no_grad()
def test_length_reset_and_repr(model):
    ids = random_ids(2, 9)
    cache = filled(model, ids)
    assert cache.get_seq_length() == 9
    assert len(cache) == sum(len(inner) for inner in cache.caches)
    assert not cache.is_compileable
    assert "ComposedCache" in repr(cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.state is None
    model(ids, past_key_values=cache)
    check(model, cache, ids)
