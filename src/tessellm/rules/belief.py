"""The `belief` rule: a Bayesian mixture of laws, believed from the prompt first and then from what was written.

    laws      the base, every expert, Eq. 2 over all of them
    believe   where an answer begins: who acts beyond its habit. While it is written: who predicted it (Bayes)
    say       Σ_law belief · p_law, a sum of probabilities

A prompt's likelihood says nothing of who answers it well: experts were trained on answers. How an expert *acts* while
it reads does: within its own domain it is surer than the base, and further from it, than it is on most prompts.
Five numbers of each expert, two of the last row and three averaged over the last ones, are measured in units of that
expert's habits: their mean and deviation over prompts of all kinds (`model.habits` measures those, once per
composition). Without habits the belief begins with Eq. 2 and follows the evidence alone.

Guarantee: over any text behind its beginning, the log-loss is at most that of the best law plus log(laws/SHARE) nats,
and at most that of the best sequence of laws plus as much per switch; see docs/theory.md. Pure functions
of log-probabilities and token ids; of torch alone; knows no model and no tokenizer.

Shapes: M members (0 is the base), K experts, L = M+1 laws, B batch, T time, V vocabulary, W window, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .base import BaseRule
from .chain import believe_at_once
from .chat_turns import all_end_with, constant, last_turn, match_opening, match_turn, silent_rows, since_user
from .equation import working_dtype
from .fitting import check_habits, check_marks, check_template
from .laws import Heard, activity, mixture, observe, read_rows, styled
from .protocol import Explanation
from .resting import believed_members, explanation
from .rows import averages, in_blocks, kept, last_row, noted, windows
from .styles import apart, check_some_speak, checked_styles, with_styles
from .sums import sums_are_fast

SHARE = 1e-4  # of the belief goes back to all laws at each token: a switch costs log(laws / SHARE) nats
COMMIT = 0.9  # of the belief goes to the likeliest law where an answer begins
BASE = 2.5  # the base, and Eq. 2, speak unless an expert acts this far beyond its habits (summed deviations)
AVERAGED = 3  # numbers per expert over the window: surer than the base in nats, and in proportion; far from the base
NUMBERS = AVERAGED + 2  # and now: sure, far from the base
DISTANCES = (AVERAGED - 1, NUMBERS - 1)  # of them, how far it is from the base
LONGEST = 1 << 16


class BeliefState(NamedTuple):
    """What the next position needs. Batch first."""

    pending_BLV: Tensor  # the laws' row of the last real position: it predicts the next token
    started_B: Tensor  # False before the first real position
    belief_BL: Tensor  # log
    answering_B: Tensor  # whether an answer has begun, so that what is written is evidence
    opening_B: Tensor  # how many tokens of the template's opening were read, −1 once something else was
    ring_BWF: Tensor  # of the last W real positions: the averaged numbers, whether they count, the token


class Known(NamedTuple):
    """Those of the rule's parameters that it compares with: as numbers, or as tensors where the rows are."""

    habits: Any  # [K, 2N]
    opening: Any
    turn: Any


@dataclass(frozen=True)
class Belief(BaseRule):
    """The rule object. `habits`: per expert the means, then the deviations, of its numbers on prompts of all kinds.
    `opening`: the token ids with which every prompt opens, which tell nothing; `turn`: those behind which an answer
    begins; `user`: those behind which a user speaks again, who is then heard alone, not what was said before; the last
    `spaces` of them are others where the user begins with spaces. All come from `model.habits`; none of them is needed.
    `styles`: the numbers of experts that are styles (styles.py); habits are those of the others."""

    habits: Sequence[Sequence[float]] = ()
    opening: Sequence[int] = ()
    turn: Sequence[int] = ()
    span: int = 128
    styles: Sequence[int] = ()
    user: Sequence[int] = ()
    spaces: int = 0
    name: str = "belief"
    names_tokens = ("opening", "turn", "user")
    tells = frozenset({"law_BTL", "score_BTK"})
    state_type: ClassVar[Any] = BeliefState

    def __post_init__(self) -> None:
        if not isinstance(self.span, int) or isinstance(self.span, bool) or not 1 <= self.span <= LONGEST:
            raise ValueError(f"span must be a whole number of positions, 1 to {LONGEST}; got {self.span!r}")
        habits = tuple(tuple(float(number) for number in expert) for expert in self.habits)
        if any(len(expert) != 2 * NUMBERS or min(expert[NUMBERS:]) <= 0 for expert in habits):
            raise ValueError(f"habits are {NUMBERS} means and {NUMBERS} deviations above 0 per expert; got {habits!r}")
        if not all(math.isfinite(number) for expert in habits for number in expert):
            raise ValueError("habits are finite numbers")
        check_marks(self.span, self.turn, self.user, self.spaces)
        object.__setattr__(self, "habits", habits)
        object.__setattr__(self, "styles", checked_styles(self.styles))
        for key in self.names_tokens:
            object.__setattr__(self, key, tuple(int(token) for token in getattr(self, key)))

    @property
    def window(self) -> int:  # type: ignore[override]
        """Positions to feed before an answer begins: those that are averaged, and an opening that lies among them."""
        return self.span + len(self.opening)

    def reads_from(self, tokens: Sequence[int], first: int) -> int:
        """The position from which to feed a text: the window before its last answer began, or, where none has, before
        `first`. Without habits the belief follows the evidence of all of it."""
        if not self.calibrated:
            return 0
        begun = last_turn(self.turn, tokens, first)
        return max(0, (first if begun is None else begun) - self.window)

    def silent_rows(self, tokens_BT: Tensor) -> int:
        """How many of the first rows of texts tell nothing, less than all."""
        return silent_rows(self.opening, self.turn, self.span, tokens_BT) if self.calibrated else 0

    def begin(self, tokens_BT: Tensor, like_MBTV: Tensor) -> BeliefState:
        """The state after tokens whose rows tell nothing; `like_MBTV`: as log-probabilities of the rows behind them."""
        state = self.begun(like_MBTV[: len(like_MBTV) - len(self.styles)])
        return self._note(state.ring_BWF.new_zeros(*tokens_BT.shape, state.ring_BWF.shape[-1] - 2), tokens_BT, state)

    def is_asked(self, tokens_BT: Tensor) -> bool:
        """Whether an answer begins behind these tokens: what was said of them does not count then."""
        return self.calibrated and all_end_with(self.turn, tokens_BT)

    def listen(self, logp_MBTV: Tensor, tokens_BT: Tensor, state: BeliefState) -> BeliefState:
        """Go on over rows, none of them padding, at which nothing is said: only how the experts act counts."""
        logp_MBTV = logp_MBTV.to(working_dtype(logp_MBTV))
        averaged_BTKA = activity(apart(logp_MBTV, self.styles)[0] if self.styles else logp_MBTV)[1]
        return self._note(averaged_BTKA.flatten(2), tokens_BT, state)

    def _note(self, averaged_BTF: Tensor, tokens_BT: Tensor, state: BeliefState) -> BeliefState:
        """The state after tokens of a prompt, without what was said of them."""
        read_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        opening_BT, inside_BT = match_opening(self.opening, tokens_BT, read_BT, state.opening_B)
        ring_BWF = torch.cat([state.ring_BWF, noted(averaged_BTF, inside_BT, tokens_BT)], 1)[:, -self.span :]
        return state._replace(opening_B=opening_BT[:, -1], ring_BWF=ring_BWF)

    def check_fit(self, experts: int, vocab_size: int) -> None:
        check_some_speak(self.styles, experts)
        check_habits(self.habits, experts - len(self.styles))
        check_template(self.opening, self.turn, self.user, vocab_size)

    @property
    def lets_members_rest(self) -> bool:
        """Not where styles are heard in all that is said."""
        return not self.styles

    def believed_members(self, state: BeliefState) -> tuple[Tensor, Tensor]:
        return believed_members(state.belief_BL)

    @property
    def calibrated(self) -> bool:
        """Whether it knows how its experts usually act, and where answers begin."""
        return bool(self.habits and self.turn)

    def __call__(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: BeliefState | None
    ) -> tuple[Tensor, BeliefState]:
        logp_BTV, state, _ = self.explain(logp_MBTV, tokens_BT, mask_BT, state)
        return logp_BTV, state

    def explain(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: BeliefState | None
    ) -> tuple[Tensor, BeliefState, Explanation]:
        """Run the rule and say what it believes."""
        return in_blocks(self._explain_block, logp_MBTV, tokens_BT, mask_BT, state)

    def _explain_block(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: BeliefState | None
    ) -> tuple[Tensor, BeliefState, Explanation]:
        logp_MBTV = logp_MBTV.to(working_dtype(logp_MBTV))
        mask_BT = mask_BT.bool()
        plain = rows = read_rows(apart(logp_MBTV, self.styles)[0] if self.styles else logp_MBTV)
        pending_BLV, *before = self.begun(rows.logp_MBTV) if state is None else state
        if self.styles:
            rows = styled(plain, logp_MBTV, self.styles)
        said = observe(rows, tokens_BT, mask_BT, pending_BLV, before[0])
        belief_BTL, score_BTK, after = self.weigh(
            Heard(rows.averaged_BTKA, rows.now_BTKN, *said), tokens_BT, mask_BT, before
        )
        logp_BTV = mixture(rows, belief_BTL)
        why = explanation(belief_BTL, score_BTK, rows.log_z_BT)
        if self.styles:
            why = with_styles(why, self.styles, mixture(plain, belief_BTL), logp_BTV)
        at, any_B = last_row(mask_BT)
        pending_BLV = kept(rows.laws(*at).transpose(0, 1), pending_BLV, any_B)
        return logp_BTV, self.state_type(pending_BLV, *after), why

    def weigh(
        self, heard: Heard, tokens_BT: Tensor, mask_BT: Tensor, before: Sequence[Tensor], known: Known | None = None
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """The belief over the laws at every row (log), how far each expert acts beyond its habits, and the state after
        the block. States are without the laws' pending row: nothing here is as large as a vocabulary."""
        known = self.known if known is None else known
        started_B, belief_B, answering_B, opening_B, ring_BWF = before
        opening_BT, inside_BT = match_opening(known.opening, tokens_BT, mask_BT, opening_B)
        window_BTWF = windows(ring_BWF, noted(heard.averaged_BTKA.flatten(2), inside_BT, tokens_BT), mask_BT)
        score_BTK = self._score(window_BTWF, heard.now_BTKN, known)
        turn_BT = match_turn(known.turn if self.calibrated else (), window_BTWF[..., -1]) & mask_BT
        belief_BTL, after_B = self._believe(
            prior(score_BTK, self.calibrated), heard.said_BTL, heard.heard_BT, turn_BT, belief_B, answering_B
        )
        at, any_B = last_row(mask_BT)
        found = ((belief_BTL, belief_B), (opening_BT, opening_B), (window_BTWF, ring_BWF))
        belief, opening, ring = (kept(new[at], old, any_B) for new, old in found)
        started = started_B | (True if any_B is None else any_B)
        return belief_BTL, score_BTK, (started, belief, after_B, opening, ring)

    @property
    def mixes_laws(self) -> bool:
        """Not where they are said in styles."""
        return not self.styles

    @property
    def known(self) -> Known:
        return Known(self.habits, self.opening, self.turn)

    def known_on(self, device: torch.device) -> Known:
        return Known(*(torch.tensor(each, device=device) for each in self.known))

    def begun(self, logp_MBTV: Tensor) -> BeliefState:
        """The state of texts of which nothing was read; `logp_MBTV`: as the log-probabilities of their rows."""
        members, batch, _, vocabulary = logp_MBTV.shape
        no_B = torch.zeros(batch, dtype=torch.bool, device=logp_MBTV.device)
        score_B1K = logp_MBTV.new_zeros(batch, 1, members - 1)
        return BeliefState(
            logp_MBTV.new_zeros(batch, members + 1, vocabulary),
            no_B,
            prior(score_B1K, self.calibrated)[:, 0],
            torch.full_like(no_B, not self.calibrated),  # a tensor of its own: compilers tell apart which are one
            torch.zeros(batch, dtype=torch.long, device=logp_MBTV.device),
            torch.nn.functional.pad(
                logp_MBTV.new_zeros(batch, self.span, AVERAGED * (members - 1) + 1), (0, 1), value=-1.0
            ),  # no token is −1
        )

    def _score(self, window_BTWF: Tensor, now_BTKN: Tensor, known: Known) -> Tensor:
        """How far each expert acts beyond its habits, by the user's last words: [B, T, K]. Behind an earlier answer,
        which everybody can copy, it does not act where it is nearer to the base than usual, however sure it is."""
        heard_BTW = since_user(self.user, window_BTWF[..., -1], self.spaces)
        beyond_BTKN = self.beyond(
            torch.cat([averages(window_BTWF[..., :-1], AVERAGED, heard_BTW), now_BTKN], -1), known.habits
        )
        score_BTK = beyond_BTKN.sum(-1)
        if heard_BTW is None:
            return score_BTK
        behind_BT1 = (window_BTWF[..., -2] * ~heard_BTW).sum(-1, keepdim=True) > 0  # something was said before
        near_BTK = sum(beyond_BTKN[..., each] for each in DISTANCES) < -BASE
        return torch.where(behind_BT1 & near_BTK, score_BTK.clamp_max(0), score_BTK)

    def beyond(self, number_BTKN: Tensor, habits: Any = None) -> Tensor:
        """How far each expert's numbers are beyond its habits, in deviations; zero where habits are not known."""
        if not self.habits:
            return torch.zeros_like(number_BTKN)
        if len(self.habits) != number_BTKN.shape[-2]:
            raise ValueError(f"expected the habits of {number_BTKN.shape[-2]} experts, got those of {len(self.habits)}")
        known = self.habits if habits is None else habits
        mean_KN, deviation_KN = constant(known, number_BTKN).split(NUMBERS, -1)
        return (number_BTKN - mean_KN) / deviation_KN

    def _believe(
        self, prior_BTL: Tensor, said_BTL: Tensor, heard_BT: Tensor, turn_BT: Tensor, belief_BL: Tensor,
        answering_B: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The belief at every position (log), and whether an answer has begun after the last one."""
        if said_BTL.shape[1] > 1 and sums_are_fast(said_BTL):  # where many small operations are slow
            begins_BTL = prior_BTL if self.calibrated else None
            return believe_at_once(begins_BTL, said_BTL, heard_BT, turn_BT, belief_BL, answering_B, SHARE)
        beliefs = []
        for prior_BL, said_BL, heard_B, turn_B in zip(
            prior_BTL.unbind(1), said_BTL.unbind(1), heard_BT.unbind(1), turn_BT.unbind(1), strict=True
        ):
            updated_BL = torch.where((heard_B & answering_B)[:, None], shared(belief_BL + said_BL), belief_BL)
            begins_B = turn_B | ~answering_B
            belief_BL = torch.where(begins_B[:, None], prior_BL, updated_BL) if self.calibrated else updated_BL
            answering_B = answering_B | turn_B
            beliefs.append(belief_BL)
        return torch.stack(beliefs, 1), answering_B


def prior(score_BTK: Tensor, calibrated: bool) -> Tensor:
    """The belief where an answer begins, log: [B, T, L]. Most of it goes to the likeliest law: greedy texts follow the
    surest voice of a mixture, not the likeliest, and what is written first decides the rest."""
    base_BT1 = torch.full_like(score_BTK[..., :1], BASE if calibrated else 0.0)
    first = BASE if calibrated else math.log(score_BTK.shape[-1] + 1)  # nothing known: half of it is Eq. 2's
    law_BTL = torch.cat([base_BT1, score_BTK, torch.full_like(base_BT1, first)], -1).log_softmax(-1)
    index_L = torch.arange(law_BTL.shape[-1], device=law_BTL.device)
    likeliest_BTL = index_L == law_BTL.argmax(-1, keepdim=True)
    return shared((law_BTL.exp() * (1 - COMMIT) + COMMIT * likeliest_BTL).log())


def shared(score_L: Tensor) -> Tensor:
    """Normalise, and give a share back to all laws alike, so that the belief can move again: [..., L]."""
    return (score_L.softmax(-1) * (1 - SHARE) + SHARE / score_L.shape[-1]).log()
