"""Particles against C, enumerated exactly: convergence, an unbiased Z, and the counter-example repaired."""

import math

import pytest
import torch
from transformers import GenerationConfig

import tessellm
from tessellm.errors import GenerationError, PromptError
from tessellm.rules import Product
from tessellm_lab import particles
from tessellm_lab.theory import once, stepwise
from tessellm_lab.theory.families import factorized_family, two_bits
from tessellm_lab.theory.sequences import random_joint, total_variation
from tessellm_lab.theory.tabular import language_model

from conftest import build_model, perturbed
from stateful import BestPredictor


def composition(joints, **options):
    base, *experts = (language_model(logp) for logp in joints)
    return tessellm.compose(
        base, {f"e{i}": expert for i, expert in enumerate(experts, 1)}, **{"rule": "product", **options}
    )


def law_of(found, shape, row=0):
    """The weighted particles as a law over sequences."""
    tokens = found.continuations[row, :, : len(shape)]
    number = torch.zeros(len(tokens), dtype=torch.long)
    for t, size in enumerate(shape):
        number = number * size + tokens[:, t]
    weights = found.log_weights[row].exp()
    return torch.zeros(math.prod(shape), dtype=torch.float64).index_add(0, number, weights).reshape(shape).log()


def start(model, rows=1):
    return torch.full((rows, 1), model.config.vocab_size - 1)


@pytest.fixture(scope="module")
def joints():
    generator = torch.Generator().manual_seed(5)
    return torch.stack([random_joint([3] * 4, generator, 1.0) for _ in range(3)])


def test_the_counter_example_is_repaired():
    joints, features = two_bits()
    model = composition(joints)
    found = particles.sample(model, start(model), particles=100_000, max_new_tokens=3, seed=0)
    law = law_of(found, (2, 2)).exp()
    for feature in features:
        assert float(law[feature == 1].sum()) == pytest.approx(0.9, abs=0.005)
        assert float(stepwise(joints).logp.exp()[feature == 1].sum()) == pytest.approx(0.744, abs=5e-4)


@pytest.mark.parametrize("resample_below", [0.0, 0.5, 1.0])
def test_particles_converge_to_c(joints, resample_below):
    model, exact = composition(joints), once(joints)
    gaps = []
    for count in (30, 1000, 30_000):
        options = {"particles": count, "max_new_tokens": 5, "resample_below": resample_below, "seed": 1}
        gaps.append(total_variation(law_of(particles.sample(model, start(model), **options), (3,) * 4), exact.logp))
    assert gaps[2] < 0.03 < gaps[0]
    assert total_variation(stepwise(joints).logp, exact.logp) > 3 * gaps[2]


@pytest.mark.parametrize("resample_below", [0.0, 0.5, 1.0])
def test_the_estimate_of_z_is_unbiased(joints, resample_below):
    """Few particles, many independent runs (one a prompt): the mean of exp(log_z) is Z within 4 standard errors."""
    model, exact = composition(joints), math.exp(once(joints).log_z)
    found = particles.sample(
        model, start(model, 3000), particles=6, max_new_tokens=5, resample_below=resample_below, seed=2
    )
    z = found.log_z.exp()
    error = float(z.std()) / math.sqrt(len(z))
    assert float(z.mean()) == pytest.approx(exact, abs=4 * error)
    assert error < 0.05 * exact
    assert bool(found.resampled.any()) == (resample_below > 0)


def test_prompts_are_independent_and_resampled_alone(joints):
    model = composition(joints)
    found = particles.sample(model, start(model, 8), particles=200, max_new_tokens=5, seed=3)
    assert found.sequences.shape == (8, 200, 6)
    assert found.effective_sizes.shape == found.resampled.shape == (8, 5)
    assert torch.equal(found.resampled, found.effective_sizes < 100)
    for row in range(8):
        assert total_variation(law_of(found, (3,) * 4, row), once(joints).logp) < 0.5
    torch.testing.assert_close(found.log_weights.exp().sum(-1), torch.ones(8).double())


def test_factorized_members_need_no_weights():
    generator = torch.Generator().manual_seed(0)
    model = composition(factorized_family([3] * 3, 2, generator, ((1,), (0,), (2,))).joints)
    found = particles.sample(model, start(model), particles=50, max_new_tokens=4, seed=0)
    assert not found.resampled.any()
    assert found.log_z.abs().max() < 1e-9
    torch.testing.assert_close(found.effective_sizes, torch.full((1, 4), 50.0).double())


def test_weights_count(joints):
    model = composition(joints, weights={"e1": 0.5, "e2": -0.3})
    found = particles.sample(model, start(model), particles=20_000, max_new_tokens=5, seed=1)
    exact = once(joints, [0.5, -0.3])
    assert total_variation(law_of(found, (3,) * 4), exact.logp) < 0.04
    assert float(found.log_z[0]) == pytest.approx(exact.log_z, abs=0.05)


def test_weights_of_a_rule_object_count(joints):
    rule = composition(joints, rule=Product((0.5, -0.3)))
    named = composition(joints, weights={"e1": 0.5, "e2": -0.3})
    options = {"particles": 50, "max_new_tokens": 5, "seed": 2}
    one, two = (particles.sample(model, start(model), **options) for model in (rule, named))
    assert torch.equal(one.sequences, two.sequences)
    torch.testing.assert_close(one.log_z, two.log_z)


def test_seeds_draws_and_shapes(joints):
    model = composition(joints)
    one, two = (particles.sample(model, start(model), particles=9, max_new_tokens=3, seed=4) for _ in range(2))
    assert torch.equal(one.sequences, two.sequences)
    assert one.draw(5, seed=0).shape == (1, 5, 4)
    assert {tuple(row) for row in one.draw(20, seed=1)[0].tolist()} <= {tuple(row) for row in one.sequences[0].tolist()}


def exact_by_forward(model, prompt, vocabulary, length, end):
    """log of the product of members' probabilities of every sequence that ends with `end` or has `length` tokens."""
    scores = {}

    def walk(tokens, score):
        if len(tokens) == length or (tokens and tokens[-1] == end):
            scores[tuple(tokens)] = score
            return
        ids = torch.tensor([prompt + tokens])
        logp_MV = model(ids, use_cache=False, output_member_logprobs=True).member_logprobs[:, 0, -1].double()
        row_V = logp_MV[1:].sum(0) - (len(logp_MV) - 2) * logp_MV[0]
        for token in range(vocabulary):
            walk([*tokens, token], score + float(row_V[token]))

    walk([], 0.0)
    total = torch.tensor(list(scores.values())).logsumexp(0)
    return {tokens: math.exp(score - total) for tokens, score in scores.items()}, float(total)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["gpt2", "gemma2"])
def test_real_architectures_with_early_ends_and_padding(arch):
    """Transformers of 4 tokens, every sequence enumerated through forward; prompts of two lengths, padded left."""
    base = build_model(arch, 0, vocab_size=4)
    model = tessellm.compose(base, {"one": perturbed(base, 1, 0.3), "two": perturbed(base, 2, 0.3)}, rule="product")
    ids = torch.tensor([[0, 0, 1, 3], [3, 1, 3, 1]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found = particles.sample(model, ids, mask, particles=4000, max_new_tokens=4, seed=0)
    for row, prompt in enumerate([[1, 3], [3, 1, 3, 1]]):
        exact, log_z = exact_by_forward(model, prompt, 4, 4, end=2)
        ours = dict.fromkeys(exact, 0.0)
        for tokens, weight in zip(found.continuations[row].tolist(), found.log_weights[row].exp(), strict=True):
            cut = tuple(tokens[: tokens.index(2) + 1] if 2 in tokens else tokens)
            assert all(token == 0 for token in tokens[len(cut) :])
            ours[cut] += float(weight)
        gap = 0.5 * sum(abs(ours[tokens] - exact[tokens]) for tokens in exact)
        assert gap < 0.12
        assert float(found.log_z[row]) == pytest.approx(log_z, abs=0.2)


def test_one_expert_is_sampled_with_equal_weights():
    base = build_model("llama", 0)
    model = tessellm.compose(base, {"one": perturbed(base, 1)}, rule="product")
    found = particles.sample(model, torch.tensor([[5, 6]]), particles=8, max_new_tokens=5, seed=0)
    assert found.log_z.abs().max() < 1e-5
    assert not found.resampled.any()


def test_systematic_resampling_keeps_expectations():
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).double()
    counts = torch.zeros(4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        index = particles.systematic(weights.log(), generator)[0]
        count = torch.bincount(index, minlength=4)
        assert bool(((count - 4 * weights[0]).abs() < 1).all())
        counts += count
    torch.testing.assert_close(counts.double() / 2000, 4 * weights[0], rtol=0, atol=0.05)


def test_members_that_contradict_each_other():
    never = torch.tensor([[[0.5, 0.5]], [[1 - 1e-12, 1e-12]], [[1e-12, 1 - 1e-12]]]).double()[:, 0].log()
    model = composition(never)
    for name, dead in (("e1", 1), ("e2", 0)):
        row = model.member(name).row_0
        row[0, dead] = -torch.inf
    found = particles.sample(model, start(model), particles=4, max_new_tokens=2, seed=0)
    assert found.log_z.tolist() == [-math.inf]
    assert not found.log_weights.isnan().any()
    assert found.effective_sizes[0, 0] == 0


def test_what_is_refused():
    base = build_model("llama", 0)
    model = tessellm.compose(base, {"one": perturbed(base, 1)}, rule="product")
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="particles ≥ 1"):
        particles.sample(model, ids, particles=0)
    with pytest.raises(PromptError, match="shortest context"):
        particles.sample(model, ids, max_new_tokens=1000)
    model.set_rule(BestPredictor())
    with pytest.raises(ValueError, match="rule is"):
        particles.sample(model, ids)


def test_generate_draws_particles_from_c():
    """The counter-example through `generate`: Eq. 2 samples give .744, particles .900."""
    joints, features = two_bits()
    model = composition(joints)
    torch.manual_seed(0)
    made = particles.generate(
        model,
        20_000,
        start(model, 2),
        max_new_tokens=3,
        num_return_sequences=20_000,
        do_sample=True,
        temperature=1.0,
    )
    assert made.shape[0] == 2 * 20_000
    for rows in made[:, 1:3].view(2, 20_000, 2):
        for feature in features:
            assert float((feature[rows[:, 0], rows[:, 1]] == 1).float().mean()) == pytest.approx(0.9, abs=0.02)


def test_generate_with_particles_is_sample_and_draw():
    base = build_model("llama", 0)
    model = tessellm.compose(base, {"one": perturbed(base, 1), "two": perturbed(base, 2)}, rule="product")
    ids, mask = torch.tensor([[0, 5, 6], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    torch.manual_seed(3)
    config = GenerationConfig(max_new_tokens=4, num_return_sequences=2, do_sample=True)
    made = particles.generate(model, 8, ids, config, attention_mask=mask, pad_token_id=0)
    torch.manual_seed(3)
    found = particles.sample(model, ids, mask, particles=8, max_new_tokens=4, tokens=particles.EndTokens(padding=0))
    assert torch.equal(made, found.draw(2).flatten(0, 1))
    torch.manual_seed(3)
    assert torch.equal(
        made,
        particles.generate(
            model, 8, input_ids=ids, attention_mask=mask, max_length=7, num_return_sequences=2, pad_token_id=0
        ),
    )


@pytest.mark.parametrize(
    "option",
    [
        {"num_beams": 4},
        {"temperature": 0.7},
        {"top_k": 50},
        {"top_p": 0.9},
        {"do_sample": False},
        {"repetition_penalty": 1.2},
        {"streamer": object()},
        {"return_dict_in_generate": True},
    ],
)
def test_generate_with_particles_refuses_what_would_bend_c(option):
    base = build_model("llama", 0)
    model = tessellm.compose(base, {"one": perturbed(base, 1)}, rule="product")
    ids, (name,) = torch.tensor([[5, 6]]), option
    with pytest.raises(GenerationError, match=f"got {name}="):
        particles.generate(model, 4, ids, max_new_tokens=2, **option)


def test_generate_with_particles_refuses_other_rules_and_no_prompt():
    base = build_model("llama", 0)
    model = tessellm.compose(base, {"one": perturbed(base, 1)})
    with pytest.raises(GenerationError, match=f"rule is '{model.rule.name}'"):
        particles.generate(model, 4, torch.tensor([[5, 6]]), max_new_tokens=2)
    with pytest.raises(GenerationError, match="expected input_ids"):
        particles.generate(model, 4)
    model.set_rule("product")
    with pytest.raises(GenerationError, match="max_new_tokens ≥ 1"):
        particles.generate(model, 4, torch.tensor([[5, 6]]), max_length=2)
