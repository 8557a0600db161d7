"""Laws of the belief rule: its guarantee, chunks, padding, where answers begin, zeros, and bad parameters."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessellm.rules import product, sums
from tessellm.rules.belief import BASE, SHARE, Belief, prior
from tessellm.rules.chat_turns import since_user
from tessellm.rules.equation import product_scores
from tessellm.rules.laws import mixture, read_rows

TURN, OPENING, USER = (3, 1), (5, 4), (5, 2)
HABITS = ((0.0, 0.0, -1.0, -1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.7),)


def random_logp(*shape: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).log_softmax(-1)


def random_tokens(batch: int, steps: int, vocabulary: int, seed: int) -> Tensor:
    tokens = torch.randint(vocabulary, (batch, steps), generator=torch.Generator().manual_seed(seed + 1))
    tokens[:, : len(OPENING)] = torch.tensor(OPENING)
    return tokens


def calibrated(experts: int, span: int = 6) -> Belief:
    return Belief(HABITS * experts, OPENING, TURN, span, user=USER)


def explain(rule: Belief, logp: Tensor, tokens: Tensor, mask: Tensor | None = None):
    return rule.explain(logp, tokens, torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask, None)


def losses(logp_BTV: Tensor, tokens: Tensor) -> Tensor:
    """What each token after the first cost: [B, T − 1]."""
    return -logp_BTV[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


def laws(logp: Tensor) -> list[Tensor]:
    return [*logp, product(logp)]


def check_chunks(rule: Belief, logp: Tensor, tokens: Tensor, cuts: set[int]) -> None:
    """Read a text in chunks; what is said and the state are those of reading it at once."""
    (whole, last, _), (batch, steps) = explain(rule, logp, tokens), tokens.shape
    state, parts = None, []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), steps], strict=True):
        mask = torch.ones(batch, end - begin, dtype=torch.bool)
        out, state = rule(logp[:, :, begin:end], tokens[:, begin:end], mask, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    for one, other in zip(state, last, strict=True):
        torch.testing.assert_close(one, other)


@settings(max_examples=40, deadline=None)
@given(experts=st.integers(1, 6), seed=st.integers(0, 10**6), spread=st.floats(0.1, 10), steps=st.integers(2, 40))
def test_no_law_is_better_by_more_than_its_prior(experts, seed, spread, steps):
    logp, tokens = random_logp(experts + 1, 2, steps, 9, seed=seed, spread=spread), random_tokens(2, steps, 9, seed)
    said, _, why = explain(Belief(), logp, tokens)
    price = -why.more["law_BTL"][:, 0].log() - steps * math.log1p(-SHARE)
    for number, law in enumerate(laws(logp)):
        assert (losses(said, tokens).sum(1) <= losses(law, tokens).sum(1) + price[:, number] + 1e-3).all()


@settings(max_examples=40, deadline=None)
@given(experts=st.integers(1, 6), seed=st.integers(0, 10**6), spread=st.floats(0.1, 40))
def test_no_prompt_rules_a_law_out(experts, seed, spread):
    score = torch.randn(3, 2, experts, generator=torch.Generator().manual_seed(seed)) * spread
    found = prior(score, calibrated=True).exp()
    assert (found >= SHARE / (experts + 2) - 1e-9).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 2))
    likeliest = torch.cat([torch.full_like(score[..., :1], BASE), score], -1).argmax(-1)
    assert torch.equal(found[..., :-1].argmax(-1), likeliest)


@settings(max_examples=30, deadline=None)
@given(experts=st.integers(1, 5), seed=st.integers(0, 10**6), switches=st.integers(0, 4))
def test_no_sequence_of_laws_is_better_by_more_than_its_switches(experts, seed, switches):
    steps = 30
    logp, tokens = random_logp(experts + 1, 1, steps, 9, seed=seed), random_tokens(1, steps, 9, seed)
    generator = torch.Generator().manual_seed(seed)
    cuts = sorted(torch.randint(1, steps - 1, (switches,), generator=generator).tolist())
    owners = torch.randint(experts + 2, (switches + 1,), generator=generator).tolist()
    said, _, why = explain(Belief(), logp, tokens)
    cost = torch.stack([losses(law, tokens) for law in laws(logp)])[:, 0]
    sequence = sum(
        float(cost[owner, begin:end].sum())
        for owner, begin, end in zip(owners, [0, *cuts], [*cuts, steps - 1], strict=True)
    )
    price = -float(why.more["law_BTL"][0, 0, owners[0]].log()) + switches * math.log((experts + 2) / SHARE)
    assert float(losses(said, tokens).sum()) <= sequence + price - steps * math.log1p(-SHARE) + 1e-3


@settings(max_examples=25, deadline=None)
@given(members=st.integers(2, 5), cuts=st.sets(st.integers(1, 29), max_size=6), seed=st.integers(0, 10**6))
def test_chunks_agree_with_the_whole(members, cuts, seed):
    rule, logp, tokens = (
        calibrated(members - 1),
        random_logp(members, 2, 30, 7, seed=seed),
        random_tokens(2, 30, 7, seed),
    )
    check_chunks(rule, logp, tokens, cuts)


def test_long_texts_in_blocks_agree_with_token_by_token():
    rule, logp, tokens = calibrated(2), random_logp(3, 1, 150, 7, seed=3), random_tokens(1, 150, 7, 3)
    state, parts = None, []
    for t in range(150):
        out, state = rule(logp[:, :, t : t + 1], tokens[:, t : t + 1], torch.ones(1, 1, dtype=torch.bool), state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), explain(rule, logp, tokens)[0])


@settings(max_examples=25, deadline=None)
@given(pads=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_padding_is_never_observed(pads, seed):
    rule, logp, tokens = calibrated(2), random_logp(3, 1, 20, 7, seed=seed), random_tokens(1, 20, 7, seed)
    padded = torch.cat([random_logp(3, 1, pads, 7, seed=seed + 5), logp], 2)
    fed = torch.cat([torch.full((1, pads), TURN[0]), tokens], 1)
    mask = torch.arange(20 + pads)[None] >= pads
    torch.testing.assert_close(explain(rule, padded, fed, mask)[0][:, pads:], explain(rule, logp, tokens)[0])


def with_zeros(logp: Tensor) -> Tensor:
    logp = logp.clone()
    logp[1, :, 2, :4] = -torch.inf
    logp[0, :, 3, 2:] = -torch.inf
    logp[1, :, 4, 1:], logp[2, :, 4, :8] = -torch.inf, -torch.inf  # nothing is possible for Eq. 2
    return logp.log_softmax(-1)


@pytest.mark.parametrize("in_one_pass", [False, True], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("zeros", [False, True])
def test_rows_are_read_and_mixed_as_the_definitions_say(zeros, in_one_pass, monkeypatch):
    monkeypatch.setattr(sums, "sums_are_fast", lambda like: in_one_pass)
    logp = random_logp(3, 2, 6, 9, seed=3).double().log_softmax(-1)
    logp = with_zeros(logp) if zeros else logp
    found, prob, safe = read_rows(logp), logp.exp(), logp.clamp_min(-1e4)
    entropy = -(prob * safe).sum(-1)
    kl = (prob[1:] * (safe[1:] - safe[:1])).sum(-1)
    averaged = (entropy[:1] - entropy[1:], ((entropy + 0.01)[:1] / (entropy + 0.01)[1:]).log(), (kl + 1e-3).log())
    torch.testing.assert_close(found.averaged_BTKA, torch.stack(averaged, -1).permute(1, 2, 0, 3))
    now = (-(entropy[1:] + 1e-3).log(), kl.clamp_min(0).sqrt())
    torch.testing.assert_close(found.now_BTKN, torch.stack(now, -1).permute(1, 2, 0, 3))
    torch.testing.assert_close(found.equation_BTV, product(logp))
    torch.testing.assert_close(found.log_z_BT, product_scores(logp).logsumexp(-1))
    belief = random_logp(2, 6, 4, seed=4).double().log_softmax(-1)
    said = torch.logsumexp(found.laws(slice(None)) + belief.permute(2, 0, 1)[..., None], 0)
    torch.testing.assert_close(mixture(found, belief).exp(), said.exp())


def test_texts_that_end_apart_leave_the_state_that_each_leaves_alone():
    rule, logp, tokens = calibrated(2), random_logp(3, 3, 12, 7, seed=6), random_tokens(3, 12, 7, 6)
    before = rule(logp[:, :, :4], tokens[:, :4], torch.ones(3, 4, dtype=torch.bool), None)[1]
    lengths = (8, 3, 0)
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    after = rule(logp[:, :, 4:], tokens[:, 4:], mask, before)[1]
    for row, length in enumerate(lengths):
        at, alone = slice(row, row + 1), type(before)(*(buffer[row : row + 1] for buffer in before))
        if length:
            end, real = 4 + length, torch.ones(1, length, dtype=torch.bool)
            alone = rule(logp[:, at, 4:end], tokens[at, 4:end], real, alone)[1]
        for name in alone._fields:
            torch.testing.assert_close(getattr(after, name)[at], getattr(alone, name))


@pytest.mark.parametrize(
    ("words", "turn", "silent"), [(3, TURN, 2), (3, (), 2), (11, TURN, 9), (11, (), 2), (0, (), 1), (0, TURN, 2)]
)
@pytest.mark.parametrize("styles", [(), (2,)])
def test_rows_that_tell_nothing_need_not_be_read(words, turn, silent, styles):
    tokens = torch.tensor([[*OPENING, *[6] * words, *turn, 2, 2]] * 2)
    given = tokens.shape[1] - 2  # two tokens come later
    rule, logp = Belief(HABITS, OPENING, TURN, 6, styles), random_logp(2 + len(styles), 2, given + 2, 7, seed=given)
    assert rule.silent_rows(tokens[:, :given]) == silent
    real = torch.ones(2, given, dtype=torch.bool)
    whole, after_whole, _ = rule.explain(logp[:, :, :given], tokens[:, :given], real, None)
    begun = rule.begin(tokens[:, :silent], logp[:, :, :1])
    rest, after_rest = rule(logp[:, :, silent:given], tokens[:, silent:given], real[:, silent:], begun)
    torch.testing.assert_close(rest[:, -1], whole[:, -1])
    torch.testing.assert_close(tuple(after_rest), tuple(after_whole))
    later = logp[:, :, given:], tokens[:, given:], real[:, :1].expand(-1, 2)
    torch.testing.assert_close(rule(*later, after_rest)[0], rule(*later, after_whole)[0])


@pytest.mark.parametrize("styles", [(), (2,)])
@pytest.mark.parametrize("words", [3, 20])
def test_a_prompt_that_is_only_listened_to_leaves_the_same_state(words, styles):
    tokens = torch.tensor([[*OPENING, *[6] * words, *TURN]] * 2)
    rule, logp = Belief(HABITS, OPENING, TURN, 6, styles), random_logp(2 + len(styles), 2, words + 4, 7, seed=words)
    assert rule.is_asked(tokens)
    assert not rule.is_asked(tokens[:, :-1])
    real = torch.ones_like(tokens, dtype=torch.bool)
    whole, after_whole, _ = rule.explain(logp, tokens, real, None)
    state = rule.begin(tokens[:, :2], logp)
    for at in (slice(2, 4), slice(4, -1)):
        state = rule.listen(logp[:, :, at], tokens[:, at], state)
    last, after = rule(logp[:, :, -1:], tokens[:, -1:], real[:, -1:], state)
    torch.testing.assert_close(last[:, -1], whole[:, -1])
    torch.testing.assert_close(tuple(after), tuple(after_whole))


def test_without_habits_every_row_counts():
    assert not Belief((), OPENING, TURN).is_asked(torch.tensor([TURN]))
    assert Belief((), OPENING, TURN).silent_rows(torch.tensor([[*OPENING, 6, *TURN]])) == 0


def test_an_opening_in_which_an_answer_began_is_read_unless_another_begins():
    rule = Belief(HABITS, (*OPENING, *TURN, 6), TURN, 8)
    assert rule.silent_rows(torch.tensor([[*rule.opening, 5, 6]])) == 0
    assert rule.silent_rows(torch.tensor([[*rule.opening, 5, *TURN]])) == len(rule.opening)


def test_an_answer_begins_behind_the_turn_and_forgets_what_came_before():
    rule, logp = calibrated(2), random_logp(3, 1, 40, 7, seed=8)
    tokens = torch.full((1, 40), 2)
    tokens[0, 20:22] = torch.tensor(TURN)
    why = explain(rule, logp, tokens)[2]
    law = why.more["law_BTL"][0]
    assert law[21].max() >= 0.9  # committed to the likeliest law
    other = tokens.clone()
    other[0, 3] = 6  # the prompt's tokens are no evidence
    torch.testing.assert_close(explain(rule, logp, other)[2].more["law_BTL"][0, 21], law[21])
    said = torch.stack([each[0, 21, tokens[0, 22]] for each in laws(logp)])
    after = (law[21] * said.exp()) / (law[21] * said.exp()).sum()
    torch.testing.assert_close(law[22], after * (1 - SHARE) + SHARE / 4, rtol=1e-4, atol=1e-6)


def test_the_opening_of_the_template_tells_nothing():
    rule, tokens = calibrated(2, span=20), random_tokens(1, 10, 7, 2)
    logp = random_logp(3, 1, 10, 7, seed=2)
    other = logp.clone()
    other[:, :, : len(OPENING)] = random_logp(3, 1, len(OPENING), 7, seed=9)
    scores = [explain(rule, each, tokens)[2].more["score_BTK"][0, -1] for each in (logp, other)]
    torch.testing.assert_close(*scores)
    tokens[0, 0] = 6  # another beginning is a prompt like any other
    scores = [explain(rule, each, tokens)[2].more["score_BTK"][0, -1] for each in (logp, other)]
    assert not torch.allclose(*scores)


def test_once_the_user_speaks_again_what_was_said_before_tells_nothing():
    """Neither an earlier answer, nor a system prompt: however few tokens the user has said since."""
    rule, logp = calibrated(2, span=20), random_logp(3, 1, 14, 7, seed=2)
    other = logp.clone()
    other[:, :, :9] = random_logp(3, 1, 9, 7, seed=9)
    tokens = torch.tensor([[6, 6, 6, *USER, 6, 6, *USER, 1, 1, 1, *TURN]])
    scores = [explain(rule, each, tokens)[2].more["score_BTK"][0] for each in (logp, other)]
    torch.testing.assert_close(scores[0][9:], scores[1][9:])
    assert not torch.allclose(scores[0][6], scores[1][6])
    unknown = replace(rule, user=())  # as compositions that were saved before
    scores = [explain(unknown, each, tokens)[2].more["score_BTK"][0, -1] for each in (logp, other)]
    assert not torch.allclose(*scores)


def test_behind_an_earlier_answer_whoever_is_nearer_to_the_base_than_usual_does_not_act():
    """However sure it is: everybody can copy from what was said before. In a first turn that is no reason."""
    base = random_logp(1, 1, 9, 50, seed=0, spread=0.5)
    copying = (1.5 * base).log_softmax(-1)  # as the base, and surer
    logp = torch.cat([base, base + 1e-3, copying])
    habits = ((0.0, 0.0, 0.0, -1.5, 2.0, 0.01, 0.01, 1.0, 1.0, 1.0),) * 2
    rule = Belief(habits, (), TURN, 20, user=USER)
    follows = torch.tensor([[6, 6, *USER, 6, 6, 6, *TURN]])
    first = torch.tensor([[6, 6, 6, 6, 6, 6, 6, *TURN]])
    scores = [explain(rule, logp, tokens)[2].more["score_BTK"][0, -1, 1] for tokens in (first, follows)]
    assert scores[0] > BASE
    assert scores[1] == 0
    assert explain(rule, logp, follows)[2].owner_BT[0, -1] == 0
    farther = Belief(tuple((*each[:2], -20.0, each[3], -2.0, *each[5:]) for each in habits), (), TURN, 20, user=USER)
    assert explain(farther, logp, follows)[2].owner_BT[0, -1] == 2


@pytest.mark.parametrize("steps", [1, 14])
def test_where_the_user_spoke_last(steps):
    line = torch.tensor([-1.0, -1, 5, 2, 0, 5, 5, 2, 2, 5])
    window = line.expand(1, steps, -1)
    assert since_user((5, 2), window)[0, -1].int().tolist() == [0] * 8 + [1, 1]
    assert since_user((5,), window)[0, 0].int().tolist() == [0] * 10  # it has said nothing yet
    assert since_user((3, 2), window).all()
    assert since_user((5, 0), window, spaces=1)[0, -1].int().tolist() == [0] * 8 + [1, 1]
    assert since_user((), window) is None
    assert since_user((5,) * 11, window) is None


def test_an_expert_that_acts_beyond_its_habits_answers():
    base = random_logp(1, 1, 12, 50, seed=0, spread=0.5)
    sure = base.clone()
    sure[..., 7] += 12  # far from the base, and sure of it
    logp = torch.cat([base, base + 1e-3 * torch.randn(base.shape, generator=torch.Generator()), sure]).log_softmax(-1)
    tokens = torch.tensor([[0] * 10 + list(TURN)])
    habits = ((0.0, 0.0, -6.0, -1.4, 0.02, 0.3, 0.3, 1.0, 0.3, 0.2),) * 2
    said, _, why = explain(Belief(habits, (), TURN, 8), logp, tokens)
    assert why.owner_BT[0, -1] == 2
    assert int(said[0, -1].argmax()) == 7


def test_zeros_stay_defined():
    logp = random_logp(4, 2, 20, 9, seed=1)
    logp[1, :, 5:, :4] = -torch.inf
    logp[2, :, 9:, 4:] = -torch.inf
    logp = logp.log_softmax(-1)
    for rule in (Belief(), calibrated(3)):
        said, _, why = explain(rule, logp, random_tokens(2, 20, 9, 1))
        assert not said.isnan().any()
        torch.testing.assert_close(said.exp().sum(-1), torch.ones(2, 20))
        assert not why.more["law_BTL"].isnan().any()


def test_the_same_expert_twice_is_believed_alike_and_costs_no_more_than_its_prior():
    expert, base = random_logp(1, 1, 30, 9, seed=4), random_logp(1, 1, 30, 9, seed=5)
    tokens = expert[0].argmax(-1).roll(1, 1)
    said, _, why = explain(Belief(), torch.cat([base, expert, expert]), tokens)
    law = why.more["law_BTL"][0]
    torch.testing.assert_close(law[:, 1], law[:, 2])
    assert law[-1, 1:3].sum() > 0.99
    both = float(law[0, 1:3].sum())
    assert losses(said, tokens).sum() <= losses(expert[0], tokens).sum() - math.log(both) - 30 * math.log1p(-SHARE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": 0}, "span must be a whole number"),
        ({"span": True}, "span must be a whole number"),
        ({"habits": ((1.0, 2.0),)}, "habits are 5 means and 5 deviations"),
        ({"habits": ((0.0,) * 10,)}, "deviations above 0"),
        ({"habits": ((math.nan,) * 5 + (1.0,) * 5,)}, "finite"),
        ({"span": 2, "turn": (1, 2, 3)}, "turn must fit"),
        ({"span": 2, "user": (1, 2, 3)}, "user must fit"),
        ({"user": (1, 2), "spaces": 2}, "spaces must be"),
        ({"spaces": True}, "spaces must be"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        Belief(**options)


def test_habits_of_other_experts_are_refused():
    with pytest.raises(ValueError, match="expected the habits of 3 experts, got those of 2"):
        explain(calibrated(2), random_logp(4, 1, 5, 9, seed=0), random_tokens(1, 5, 9, 0))
