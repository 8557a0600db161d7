"""The `evidence` rule: Eq. 2 while the members are compatible, one owner at a time where they are not.

Eq. 2 is right when the members' effects are disjoint, and then log Z = 0 at every step (theorems 1 and 2). Once an
expert has written what the others would not have written, they are off their own distribution: they disagree with
the base for no reason, and Eq. 2 multiplies all of it. This rule looks at one window of the sequence and asks

    are the members compatible?   |log Z| of the contested steps, where two experts or more differ from the base
    who may speak?                the experts that predicted what was written since the last agreement (evidence)
    what would an idle expert say?  what most members say: the centre; a base left alone is lost, not right
    who has something to say?     the trusted claimant whose prediction is the least like anyone else's (novelty), but
                                  the owner of the last run first, if it has something to say as well

and answers with Eq. 2 over the claimants if they are compatible, else with the distribution of one owner.

Conservative extension: if at most one expert differs from the base at each step of the window, no step is
contested, the claimants are that expert alone, and the rule is Eq. 2. Pure functions of log-probabilities and token
ids; of torch alone; knows no model, no prompt's end, no special token.

Shapes: M members (0 is the base), B batch, T time, V vocabulary, W window, F features of a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tessellm.rules import BaseRule, Explanation

from .claims import Claims, read_claims
from .rows import in_blocks, last_real, windows

WINDOW, TRUST, INTERFERENCE = 64, 2.0, 0.4  # see `Evidence`
SOFT = 0.02  # evidence of a token is log(p + SOFT): no token costs a member more than 3.9
AGREED = 0.05  # a token that all members expected within this (nats) ends a run
SURPRISE = 3.0  # a token that surprises every member by this much more than its entropy is not ours: it ends a run
CAP = 4.0  # one contested step counts at most this much interference (nats)
CALM = 1.0  # Eq. 2 never speaks where |log Z| is larger (nats)
STANDING = 0.2  # the last run's owner goes first if its novelty is at least this share of the largest
LONGEST = 1 << 16  # a longer window is a mistake: each position keeps it for every member
SUPPORT = 1.5  # and if the centre does not stand alone: so many members resemble it, itself included


class EvidenceState(NamedTuple):
    """What the next position needs. Batch first; a function of the last W positions alone."""

    pending_BMV: Tensor  # the row of the last real position: it predicts the next token
    entropy_BM: Tensor  # of that row
    started_B: Tensor  # False before the first real position
    ring_BWF: Tensor  # features of the last W real positions, oldest first


def observe(
    logp_MBTV: Tensor, entropy_BTM: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: EvidenceState
) -> tuple[Tensor, Tensor]:
    """What each member's last row said of the token fed: log(p + SOFT) [B, T, M], and whether a run ends there."""
    members, vocabulary = logp_MBTV.shape[0], logp_MBTV.shape[-1]
    said_BTM = state.pending_BMV.gather(-1, tokens_BT[:, None].expand(-1, members, -1)).transpose(1, 2)
    row_BTM = state.entropy_BM[:, None]
    heard_BT = mask_BT & state.started_B[:, None]
    if tokens_BT.shape[1] > 1:
        last_BT = last_real(mask_BT)
        inside_BT = last_BT >= 0
        at_BT = last_BT.clamp_min(0) * vocabulary + tokens_BT
        within_BTM = logp_MBTV.flatten(2).gather(-1, at_BT.expand(members, -1, -1)).permute(1, 2, 0)
        said_BTM = torch.where(inside_BT[..., None], within_BTM, said_BTM)
        before_BTM = entropy_BTM.gather(1, last_BT.clamp_min(0)[..., None].expand(-1, -1, members))
        row_BTM = torch.where(inside_BT[..., None], before_BTM, row_BTM)
        heard_BT = mask_BT & (inside_BT | state.started_B[:, None])
    credit_BTM = (said_BTM.exp() + SOFT).log()
    agreed_BT = credit_BTM.amax(-1) - credit_BTM.amin(-1) < AGREED
    foreign_BT = (-said_BTM > row_BTM + SURPRISE).all(-1)
    return credit_BTM * heard_BT[..., None], (agreed_BT | foreign_BT) & heard_BT


def choose(rows: Claims, trusted_BTM: Tensor, ahead_BT1: Tensor, standing_BT: Tensor) -> Tensor:
    """The owner, should there be one; `ahead` is the expert with the best evidence, the first being 0."""
    trusted_BTK = rows.claim_BTM[..., 1:] & trusted_BTM[..., 1:]
    novelty_BTK = rows.novelty_BTM[..., 1:].masked_fill(~trusted_BTK, -1)
    most_BT1, novel_BT1 = novelty_BTK.max(-1, keepdim=True)
    speaker_BT = torch.where(most_BT1 < 0, ahead_BT1, novel_BT1)[..., 0] + 1
    again_BT1 = novelty_BTK.gather(-1, (standing_BT - 1).clamp_min(0)[..., None])
    stands_BT = (again_BT1 >= STANDING * most_BT1.clamp_min(0))[..., 0] & (rows.support_BT > SUPPORT)
    return torch.where(stands_BT & (standing_BT > 0), standing_BT, speaker_BT)


def explanation(rows: Claims, blended_BT: Tensor, speaker_BT: Tensor, **weighed: Tensor) -> Explanation:
    """Why each row came out as it did. In `more`:

    centre_BT        the member that says what an idle expert would
    divergence_BTM   KL(p_m ‖ p_centre), 0 for the base
    novelty_BTM      the least KL(p_m ‖ p_l) over the others
    evidence_BTM     Σ log(p_m + SOFT) over the run
    trusted_BTM      who is within `trust` of the best-evidenced expert
    leader_BT        the expert that the evidence of the run singles out, 0 if it does not
    standing_BT      the last run's leader, 0 before there was one
    interference_BT  mean |log Z| of contested steps over the positions of the window
    blended_BT       True where Eq. 2 speaks
    run_owner_BT     who may end the text: stopping cannot be taken back, so where the members interfere it is the owner
                     of the run, by its evidence or by that of the last run, before anyone who merely has something to
                     say now
    """
    index_M = torch.arange(rows.claim_BTM.shape[-1], device=blended_BT.device)
    speaks_BTM = torch.where(blended_BT[..., None], rows.claim_BTM, index_M == speaker_BT[..., None])
    speaks_BTM, count_BT = speaks_BTM.to(rows.log_z_BT.dtype), speaks_BTM.sum(-1)
    owner_BT = speaks_BTM.argmax(-1) * (count_BT == 1)  # 0 where Eq. 2 speaks over several claimants
    steady_BT = torch.where(weighed["leader_BT"] > 0, weighed["leader_BT"], weighed["standing_BT"])
    more = {
        "centre_BT": rows.centre_BT,
        "divergence_BTM": rows.divergence_BTM,
        "novelty_BTM": rows.novelty_BTM,
        "blended_BT": blended_BT,
        "run_owner_BT": torch.where(blended_BT | (steady_BT == 0), owner_BT, steady_BT),
        **weighed,
    }
    return Explanation(speaks_BTM / count_BT[..., None], owner_BT, rows.log_z_BT, more)


@dataclass(frozen=True)
class Evidence(BaseRule):
    """The rule object. `trust`: how far behind the best-evidenced expert another may be and still speak (nats).
    `interference`: how large |log Z|, averaged over the window's positions and 0 where no step is contested, may be for
    Eq. 2 to speak (nats)."""

    window: int = WINDOW
    trust: float = TRUST
    interference: float = INTERFERENCE
    name: str = "evidence"
    stateful = True

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or not 1 <= self.window <= LONGEST or self.window is True:
            raise ValueError(f"window must be a whole number of positions, 1 to {LONGEST}; got {self.window!r}")
        for key, value in (("trust", self.trust), ("interference", self.interference)):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise ValueError(f"{key} must be a number of nats, 0 or more; got {value!r}")

    def __call__(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: EvidenceState | None
    ) -> tuple[Tensor, EvidenceState]:
        logp_BTV, state, _ = self.explain(logp_MBTV, tokens_BT, mask_BT, state)
        return logp_BTV, state

    def start(self, logp_MBTV: Tensor) -> EvidenceState:
        """The state before the first token."""
        members, batch, _, vocabulary = logp_MBTV.shape
        return EvidenceState(
            logp_MBTV.new_zeros(batch, members, vocabulary),
            logp_MBTV.new_zeros(batch, members),
            torch.zeros(batch, dtype=torch.bool, device=logp_MBTV.device),
            logp_MBTV.new_zeros(batch, self.window, members + 3),
        )

    def explain(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: EvidenceState | None
    ) -> tuple[Tensor, EvidenceState, Explanation]:
        """Run the rule and say why, in `more` as `explanation` lists it."""
        return in_blocks(self.explain_block, logp_MBTV, tokens_BT, mask_BT, state)

    def explain_block(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: EvidenceState | None
    ) -> tuple[Tensor, EvidenceState, Explanation]:
        logp_MBTV = logp_MBTV.to(torch.promote_types(logp_MBTV.dtype, torch.float32))
        mask_BT = mask_BT.bool()
        state = self.start(logp_MBTV) if state is None else state
        rows = read_claims(logp_MBTV)
        credit_BTM, ends_BT = observe(logp_MBTV, rows.entropy_BTM, tokens_BT, mask_BT, state)
        ends_BT = ends_BT.to(credit_BTM.dtype)
        cost_BT = rows.log_z_BT.abs().clamp_max(CAP) * rows.contested_BT
        new_BTF = torch.cat([credit_BTM, torch.stack([ends_BT, torch.ones_like(cost_BT), cost_BT], -1)], -1)
        window_BTWF = windows(state.ring_BWF, new_BTF, mask_BT)
        evidence_BTM, standing_BT, interference_BT = self.weigh(window_BTWF)
        best_BT1, ahead_BT1 = evidence_BTM[..., 1:].max(-1, keepdim=True)
        trusted_BTM = evidence_BTM >= best_BT1 - self.trust
        leader_BT = (ahead_BT1[..., 0] + 1) * (trusted_BTM[..., 1:].sum(-1) == 1)
        speaker_BT = choose(rows, trusted_BTM, ahead_BT1, standing_BT)
        blended_BT = (rows.log_z_BT.abs() <= CALM) & (interference_BT <= self.interference)
        at_BTV = speaker_BT[None, ..., None].expand(1, *logp_MBTV.shape[1:])
        logp_BTV = torch.where(blended_BT[..., None], rows.blend_BTV, logp_MBTV.gather(0, at_BTV)[0])
        why = explanation(
            rows, blended_BT, speaker_BT, evidence_BTM=evidence_BTM, trusted_BTM=trusted_BTM,
            leader_BT=leader_BT, standing_BT=standing_BT, interference_BT=interference_BT,
        )  # fmt: skip
        return logp_BTV, self.advance(logp_MBTV, rows, window_BTWF, mask_BT, state), why

    def weigh(self, window_BTWF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evidence of the present run, the owner of the last run that had a clear one, and the mean interference. The
        oldest position's token is not evidence: the row that predicted it lies outside the window."""
        ends_BTW, there_BTW, cost_BTW = window_BTWF[..., -3:].unbind(-1)
        interference_BT = cost_BTW.sum(-1) / there_BTW.sum(-1).clamp_min(1)
        window = window_BTWF.shape[-2]
        index_W = torch.arange(window, device=window_BTWF.device)
        sum_BTWM = (window_BTWF[..., :-3] * (index_W > 0)[:, None]).cumsum(-2)
        last_BTW = torch.where(ends_BTW * index_W > 0, index_W, 0).cummax(-1).values  # where the run before w ended
        run_BTWM = sum_BTWM - sum_BTWM.gather(-2, last_BTW[..., None].expand_as(sum_BTWM))
        before_BTWK = torch.nn.functional.pad(run_BTWM[..., 1:], (0, 0, 1, -1))  # as the position before left it
        best_BTW1, leader_BTW1 = before_BTWK.max(-1, keepdim=True)
        rivals_BTW = (before_BTWK >= best_BTW1 - self.trust).sum(-1)
        latest_BT1 = ((ends_BTW > 0) & (rivals_BTW == 1)).mul(index_W).amax(-1, keepdim=True)
        standing_BT = ((leader_BTW1[..., 0] + 1).gather(-1, latest_BT1) * (latest_BT1 > 0))[..., 0]
        return run_BTWM[..., -1, :], standing_BT, interference_BT

    def advance(
        self, logp_MBTV: Tensor, rows: Claims, window_BTWF: Tensor, mask_BT: Tensor, state: EvidenceState
    ) -> EvidenceState:
        """The state after the chunk: its last real row, or the old state where there is none."""
        if mask_BT.shape[1] == 1:
            any_B, ring_BWF = mask_BT[:, 0], window_BTWF[:, 0]
            pending_BMV, entropy_BM = logp_MBTV[:, :, 0].transpose(0, 1), rows.entropy_BTM[:, 0]
        else:
            last_B = last_real(torch.nn.functional.pad(mask_BT, (0, 1)))[:, -1]
            any_B, at_B = last_B >= 0, last_B.clamp_min(0)
            row_B = torch.arange(at_B.shape[0], device=at_B.device)
            pending_BMV = logp_MBTV[:, row_B, at_B].transpose(0, 1)
            entropy_BM, ring_BWF = rows.entropy_BTM[row_B, at_B], window_BTWF[row_B, at_B]
        return EvidenceState(
            torch.where(any_B[:, None, None], pending_BMV, state.pending_BMV),
            torch.where(any_B[:, None], entropy_BM, state.entropy_BM),
            state.started_B | any_B,
            torch.where(any_B[:, None, None], ring_BWF, state.ring_BWF),
        )
