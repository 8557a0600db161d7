"""What a mixture's kernels say of random members, against the rule as it is: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessellm.decoding.cuda.mixture import Mixture
from tessellm.decoding.passes import combine, decide, standing
from tessellm.rules.belief import Belief

HABITS = (0.1, 0.2, -1.0, 0.5, 0.3, 1.0, 0.5, 2.0, 1.0, 0.7)
TURN = (14, 21)


class Case:
    """A rule over random members, and a state in the middle of some texts."""

    def __init__(self, members: int, vocabulary: int, texts: int, device: str, calibrated: bool = True):
        self.members, self.vocabulary, self.texts, self.device = members, vocabulary, texts, device
        self.draw = torch.Generator().manual_seed(members + texts)
        chat: dict[str, Any] = {"opening": (0, 7), "turn": TURN, "user": (28,)}
        self.rule = Belief([HABITS] * (members - 1), span=20, **chat) if calibrated else Belief(span=20)
        self.mixture = Mixture(self.rule)

    def logits(self, tokens: int, impossible: bool = False) -> list[Tensor]:
        x_MBTV = 3 * torch.randn(self.members, self.texts, tokens, self.vocabulary, generator=self.draw)
        if impossible:  # for an expert, and for the base
            x_MBTV[1, :, :, 5:9] = x_MBTV[0, :, :, 7:12] = -torch.inf
        return list(x_MBTV.to(self.device))

    def tokens(self, tokens: int) -> Tensor:
        """Random ones, some of which begin an answer."""
        token_BT = torch.randint(min(40, self.vocabulary), (self.texts, tokens), generator=self.draw)
        if tokens > 12:
            token_BT[:, -12:-10] = torch.tensor(TURN)
        return token_BT.to(self.device)

    def read(self, tokens: int) -> Any:
        """Read prompts, padded on the left; the state behind them."""
        logits_M, token_BT = self.logits(tokens), self.tokens(tokens)
        mask_BT = torch.arange(tokens) >= 3 * torch.arange(self.texts)[:, None]
        mask_BT = mask_BT.to(self.device)
        wanted_BTV, broken_BM, state = combine(self.rule, logits_M, token_BT, mask_BT, None)
        found_BV, found_BM, found = self.mixture.read(logits_M, token_BT, mask_BT, None)
        close(found_BV, wanted_BTV[:, -1])
        assert torch.equal(found_BM, broken_BM)
        close(found, state)
        return type(state)(*(each.contiguous() for each in state))

    def step(self, state: Any, impossible: bool = False) -> None:
        """Decode one token of each text but the last, greedily and for a law to draw from."""
        logits_M, token_B1 = self.logits(1, impossible), self.tokens(1)
        mask_B1 = (torch.arange(self.texts) < max(1, self.texts - 1))[:, None].to(self.device)
        wanted, loose = decide(self.rule, logits_M, token_B1, mask_B1, state), 1e-2 if impossible else 1e-4
        close(
            self.mixture.combine(logits_M, token_B1, mask_B1, state),
            combine(self.rule, logits_M, token_B1, mask_B1, state),
            loose,
        )
        written = type(state)(*(each.clone() for each in state))
        found = self.mixture.decide(logits_M, token_B1, mask_B1, written)
        assert found[3][0] is written[0]  # the pending rows, written where they are
        close(found, wanted, loose)

    def judge(self, state: Any, width: int) -> None:
        """Judge drafts that fall in different places and end early, greedily and by a law."""
        logits_M, fed_BT = self.logits(width), self.tokens(width)
        real_BT = torch.ones_like(fed_BT, dtype=torch.bool)
        real_BT[-1, width - 2 :] = False
        for _ in range(3):
            fed_BT[:, 1:4] = combine(self.rule, logits_M, fed_BT, real_BT, state)[0].argmax(-1)[:, :3]
        fed_BT[0, 2] = (fed_BT[0, 2] + 1) % self.vocabulary
        wanted_BTV = combine(self.rule, logits_M, fed_BT, real_BT, state)[0]
        logprob_BT, token_BT = wanted_BTV.max(-1)
        accepted_B1, kept_BT = standing(token_BT, fed_BT, real_BT)
        assert accepted_B1.min() < accepted_B1.max() or self.texts == 1
        after = combine(self.rule, logits_M, fed_BT, kept_BT, state)[2]
        for choose in (None, lambda law_BTV: law_BTV.argmax(-1)):
            found = self.mixture.judge(logits_M, fed_BT, real_BT, state, choose)
            assert torch.equal(found.token_BT[real_BT], token_BT[real_BT])
            close(found.logprob_BT[real_BT], logprob_BT[real_BT])
            assert torch.equal(found.accepted_B1, accepted_B1)
            close(found.state, after)

    def broken(self, state: Any, value: float, member: int) -> None:
        """Decode where a member computes something that is no number in the first text."""
        logits_M, token_B1 = self.logits(1), self.tokens(1)
        logits_M[member][0, 0, 3] = value
        mask_B1 = torch.ones_like(token_B1, dtype=torch.bool)
        wanted = decide(self.rule, logits_M, token_B1, mask_B1, state)
        found = self.mixture.decide(logits_M, token_B1, mask_B1, type(state)(*(each.clone() for each in state)))
        assert torch.equal(found[2], wanted[2])
        assert found[2][0].tolist() == [each == member for each in range(self.members)]
        assert found[1].isnan().tolist() == wanted[1].isnan().tolist()
        assert 0 <= int(found[0][0]) < self.vocabulary


def close(found: Any, wanted: Any, loose: float = 1e-4) -> None:
    """Compare numbers, or what is made of them. `loose`: sums over impossible tokens are of 10⁵."""
    if isinstance(wanted, Sequence):
        for one, other in zip(found, wanted, strict=True):
            close(one, other, loose)
    else:
        torch.testing.assert_close(found, wanted, atol=loose, rtol=1e-4)
