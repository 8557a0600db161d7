"""Whatever composes, the engine writes what the reference would: rules, endings, weights, vocabularies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.members.groups import plan_groups
from tessellm.engine.members.stacking import can_stack
from tessellm.engine.sampling import Sampling
from tessellm.errors import EngineError

from conftest import SPECIAL, VOCAB, build_model, character_tokenizer, perturbed, save_member
from decoding_cases import composition, prompts, reference_rows, stacked_engine, unexcused
from stateful import BestPredictor

LONG = Sampling(max_new_tokens=16)


def check(model: Any, stacked: bool = False, count: int = 5) -> None:
    requests = stacked_engine(model, stacked, slots=3).generate(prompts(count, 40, seed=2), LONG)
    assert not unexcused(model, requests)
    for request in requests:
        chosen = reference_rows(model, request).gather(-1, torch.tensor(request.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.logprobs), chosen, atol=1e-4, rtol=0)


def test_weights(tmp_path: Path) -> None:
    check(composition("llama", tmp_path, weights={"e0": 0.7, "e1": -0.3}))


def test_other_rules_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="rules 'mixture' and 'product'; this composition has 'best-predictor'"):
        Engine(composition("llama", tmp_path, rule=BestPredictor()))


def permuted_member(base: Any, seed: int, folder: Path, table: int = VOCAB) -> Path:
    """A fine-tune whose characters have other ids, in a table with rows that are no token."""
    order = [
        *range(len(SPECIAL)),
        *(torch.randperm(VOCAB - 4, generator=torch.Generator().manual_seed(1)) + 4).tolist(),
    ]
    tokenizer = character_tokenizer()
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {token: order[i] for token, i in tokenizer.get_vocab().items()}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    tokenizer = type(tokenizer)(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    model = perturbed(base, seed)
    model.resize_token_embeddings(table, mean_resizing=False)
    with torch.no_grad():
        for part in {model.get_input_embeddings(), model.get_output_embeddings()}:
            part.weight[order] = part.weight[:VOCAB].clone()
    return save_member(model, folder, tokenizer)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("table", [VOCAB, 80])
def test_permuted_and_padded_vocabularies(table: int, stacked: bool, tmp_path: Path) -> None:
    base = build_model("llama")
    home = save_member(base, tmp_path / "base", character_tokenizer())
    experts = {"a": str(permuted_member(base, 1, tmp_path / "a", table)), "b": perturbed(base, 2)}
    model = tessellm.compose(str(home), experts, rule="product")
    assert model.alignments["a"].member_id_V is not None
    check(model, stacked)
    plain = tessellm.compose(str(home), {"a": perturbed(base, 1), "b": perturbed(base, 2)}, rule="product")
    text = prompts(1, 30, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor(text)).logits, plain(torch.tensor(text)).logits)


def test_members_that_differ_beside_their_weights_are_not_stacked() -> None:
    base = build_model("llama")
    expert = perturbed(base, 1)
    slower = build_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    slower.load_state_dict(expert.state_dict())
    assert can_stack([base, expert])
    assert not can_stack([base, slower])
    model = tessellm.compose(base, {"a": expert, "b": slower}, rule="product")
    assert plan_groups(model, stacked=True) == [(0, 1), (2,)]
    check(model, stacked=True)


def test_members_in_several_precisions(tmp_path: Path) -> None:
    base = build_model("llama")
    model = tessellm.compose(
        base, {"a": perturbed(base, 1), "b": copy.deepcopy(perturbed(base, 2)).bfloat16()}, rule="product"
    )
    requests = stacked_engine(model, True, slots=3).generate(prompts(4, 40), LONG)
    for request in requests:
        chosen = reference_rows(model, request).gather(-1, torch.tensor(request.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.logprobs), chosen, atol=0.15, rtol=0)


def test_the_engine_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = composition("adapters", tmp_path)
    text = torch.tensor(prompts(1, 30))
    with torch.no_grad():
        before = model(text).logits
        Engine(model, slots=2).generate(text.tolist(), LONG)
        assert torch.equal(model(text).logits, before)
    assert {model.member(name).config._attn_implementation for name in model.members} == {"sdpa"}
