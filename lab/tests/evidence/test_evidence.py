"""Laws of the evidence rule: conservative extension, chunks, padding, window, zeros, and what it is for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessellm.rules import product
from tessellm_lab.evidence import Evidence
from tessellm_lab.evidence.claims import CLAIM

NOISE = 3e-3


def random_logp(*shape: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).log_softmax(-1)


def random_tokens(batch: int, steps: int, vocabulary: int, seed: int) -> Tensor:
    return torch.randint(vocabulary, (batch, steps), generator=torch.Generator().manual_seed(seed + 1))


def apply(rule: Evidence, logp: Tensor, tokens: Tensor, mask: Tensor | None = None, state=None) -> Tensor:
    return rule(logp, tokens, torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask, state)[0]


def total_variation(a: Tensor, b: Tensor) -> float:
    return ((a.exp() - b.exp()).abs().sum(-1) / 2).max().item()


def one_active(experts: int, steps: int, vocabulary: int, seed: int, spread: float, noise: float) -> Tensor:
    """Members of which at most one differs from the base at each step, but for logit noise on the idle ones."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 2, steps, vocabulary, generator=generator) * 2
    other = base + torch.randn(base.shape, generator=generator) * spread
    active = torch.randint(experts + 1, (2, steps), generator=generator)
    index = torch.arange(experts + 1)[:, None, None]
    logits = torch.where(((index == active) & (index > 0))[..., None], other, base)
    jitter = (torch.rand(logits.shape, generator=generator) * 2 - 1) * noise
    jitter[0] = 0
    return (logits + jitter).float().log_softmax(-1)


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 8),
    vocabulary=st.integers(2, 40),
    spread=st.floats(0, 12),
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 1e-6, NOISE]),
)
def test_is_eq_2_where_at_most_one_expert_differs(experts, vocabulary, spread, seed, noise):
    logp = one_active(experts, 24, vocabulary, seed, spread, noise)
    tokens = random_tokens(2, 24, vocabulary, seed)
    rule = apply(Evidence(window=8), logp, tokens)
    eq2 = product(logp)
    # an idle expert's noise moves Eq. 2 by 2·noise a member at most, in log-probability; a divergence below float32's
    # resolution cannot be told from none, and is worth √(resolution / 2) at most
    assert total_variation(rule, eq2) <= 4 * NOISE * experts * (noise > 0) + 5e-4
    if noise == 0:
        differs = (eq2.exp() - logp[0].exp()).abs().sum(-1) > 0.01
        torch.testing.assert_close(rule[differs], eq2[differs], atol=2e-4, rtol=1e-4)


def test_one_expert_speaks_for_itself():
    logp = random_logp(2, 3, 20, 11, seed=0)
    torch.testing.assert_close(apply(Evidence(), logp, random_tokens(3, 20, 11, 0)), logp[1])


@settings(max_examples=25, deadline=None)
@given(members=st.integers(2, 6), cuts=st.sets(st.integers(1, 29), max_size=6), seed=st.integers(0, 10**6))
def test_chunks_agree_with_the_whole(members, cuts, seed):
    rule, logp, tokens = Evidence(window=6), random_logp(members, 2, 30, 9, seed=seed), random_tokens(2, 30, 9, seed)
    whole = apply(rule, logp, tokens)
    state, parts = None, []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), 30], strict=True):
        mask = torch.ones(2, end - begin, dtype=torch.bool)
        out, state = rule(logp[:, :, begin:end], tokens[:, begin:end], mask, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_long_texts_are_read_in_blocks(monkeypatch):
    rule, logp, tokens = Evidence(), random_logp(4, 2, 150, 9, seed=8), random_tokens(2, 150, 9, 8)
    mask = torch.ones(2, 150, dtype=torch.bool)
    blocks = rule.explain(logp, tokens, mask, None)
    monkeypatch.setattr("tessellm_lab.evidence.rows.BLOCK", 1000)
    whole = rule.explain(logp, tokens, mask, None)
    torch.testing.assert_close(blocks[:2], whole[:2])
    torch.testing.assert_close(blocks[2]._asdict(), whole[2]._asdict())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), step=st.sampled_from([1, 4, 24]))
def test_padding_is_never_observed(seed, step):
    """Wherever padding stands, and whatever it holds, the real positions come out as without it."""
    rule = Evidence(window=5)
    logp, tokens = random_logp(4, 1, 15, 7, seed=seed), random_tokens(1, 15, 7, seed)
    place = torch.randperm(24, generator=torch.Generator().manual_seed(seed))[:15].sort().values
    mask = torch.zeros(1, 24, dtype=torch.bool)
    mask[:, place] = True
    padded, fed = random_logp(4, 1, 24, 7, seed=seed + 7), random_tokens(1, 24, 7, seed + 7)
    padded[:, :, place], fed[:, place] = logp, tokens
    state, parts = None, []
    for at in range(0, 24, step):
        out, state = rule(padded[:, :, at : at + step], fed[:, at : at + step], mask[:, at : at + step], state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1)[:, place], apply(rule, logp, tokens))


@pytest.mark.parametrize("window", [1, 2, 7])
def test_state_is_rebuilt_from_the_last_window(window):
    rule, logp, tokens = Evidence(window=window), random_logp(4, 3, 40, 9, seed=3), random_tokens(3, 40, 9, 3)
    mask = torch.ones(3, 40, dtype=torch.bool)
    _, long = rule(logp[:, :, :30], tokens[:, :30], mask[:, :30], None)
    tail = slice(30 - window, 30)
    _, short = rule(logp[:, :, tail], tokens[:, tail], mask[:, tail], None)
    after = slice(30, 40)
    out_long, _ = rule(logp[:, :, after], tokens[:, after], mask[:, after], long)
    out_short, _ = rule(logp[:, :, after], tokens[:, after], mask[:, after], short)
    torch.testing.assert_close(out_long, out_short)


def test_state_follows_its_beam():
    rule, logp, tokens = Evidence(), random_logp(4, 3, 20, 9, seed=5), random_tokens(3, 20, 9, 5)
    mask = torch.ones(3, 20, dtype=torch.bool)
    whole = apply(rule, logp, tokens)
    _, state = rule(logp[:, :, :10], tokens[:, :10], mask[:, :10], None)
    beams = torch.tensor([2, 0, 0])
    state = type(state)(*(part.index_select(0, beams) for part in state))
    out, _ = rule(logp[:, beams, 10:], tokens[beams, 10:], mask[:, 10:], state)
    torch.testing.assert_close(out, whole[beams, 10:])


@settings(max_examples=60, deadline=None)
@given(members=st.integers(2, 6), seed=st.integers(0, 10**6), share=st.floats(0, 0.9), double=st.booleans())
def test_zeros_never_make_nan_and_rows_are_normalised(members, seed, share, double):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(members, 2, 12, 8, generator=generator) * 8
    holes = torch.rand(logits.shape, generator=generator) < share
    holes[..., 0] &= ~holes.all(-1)
    holes.scatter_(-1, logits.argmax(-1, keepdim=True), False)
    logp = logits.masked_fill(holes, -torch.inf).log_softmax(-1)
    logp = logp.double() if double else logp
    out = apply(Evidence(window=4), logp, random_tokens(2, 12, 8, seed))
    assert not out.isnan().any()
    assert out.dtype == logp.dtype
    torch.testing.assert_close(out.exp().sum(-1), torch.ones_like(out[..., 0]), atol=1e-4, rtol=0)


def test_impossible_everywhere_stays_impossible():
    logp = random_logp(4, 1, 9, 10, seed=2)
    logp[..., 7:] = -torch.inf
    out = apply(Evidence(), logp.log_softmax(-1), random_tokens(1, 9, 7, 2))
    assert (out[..., 7:] == -torch.inf).all()


def content_and_style(seed: int, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """One expert changes the content of every token, the other its style, under a bijection of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    content = (torch.randn(2, 1, 30, 6, 1, generator=generator) * 4).log_softmax(-2)
    style = (torch.randn(2, 1, 30, 1, 4, generator=generator) * 4).log_softmax(-1)
    pick = ((0, 0), (1, 0), (0, 1), (1, 1))  # base, content expert, style expert, both
    joint = torch.stack([(content[c] + style[s]).flatten(-2) for c, s in pick])
    joint = joint[..., torch.randperm(24, generator=generator)]
    members = joint[:3] + noise * torch.randn(joint[:3].shape, generator=generator)
    return members.log_softmax(-1), joint[3]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_simultaneous_skills_in_feature_space_blend(seed):
    logp, both = content_and_style(seed)
    # an expert that diverges by less than CLAIM is not heard beside another: Pinsker's inequality bounds what it costs
    assert total_variation(apply(Evidence(), logp, random_tokens(1, 30, 24, seed)), both) < (CLAIM / 2) ** 0.5 + 1e-3


def peaked(*choice: int, vocabulary: int = 12) -> Tensor:
    """One confident row a member: [M, 1, 1, V]."""
    logits = torch.zeros(len(choice), vocabulary)
    logits[torch.arange(len(choice)), torch.tensor(choice)] = 12.0
    return logits.log_softmax(-1)[:, None, None]


def spoken(rows: list[tuple[int, ...]], fed: list[int]) -> list[int]:
    logp = torch.cat([peaked(*row) for row in rows], 2)
    return apply(Evidence(), logp, torch.tensor([fed]))[0].argmax(-1).tolist()


def test_the_expert_that_predicted_the_text_keeps_speaking():
    """All four lose their way in row 0; expert 1 writes 5; then experts 2 and 3 contradict it and each other."""
    rows = [(0, 1, 2, 3), (0, 5, 0, 0), (7, 6, 8, 9), (7, 7, 8, 7)]
    assert spoken(rows, [0, 11, 5, 6])[2:] == [6, 7]


def test_an_agreed_token_hands_over():
    """Expert 1 owns 5 and 6, everyone expects 11, then expert 2 alone has something new to say."""
    rows = [(0, 1, 2, 3), (0, 5, 0, 0), (7, 6, 8, 9), (11, 11, 11, 11), (4, 4, 10, 4)]
    assert spoken(rows, [0, 11, 5, 6, 11])[4] == 10


def test_a_lost_base_is_outvoted():
    """Three experts agree on what an idle one says; the base does not, and happens to guess the owner's token."""
    rows = [(0, 1, 2, 3, 4), (11, 11, 11, 11, 11), (7, 4, 7, 4, 4)]
    assert spoken(rows, [0, 9, 11])[2] == 7


def test_a_few_contested_steps_in_a_prompt_do_not_silence_sole_claims():
    """Members that disagree here and there about a prompt, then take turns without a token that all expected: each
    sole claimant is believed, as Eq. 2 does."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(24, 11, generator=generator) * 0.5
    logits = base.repeat(4, 1, 1)
    logits[1, 3, 4] += 3.0
    logits[2, 3, 5] += 3.0  # one contested step of the prompt
    for t in range(10, 24):  # the answer: one expert at a time, a new one at each token
        logits[:, t] = 0.0
        logits[:, t, 0] = 8.0
        logits[1 + t % 3, t] = 0.0
        logits[1 + t % 3, t, 1 + t % 9] = 8.0
    logp = logits[:, None].log_softmax(-1)
    tokens = logp[1:].sum(0).sub(2 * logp[0]).argmax(-1).roll(1, -1)
    out = apply(Evidence(), logp, tokens)
    torch.testing.assert_close(out[:, 10:].exp(), product(logp)[:, 10:].exp(), atol=2e-2, rtol=0)
