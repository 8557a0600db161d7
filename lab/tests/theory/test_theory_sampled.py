"""Checks on texts agree with exact ones where both can run, cover the truth, and find what was planted."""

import pytest
import torch

import tessellm
from tessellm_lab.theory import sampled
from tessellm_lab.theory.definitions import conditionals, factorized
from tessellm_lab.theory.families import factorized_family, perturbed, skilled_family
from tessellm_lab.theory.operators import stepwise
from tessellm_lab.theory.sampled import Texts
from tessellm_lab.theory.sequences import joint, prefix_laws
from tessellm_lab.theory.tabular import language_model

from conftest import build_model

BLOCKS = ((2,), (0, 3), (1,))


def composition(joints):
    base, *experts = (language_model(logp) for logp in joints)
    return tessellm.compose(base, {f"e{i}": expert for i, expert in enumerate(experts, 1)}, rule="product")


def texts_of(model, count, length, seed=0):
    """Samples of the composition, each the edge token and `length` tokens."""
    edge = model.config.vocab_size - 1
    torch.manual_seed(seed)
    start = torch.full((count, 1), edge)
    return model.generate(start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, max_new_tokens=length)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


@pytest.fixture
def family(generator):
    return factorized_family([3] * 4, 2, generator, BLOCKS)


def planted(family):
    """Expert 2 meddles with position 3, which is expert 1's, depending on position 1."""
    rows = conditionals(family.joints[2])
    rows[3] = rows[3].clone()
    rows[3][:, 0, :, 0] += 1.5
    rows[3] = rows[3].log_softmax(-1)
    return torch.stack([family.joints[0], family.joints[1], joint(rows)])


def test_factorized_texts_have_no_gap(family):
    model = composition(family.joints)
    ids = texts_of(model, 32, 4)
    assert sampled.jointly_factorizable(model, Texts(ids)).largest < 1e-10
    assert sampled.interference(model, Texts(ids)).largest < 1e-10
    owner = torch.tensor([0, 1, 2, 0, 1])  # the prompt's token, then positions 0 … 3
    found = sampled.factorized(model, Texts(ids), owner)
    assert found["outside"].largest < 1e-10
    assert found["dependence"].largest < 1e-10


def test_a_planted_violation_is_found_with_its_place(family):
    joints = planted(family)
    model = composition(joints)
    ids = texts_of(model, 64, 4)
    gap = sampled.jointly_factorizable(model, Texts(ids), measure="nats")
    assert gap.witness["position"] == 4
    assert set(gap.witness["experts"]) == {"e1", "e2"}
    assert gap.low > 0
    owner = torch.tensor([0, 1, 2, 0, 1])
    found = sampled.factorized(model, Texts(ids), owner)
    assert found["outside"].witness["expert"] == "e2"
    assert found["outside"].witness["position"] == 4
    assert found["dependence"].witness["member"] == "e2"
    assert found["dependence"].low > 0
    assert sampled.interference(model, Texts(ids)).low > 0
    assert factorized(joints, BLOCKS).value > 0.01


def test_definition_3_on_texts(generator):
    family = skilled_family(3, 4, 2, generator)
    model = composition(family.joints)
    ids = texts_of(model, 24, 4)
    active = torch.zeros(2, *ids.shape, dtype=torch.bool)
    for text, tokens in enumerate(ids[:, 1:].tolist()):
        for t in range(4):
            owner = int(family.owner[t][tuple(tokens[:t])])
            if owner:
                active[owner - 1, text, t + 1] = True
    assert sampled.skill_factorizable(model, Texts(ids), active).largest < 1e-10
    nobody = sampled.skill_factorizable(model, Texts(ids), torch.zeros_like(active), measure="nats")
    assert nobody.low > 0
    assert nobody.witness["expert"] in ("e1", "e2")


def test_the_interval_covers_the_exact_expectation(generator):
    """Mean |log Z| over prefixes that the composition reaches, exactly, against 40 independent estimates."""
    family = perturbed(skilled_family(2, 4, 3, generator), 1.0, generator)
    chained = stepwise(family.joints)
    exact = sum(
        float((law.exp() * log_z.abs()).sum())
        for law, log_z in zip(prefix_laws(chained.logp), chained.log_z, strict=True)
    )
    model = composition(family.joints)
    covered = 0
    for seed in range(40):
        found = sampled.interference(model, Texts(texts_of(model, 60, 4, seed)), seed=seed)
        covered += found.low <= exact / 4 <= found.high
    assert covered >= 33  # 38 on average; fewer than 33 has probability .005


def test_projective_from_samples():
    generator = torch.Generator().manual_seed(0)
    ours = (torch.rand(4000, generator=generator) < 0.744).tolist()
    theirs = (torch.rand(4000, generator=generator) < 0.9).tolist()
    found = sampled.projective(ours, theirs)
    assert found.low > 0
    assert found.low <= 0.156 <= found.high
    assert sampled.projective(ours, ours).low == 0
    covered = 0
    for _ in range(50):
        a, b = ((torch.rand(200, generator=generator) < 0.5).tolist() for _ in range(2))
        covered += sampled.projective(a, b).low == 0
    assert covered == 50


def test_padding_never_counts_and_real_architectures_run():
    base = build_model("llama", 0)
    model = tessellm.compose(base, {"one": build_model("llama", 1), "two": build_model("llama", 2)}, rule="product")
    ids = torch.randint(4, 60, (3, 10), generator=torch.Generator().manual_seed(0))
    alone = sampled.jointly_factorizable(model, Texts(ids[:1, 4:]))
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    padded = torch.where(mask.bool(), ids, 0)[:1]
    positions = sampled.jointly_factorizable(model, Texts(padded, mask[:1], start=5))
    assert positions.mean == pytest.approx(alone.mean, rel=1e-4)
    assert alone.unseen == pytest.approx(0.95)
    assert 0 < alone.low <= alone.mean <= alone.high


def test_what_is_refused(family):
    model = composition(family.joints)
    ids = texts_of(model, 2, 4)
    with pytest.raises(ValueError, match="unknown measure"):
        sampled.jointly_factorizable(model, Texts(ids), measure="bits")
    with pytest.raises(ValueError, match="start"):
        sampled.jointly_factorizable(model, Texts(ids, start=9))
