"""The stateless rules are conservative extensions of Eq. 2, survive zeros, and do what they are named for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessellm.rules import product
from tessellm_lab.common.gates import GATES, owner, relative_gate

NOISE = 3e-3


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(GATES)),
    experts=st.integers(1, 8),
    vocabulary=st.integers(2, 40),
    spread=st.floats(0, 12),
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, NOISE]),
)
def test_is_eq_2_where_at_most_one_expert_differs(name, experts, vocabulary, spread, seed, noise):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 4, vocabulary, generator=generator) * 2
    logits = base.repeat(experts + 1, 1, 1)
    logits[1 + seed % experts] += torch.randn(4, vocabulary, generator=generator) * spread
    logits[1:] += (torch.rand(logits[1:].shape, generator=generator) * 2 - 1) * noise
    logp = logits.log_softmax(-1)
    difference = GATES[name](logp).exp() - product(logp).exp()
    # a divergence below float32's resolution cannot be told from none, and is worth √(resolution / 2) at most
    assert difference.abs().sum(-1).max() / 2 <= 4 * noise * experts + 5e-4


@pytest.mark.parametrize("name", sorted(GATES))
def test_zeros_never_make_nan(name):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 7, 9, generator=generator) * 9
    holes = torch.rand(logits.shape, generator=generator) < 0.5
    logp = logits.masked_fill(holes.scatter(-1, logits.argmax(-1, keepdim=True), False), -torch.inf).log_softmax(-1)
    out = GATES[name](logp)
    assert not out.isnan().any()
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(3, 7))


def test_owner_is_the_most_divergent():
    logits = torch.zeros(4, 1, 6)
    logits[1, :, 2], logits[3, :, 4] = 1.0, 9.0
    logp = logits.log_softmax(-1)
    torch.testing.assert_close(owner(logp), logp[3])


def test_gate_silences_tail_noise_that_kills_eq_2():
    """Twelve idle experts with errors in the tail outvote the one that means something, unless they are gated."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.full((14, 1, 27), -9.0) + torch.randn(14, 1, 27, generator=generator) * 2
    logits[:, :, 0] = 6.0
    logits[1, :, 0], logits[1, :, 1] = -9.0, 6.0
    logp = logits.log_softmax(-1)
    assert product(logp).argmax().item() != 1
    assert relative_gate(logp).argmax().item() == 1
