"""Traces of whole models: scored and while generating, padded, in chunks, for every rule; as JSON and tables."""

import json

import pytest
import torch

import tessellm
from tessellm.diagnose import trace_generation
from tessellm.errors import MemberError, PromptError
from tessellm.rules import RULES

from conftest import character_tokenizer
from families import composition, family, random_ids
from stateful import BestPredictor

ARCHITECTURES = ["gpt2", "llama", "gemma2"]


def equal(ours, theirs, where=..., tolerance=2e-5):
    for name in ours.tensors:
        one, other = ours[name][where].double(), theirs[name][where].double()
        assert torch.allclose(one, other, atol=tolerance, rtol=1e-4), name


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(request):
    return family([request.param] * 3)


@pytest.mark.parametrize("rule", ["product", "mixture"])
def test_the_composed_log_probabilities_are_the_models_own(models, rule):
    model, ids = composition(models, [1.0, 0.7], rule=rule), random_ids()
    trace = tessellm.trace(model, ids)
    with torch.no_grad():
        output = model(ids, output_member_logprobs=True)
    said = output.logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.allclose(trace.logprob[:, 1:, -1], said, atol=1e-4)
    members = output.member_logprobs[:, :, :-1].gather(-1, ids[None, :, 1:, None].expand(3, -1, -1, 1))[..., 0]
    assert torch.allclose(trace.logprob[:, 1:, :-1], members.permute(1, 2, 0), atol=1e-4)
    assert torch.equal(trace.top_ids[:, 1:, -1, 0], output.logits[:, :-1].argmax(-1))
    assert trace.scored[:, 1:].all()
    assert not trace.scored[:, 0].any()
    assert ("law" in trace.tensors) == (rule == "mixture")


@pytest.mark.parametrize("rule", ["product", "mixture"])
def test_reading_in_chunks_changes_nothing(models, rule, monkeypatch):
    model, ids = composition(models, rule=rule), random_ids()
    whole = tessellm.trace(model, ids)
    monkeypatch.setattr("tessellm.model.rows.CHUNK_ELEMENTS", 3 * 3 * 64 * 5)  # five positions at a time
    equal(whole, tessellm.trace(model, ids))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(models, side):
    model = composition(models, rule="mixture")
    texts = [random_ids(1, length, seed=length)[0] for length in (5, 13, 24)]
    ids, mask = torch.zeros(3, 24, dtype=torch.long), torch.zeros(3, 24, dtype=torch.long)
    for row, text in enumerate(texts):
        at = slice(24 - len(text), None) if side == "left" else slice(len(text))
        ids[row, at], mask[row, at] = text, 1
    batch = tessellm.trace(model, ids, mask)
    assert batch.scored.sum(1).tolist() == [4, 12, 23]
    for row, text in enumerate(texts):
        one = batch.text(row)
        assert one.tokens[0].tolist() == text.tolist()
        equal(one, tessellm.trace(model, text), where=one.scored)


@pytest.mark.parametrize("rule", ["product", BestPredictor()], ids=["product", "stateful"])
def test_while_generating_it_is_what_scoring_the_text_gives(models, rule):
    model = composition(models, [1.0, 0.8], rule=rule)
    ids = torch.cat([torch.zeros(3, 2, dtype=torch.long), random_ids(3, 9)], 1)
    mask = (ids > 0).long()
    torch.manual_seed(0)
    text, written = trace_generation(model, ids, mask, max_new_tokens=20, do_sample=True, top_k=0, pad_token_id=0)
    assert written.tokens.tolist() == text.tolist()
    assert not written.scored[:, :11].any()
    assert written.scored[:, 11].all()
    for row in range(3):
        new = text[row, 11:].tolist()
        length = new.index(2) + 1 if 2 in new else len(new)  # the end token is scored, what follows is not
        assert written.scored[row, 11:].tolist() == [position < length for position in range(len(new))]
    scored = tessellm.trace(model, text, torch.cat([mask, torch.ones_like(text[:, 11:])], 1))
    equal(written, scored, where=written.scored)


@pytest.mark.parametrize("name", sorted(set(RULES) - {"mixture"}))  # whose prior lets the base speak, too
def test_one_expert_owns_what_it_says(name):
    base, expert = family(["llama"] * 2)
    trace = tessellm.trace(composition([base, expert], rule=name), random_ids())
    far = trace.divergence[..., 0] > 0.1
    assert (trace.owner[trace.scored & far] == 1).all()
    assert trace.gap[trace.scored].max() < 1e-4
    assert trace.log_z[trace.scored].abs().max() < 1e-4
    assert not trace.novel[trace.scored].any()


def test_beams_and_cropping_are_refused():
    model = composition(family(["llama"] * 3))
    with pytest.raises(ValueError, match="beams"):
        trace_generation(model, random_ids(), num_beams=2, max_new_tokens=4, pad_token_id=0)


def test_a_text_of_one_token_and_a_mask_with_gaps_are_refused():
    model = composition(family(["llama"] * 3))
    with pytest.raises(PromptError, match="at least two tokens"):
        tessellm.trace(model, torch.tensor([[5]]))
    with pytest.raises(PromptError, match="gaps"):
        tessellm.trace(model, random_ids(1, 5), torch.tensor([[1, 1, 0, 1, 1]]))


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[]], "at least two tokens; got 0"),
        ("abc", "a trace takes token ids, as a tensor or lists of equal length"),
        ([[5, 6], [7]], "a trace takes token ids, as a tensor or lists of equal length"),
        ([[5.0, 6.0]], r"token ids \[B, T\] or \[T\]; got torch.float32 \[1, 2\]"),
        ([[[5, 6]]], r"got torch.int64 \[1, 1, 2\]"),
        ([[5, 6400]], "token ids are 0 to [0-9]+; got 6400"),
        ([[5, -1]], "token ids are 0 to [0-9]+; got -1"),
    ],
)
def test_what_is_no_text_is_refused(ids, says):
    with pytest.raises(PromptError, match=says):
        tessellm.trace(composition(family(["llama"] * 2)), ids)


def test_a_mask_of_another_shape_and_a_plain_model_are_refused():
    model = composition(family(["llama"] * 2))
    with pytest.raises(PromptError, match=r"mask is \[1, 2\]; the token ids are \[1, 3\]"):
        tessellm.trace(model, [[5, 6, 7]], torch.ones(1, 2))
    for measure in (tessellm.trace, tessellm.diagnose):
        with pytest.raises(MemberError, match=r"expected a composition, as .* gives; got LlamaForCausalLM"):
            measure(model.base, [[5, 6, 7]])


def test_json_and_pandas_hold_every_scored_token():
    model = composition(family(["llama"] * 3), rule="mixture")
    model.tokenizer = character_tokenizer()
    trace = tessellm.trace(model, random_ids(2, 12))
    content = json.loads(trace.to_json())
    assert content["members"] == ["base", "one", "two"]
    assert len(content["tokens"]) == 22
    row = content["tokens"][3]
    assert row["token"] == character_tokenizer().decode([row["id"]])
    assert set(row["divergence"]) == {"one", "two"}
    assert [len(top) for top in row["top"].values()] == [5, 5, 5, 5]
    frame = trace.to_pandas()
    assert len(frame) == 22
    assert frame["divergence.two"].tolist() == pytest.approx(trace.divergence[trace.scored][:, 1].tolist())
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        _ = trace.nothing


def test_a_trace_may_begin_after_a_prompt():
    model = composition(family(["llama"] * 3), rule="mixture")
    ids = torch.randint(4, 60, (2, 90), generator=torch.Generator().manual_seed(0))
    whole = tessellm.trace(model, ids)
    for start in (2, 40, 89):
        part = tessellm.trace(model, ids, start=start)
        assert part.scored.sum(1).tolist() == [90 - start] * 2
        equal(part, whole, (slice(None), slice(start, None)))
    for start in (0, 90):
        with pytest.raises(PromptError, match="the second at the earliest"):
            tessellm.trace(model, ids, start=start)
