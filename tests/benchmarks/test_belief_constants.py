"""The figure of belief's constants is drawn from the rule's own numbers: losses, and who is believed first."""

import math

import pytest
import torch

import belief_constants as script
from tessellm.rules import belief
from tessellm.rules.laws import read_rows


def random_laws(steps, seed):
    """Rows of a base and two experts over seven tokens, and the tokens that came."""
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(3, 1, steps, 7, generator=generator).log_softmax(-1)
    return logp, torch.randint(7, (1, steps), generator=generator)


@pytest.mark.parametrize("share", [1e-6, 1e-2])
def test_nats_are_those_that_the_rule_says(share):
    prior, heard, expected = [], [], 0.0
    with script.constants(SHARE=share):
        for seed, steps in enumerate((9, 4)):
            logp, tokens = random_laws(steps, seed)
            said, _, why = belief.Belief().explain(logp, tokens, torch.ones_like(tokens, dtype=torch.bool), None)
            expected -= float(said[:, :-1].gather(-1, tokens[:, 1:, None]).sum())
            prior.append(why.more["law_BTL"][0, 0].log())
            laws = torch.cat([logp, read_rows(logp).equation_BTV[None]])[:, 0, :-1]
            heard.append(laws.gather(-1, tokens[:, 1:].expand(4, -1)[..., None])[..., 0].T)
        assert script.nats(torch.stack(prior), heard) == pytest.approx(expected, rel=1e-5)


def test_an_expert_that_acts_beyond_its_habits_is_not_astray():
    generator = torch.Generator().manual_seed(0)
    usual = [(torch.randn(12, 2, 3, generator=generator), torch.randn(2, 2, generator=generator)) for _ in range(30)]
    strong = [[(averaged + 4 * torch.eye(2)[each][:, None], now) for averaged, now in usual] for each in range(2)]
    stored = {script.USUAL: usual, "one": strong[0], "two": strong[1], script.PLAIN: usual}
    found = script.measured({kind: [(*each, torch.zeros(0, 4)) for each in texts] for kind, texts in stored.items()})
    assert found["astray"] == 0
    assert found["plain to the base"] > 0.5
    assert math.isnan(found["nats"])  # no answers: nothing to read
