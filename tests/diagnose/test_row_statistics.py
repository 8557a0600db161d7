"""The statistics of a row against a slow reference in float64."""

import math

import pytest
import torch

from tessellm.diagnose.row_statistics import ACTIVE, statistics
from tessellm.rules import RULES, make_rule

ENDS = ((0,), (0, 1), (2,), (0,), (1,))


def rows(members: int, vocabulary: int, seed: int, spread: float, steps: int = 6):
    """Members that differ from a common base by noise of random size, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 2, steps, vocabulary, generator=generator) * 2
    size = spread * torch.rand(members, 2, steps, 1, generator=generator) ** 3
    size[0] = 0
    logp = (base + size * torch.randn(members, 2, steps, vocabulary, generator=generator)).log_softmax(-1)
    return logp, torch.randint(vocabulary, (2, steps), generator=generator)


def run(rule, logp, tokens):
    composed, _, why = rule.explain(logp, tokens, torch.ones_like(tokens, dtype=torch.bool), None)
    return composed, statistics(logp, composed, rule, ENDS[: len(logp)], why)


def accord(law, other, base, same: bool) -> float:
    """Of Eq. 2 over two experts, the share on tokens that each raises at least half as much as its favourite."""
    if same:
        return 1.0
    both = (law + other - base).softmax(-1)
    wanted = [(one - base) >= max(float((one - base)[one.argmax()]) / 2, 0.05) for one in (law, other)]
    return float(both[wanted[0] & wanted[1]].sum())


@torch.no_grad()
@pytest.mark.parametrize("weights", [None, (1.0, 0.5, -0.3)])
def test_against_a_slow_reference(weights):
    logp, tokens = rows(4, 9, 0, 3.0)
    composed, found = run(make_rule("product", weights), logp, tokens)
    weights = weights or (1.0,) * 3
    for b in range(2):
        for t in range(6):
            base, *experts = [row.double() for row in logp[:, b, t]]
            laws = [base] + [((1 - w) * base + w * e).log_softmax(-1) for w, e in zip(weights, experts, strict=True)]
            pc = composed[b, t].double().exp()
            near = [sum(p * (math.log(p) - q) for p, q in zip(pc.tolist(), law.tolist(), strict=True)) for law in laws]
            best = min(range(4), key=near.__getitem__)
            assert found.owner_BT[b, t] == (0 if near[0] <= near[best] + ACTIVE else best)
            assert found.gap_kl_BT[b, t] == pytest.approx(near[best], abs=1e-5)
            assert found.gap_BT[b, t] == pytest.approx(float((pc - laws[best].exp()).abs().sum() / 2), abs=1e-5)
            score = laws[0] + sum(law - laws[0] for law in laws[1:])
            eq2 = score.softmax(-1)
            closest = max(laws, key=lambda law: float((eq2 * law).sum()))
            assert found.clash_BT[b, t] == pytest.approx(float((eq2 - closest.exp()).abs().sum() / 2), abs=1e-4)
            assert found.log_z_BT[b, t] == pytest.approx(float(score.exp().sum().log()), abs=1e-4)
            epsilons = []
            for i, law in enumerate(laws[1:]):
                p = law.exp()
                kl = float((p * (law - laws[0])).sum())
                epsilons.append(float((law - laws[0]).abs().max()))
                assert found.divergence_BTK[b, t, i] == pytest.approx(kl, abs=1e-5)
                assert found.epsilon_BTK[b, t, i] == pytest.approx(epsilons[-1], abs=1e-4)
                for j, other in enumerate(laws[1:]):
                    pair = 0.0 if i == j else float((law + other - laws[0]).exp().sum().log())
                    assert found.pair_log_z_BTKK[b, t, i, j] == pytest.approx(pair, abs=1e-4)
                    shared = accord(law, other, laws[0], i == j)
                    assert found.pair_accord_BTKK[b, t, i, j] == pytest.approx(shared, abs=1e-4)
            assert found.novel_BT[b, t] == (composed[b, t].argmax() not in logp[:, b, t].argmax(-1))
            for m in range(4):
                own = sum(float(logp[m, b, t, end].exp()) for end in ENDS[m])
                assert found.hazard_BTN[b, t, m] == pytest.approx(own, abs=1e-6)
                assert found.entropy_BTN[b, t, m] == pytest.approx(float(-(laws[m].exp() * laws[m]).sum()), abs=1e-5)


def test_what_two_experts_want():
    """Content times style: in accord, and Eq. 2 is no member's law. Another token each: not in accord."""
    content, style = torch.tensor([0.9, 0.05, 0.05]), torch.tensor([0.9, 0.1])
    moved_content, moved_style = torch.tensor([0.05, 0.9, 0.05]), torch.tensor([0.1, 0.9])
    laws = [torch.outer(c, s).flatten().log() for c in (content, moved_content) for s in (style, moved_style)]
    base, styled, spoken, _ = laws
    contrary = (0.1 * torch.outer(content, style).flatten() + 0.9 * torch.eye(6)[4]).log()  # a third content
    logp = torch.stack([base, styled, spoken, contrary, spoken])[:, None, None]
    found = run(make_rule("product"), logp[:3], torch.zeros(1, 1, dtype=torch.long))[1]
    assert found.pair_accord_BTKK[0, 0, 0, 1] > 0.8
    assert found.pair_log_z_BTKK[0, 0, 0, 1].abs() < 1e-5
    assert found.clash_BT[0, 0] > 0.3
    assert found.novel_BT[0, 0]
    found = run(make_rule("product"), logp, torch.zeros(1, 1, dtype=torch.long))[1]
    assert found.pair_accord_BTKK[0, 0, 1, 2] < 0.2  # one content against another
    assert found.pair_accord_BTKK[0, 0, 1, 3] > 0.9  # the same twice
    assert found.pair_log_z_BTKK[0, 0, 1, 3] > 1


@pytest.mark.parametrize("rule", sorted(RULES))
def test_impossible_tokens_leave_no_nan(rule):
    logp, tokens = rows(3, 9, 1, 2.0)
    logp[:, :, :, 4] = -torch.inf  # nobody's
    logp[1, :, :, 5] = -torch.inf  # one says never
    logp[0, :, 2, 6] = -torch.inf
    _, found = run(make_rule(rule), logp.log_softmax(-1), tokens)
    for name, each in found.columns().items():
        assert not each.isnan().any(), name
    assert found.epsilon_BTK[..., 0].isinf().all()
