"""Sampled requests: the same text whatever the batch, and in distribution what the composition says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling, uniform
from tessellm.engine.speculation import Speculation
from tessellm.errors import GenerationError

from chi_square import chi_square_p_value
from conftest import VOCAB, build_model, perturbed
from decoding_cases import prompts

PROMPT = [5, 17, 33, 8, 20]
DRAWS = 2500


@pytest.fixture(scope="module")
def model() -> Any:
    base = build_model("llama", eos_token_id=None)
    return tessellm.compose(
        base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}, weights={"a": 0.8}, rule="product"
    )


@torch.no_grad()
def joint_of_two_tokens(model: Any, temperature: float, top_p: float, top_k: int) -> Tensor:
    """p(first, second | PROMPT), by the reference: [V, V]."""

    def shaped(logp: Tensor) -> Tensor:
        p = (logp.double() / temperature).softmax(-1)
        ordered, order = p.sort(-1, descending=True)
        ordered = ordered * (torch.arange(VOCAB) < (top_k or VOCAB))
        ordered = ordered / ordered.sum(-1, keepdim=True)
        kept = ordered.cumsum(-1) - ordered < top_p
        p = torch.zeros_like(p).scatter(-1, order, ordered * kept)
        return p / p.sum(-1, keepdim=True)

    first = model(torch.tensor([PROMPT])).logits[0, -1]
    texts = torch.tensor([[*PROMPT, token] for token in range(VOCAB)])
    return shaped(first)[:, None] * shaped(model(texts).logits[:, -1])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 5), (1.3, 0.8, 9)]
)
def test_two_sampled_tokens_follow_the_exact_distribution(
    model: Any, temperature: float, top_p: float, top_k: int
) -> None:
    """A prefilled and a decoded token, jointly, so that their noise must be independent too."""
    asked = [Sampling(2, temperature, top_p, seed=seed, top_k=top_k) for seed in range(DRAWS)]
    requests = Engine(model, slots=128).generate([PROMPT] * DRAWS, asked)
    drawn = torch.tensor([r.tokens[0] * VOCAB + r.tokens[1] for r in requests])
    count = torch.bincount(drawn, minlength=VOCAB**2).double()
    right = joint_of_two_tokens(model, temperature, top_p, top_k).flatten()
    wrong = joint_of_two_tokens(model, temperature * 1.3, top_p, top_k).flatten()
    assert not count[right == 0].any()
    assert chi_square_p_value(count, right) > 1e-4
    assert chi_square_p_value(count, wrong) < 1e-4


def test_log_probabilities_are_the_compositions_whatever_the_temperature(model: Any) -> None:
    request = Engine(model, slots=2).generate([PROMPT], Sampling(20, 2.0, 0.9, seed=3))[0]
    with torch.no_grad():
        rows = model(torch.tensor([request.prompt + request.tokens])).logits[0]
    expected = rows[len(PROMPT) - 1 : -1].gather(-1, torch.tensor(request.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-4, rtol=0)


def test_noise_is_uniform_and_depends_on_seed_and_position() -> None:
    seeds, positions = torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300)
    noise = uniform(seeds, positions)
    assert len(noise.unique()) == len(noise)
    count = torch.histc(noise, 100, 0, 1)
    assert chi_square_p_value(count.double(), torch.full((100,), 0.01).double()) > 1e-4
    table = noise.view(300, 300) - 0.5
    for shift in (1, 2):
        assert (table[:, shift:] * table[:, :-shift]).mean().abs() < 4 / 12 / 300
        assert (table[shift:] * table[:-shift]).mean().abs() < 4 / 12 / 300


@torch.no_grad()
def penalised_text(model: Any, prompt: list[int], new: int, frequency: float, presence: float) -> list[int]:
    """What OpenAI's penalties make of a greedy text, token by token, by the reference."""
    written: list[int] = []
    for _ in range(new):
        count = torch.bincount(torch.tensor(written, dtype=torch.long), minlength=VOCAB)
        logits = model(torch.tensor([prompt + written])).logits[0, -1]
        written.append(int((logits - frequency * count - presence * (count > 0)).argmax()))
    return written


@pytest.mark.parametrize("plain_members", [False, True])
def test_penalties_are_those_of_what_was_written_whatever_else_is_in_the_batch(model: Any, plain_members: bool) -> None:
    texts = prompts(7, 30, seed=2)
    penalties = [(0.0, 0.0), (0.5, 0.0), (0.0, 1.5), (2.0, -1.0), (-0.5, 0.3), (0.0, 0.0), (1.0, 1.0)]
    asked = [Sampling(12, frequency_penalty=each[0], presence_penalty=each[1]) for each in penalties]
    engine = Engine(model, slots=3, plain=plain_members)
    for _ in range(2):  # counts begin anew with each request
        requests = engine.generate(texts, asked)
        for request, text, each in zip(requests, texts, penalties, strict=True):
            assert request.tokens == penalised_text(model, list(text), 12, *each)
    plain, changed = (Engine(model).generate([texts[0]], each)[0] for each in (Sampling(12), asked[3]))
    assert plain.tokens != changed.tokens
    assert changed.logprobs[0] == pytest.approx(plain.logprobs[0])  # as the composition has them


def test_the_likeliest_of_one_is_greedy_and_what_makes_no_sense_is_refused(model: Any) -> None:
    greedy, one = (Engine(model).generate([PROMPT], each)[0] for each in (Sampling(12), Sampling(12, 1.5, top_k=1)))
    assert one.tokens == greedy.tokens
    for wrong in ({"top_k": -1}, {"presence_penalty": float("nan")}, {"frequency_penalty": float("inf")}):
        with pytest.raises(GenerationError):
            Sampling(**wrong)
    engine = Engine(model, speculation=Speculation("lookup"))
    with pytest.raises(GenerationError, match="no penalties"):
        engine.submit(PROMPT, Sampling(2, presence_penalty=1.0))
