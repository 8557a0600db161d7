"""The rule `mixture`: route, then mix. Components, their posterior, and what a trace shows of them.

    components   the base, every expert that can be selected, and Eq. 2 of the active ones
    prior        comes from outside where an answer begins: the router's, of the active members; 0 for all others
    posterior    follows the written tokens by Bayes, with a switching probability; a prompt's tokens are no evidence

Styles and experts with a negative weight are part of every component and never selected. The formula and the guarantee
are in components.py. Pure functions of log-probabilities and token ids; knows no router, no model and no tokenizer.

Shapes: M members (0 is the base), K experts, N experts that can be selected, C components, B batch, T time,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .base import BaseRule, Explained, Explanation, Weights
from .components import SWITCH_PROB, component_logp, component_weights, mix_components, update
from .equation import product_scores, working_dtype

ALONE = 0.5  # of the prior: a member that holds it answers alone
MOST = 4  # members that answer where none holds that much, the base among them
PRODUCT_SHARE = 0.1  # of the active experts' prior belongs to Eq. 2 of them
PRODUCT_UNROUTED = 0.5  # of the prior belongs to Eq. 2 where no router gives one


class MixtureState(NamedTuple):
    """What the next position needs. Batch first."""

    prior_BC: Tensor  # π⁰, probabilities
    log_pi_BC: Tensor  # π
    pending_BCV: Tensor  # log p_c of the last real row: it predicts the next token
    started_B: Tensor  # whether there is such a row, so that the next token is evidence


@dataclass(frozen=True)
class Mixture(BaseRule):
    """The rule object.

    `switch_prob`: ρ, how much of the posterior returns to the prior at each token. `alone` and `most`: the members that
    are active, see `Route.active`. `product_share`: the share of the active experts' prior that Eq. 2 of them holds.
    `styles`: numbers of experts that are part of every component, 1 for the first."""

    switch_prob: float = SWITCH_PROB
    alone: float = ALONE
    most: int = MOST
    product_share: float = PRODUCT_SHARE
    styles: Sequence[int] = ()
    weights: tuple[float, ...] | None = None
    name = "mixture"
    stateful = True

    def __post_init__(self) -> None:
        for key, low, high in (("switch_prob", 0, 1), ("alone", 0, 1), ("product_share", 0, 1)):
            value = getattr(self, key)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{key} must be a number from {low} to {high}; got {value!r}")
        if not isinstance(self.most, int) or isinstance(self.most, bool) or self.most < 1:
            raise ValueError(f"most must be a whole number of members, 1 or more; got {self.most!r}")
        numbers = all(isinstance(style, int) and not isinstance(style, bool) and style > 0 for style in self.styles)
        if not numbers or len(set(self.styles)) < len(self.styles):
            raise ValueError(f"styles are numbers of experts, each once, 1 for the first; got {self.styles!r}")
        object.__setattr__(self, "styles", tuple(sorted(self.styles)))

    def check_fit(self, experts: int) -> None:
        if any(style > experts for style in self.styles):
            raise ValueError(f"expected styles among {experts} experts; got {self.styles!r}")

    def weighted(self, weights: Weights | None) -> Mixture | None:
        """Return the rule with the weights as W's entries. Weights that want gradients tilt the experts instead."""
        if isinstance(weights, Tensor):
            return None
        return replace(self, weights=None if weights is None else tuple(float(weight) for weight in weights))

    def candidates(self, experts: int) -> list[int]:
        """Return the numbers of the experts that can be selected: no styles, and a weight above 0."""
        weights = self.weights or (1.0,) * experts
        return [number for number, weight in enumerate(weights, 1) if weight > 0 and number not in self.styles]

    def component_weights(self, experts: int, active: Sequence[int] | None = None) -> Tensor:
        """Return W, [C, K]: the base, every candidate and, of several candidates, Eq. 2 of the active ones (all)."""
        weights, own = self.weights or (1.0,) * experts, self.candidates(experts)
        always = [number for number in range(1, experts + 1) if number in self.styles or weights[number - 1] < 0]
        weights_CK = component_weights(own, experts, always)
        if len(own) > 1 and active is not None:
            weights_CK[-1] = component_weights([], experts, [*active, *always])[0]
        return weights_CK * torch.tensor(weights)

    def active_prior(self, prior: Mapping[str, float], active: Collection[str], members: Sequence[str]) -> list[float]:
        """Return the prior of the base and the candidates, [1 + N]: of the active ones in proportion, 0 for others."""
        names = [members[0], *(members[number] for number in self.candidates(len(members) - 1))]
        shares = [prior.get(name, 0.0) if name in active else 0.0 for name in names]
        return [share / sum(shares) for share in shares]

    def component_prior(self, prior_BN: Tensor) -> Tensor:
        """Return π⁰ of the components, [B, C], given that of the base and the candidates, [B, 1 + N]; 0: not active."""
        own_BN = prior_BN[:, 1:]
        if own_BN.shape[1] < 2:
            return prior_BN
        several_B1 = (own_BN > 0).sum(-1, keepdim=True) > 1
        product_B1 = several_B1 * self.product_share * own_BN.sum(-1, keepdim=True)
        own_BN = torch.where(several_B1, own_BN * (1 - self.product_share), own_BN)
        return torch.cat([prior_BN[:, :1], own_BN, product_B1], -1)

    def unrouted_prior(self, experts: int) -> Tensor:
        """Return π⁰ where no router gives one, [C]: Eq. 2 of all holds half, the rest is shared alike."""
        count = len(self.candidates(experts))
        members_N = torch.full((1 + count,), (1 - PRODUCT_UNROUTED) / (1 + count))
        if count > 1:
            return torch.cat([members_N, torch.tensor([PRODUCT_UNROUTED])])
        if count == 1:  # Eq. 2 of one expert is that expert
            members_N[1] += PRODUCT_UNROUTED
        return members_N / members_N.sum()

    def init_state(self, prior_BC: Tensor, vocabulary: int) -> MixtureState:
        """Return the state before the last token of a prompt: the row behind it predicts the answer's first token."""
        batch, components = prior_BC.shape
        pending_BCV = prior_BC.new_zeros(batch, components, vocabulary)
        started_B = torch.zeros(batch, dtype=torch.bool, device=prior_BC.device)
        return MixtureState(prior_BC, prior_BC.log(), pending_BCV, started_B)

    def __call__(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: MixtureState | None
    ) -> tuple[Tensor, MixtureState]:
        logp_CBTV, pi_BTC, state = self._run(logp_MBTV, tokens_BT, mask_BT, state)
        return _mixed(logp_CBTV, pi_BTC), state

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: MixtureState | None) -> Explained:
        """Run the rule. As probabilities, `more["pi_BTC"]` is the posterior over components; `more["law_BTL"]`: by
        member (of its own component), Eq. 2 last."""
        logp_CBTV, pi_BTC, state = self._run(logp_MBTV, tokens_BT, mask_BT, state)
        logp_BTV = _mixed(logp_CBTV, pi_BTC)
        return logp_BTV, state, self._explanation(logp_MBTV, logp_BTV, pi_BTC.exp(), state)

    def _run(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: MixtureState | None
    ) -> tuple[Tensor, Tensor, MixtureState]:
        """Return the components [C, B, T, V], log π at every position, and the state after the last."""
        logp_MBTV = logp_MBTV.to(working_dtype(logp_MBTV))
        experts, batch = len(logp_MBTV) - 1, len(tokens_BT)
        if state is None:
            prior_C = self.unrouted_prior(experts).to(logp_MBTV)
            state = self.init_state(prior_C.expand(batch, -1), logp_MBTV.shape[-1])
        logp_CBTV = self._components(logp_MBTV, state.prior_BC)
        prior_BC, log_pi_BC, pending_BCV, started_B = state
        pi = []
        for row_CBV, token_B, real_B in zip(
            logp_CBTV.unbind(2), tokens_BT.unbind(1), mask_BT.bool().unbind(1), strict=True
        ):
            loglik_BC = pending_BCV.gather(-1, token_B[:, None, None].expand(-1, pending_BCV.shape[1], 1))[..., 0]
            updated_BC = update(log_pi_BC, loglik_BC, prior_BC, self.switch_prob)
            log_pi_BC = torch.where((real_B & started_B)[:, None], updated_BC, log_pi_BC)
            pending_BCV = torch.where(real_B[:, None, None], row_CBV.transpose(0, 1), pending_BCV)
            started_B = started_B | real_B
            pi.append(log_pi_BC)
        return logp_CBTV, torch.stack(pi, 1), MixtureState(prior_BC, log_pi_BC, pending_BCV, started_B)

    def _components(self, logp_MBTV: Tensor, prior_BC: Tensor) -> Tensor:
        """Return log p_c, [C, B, T, V]: of texts with the same active members together."""
        experts = len(logp_MBTV) - 1
        own = self.candidates(experts)
        rows = [tuple(prior_N) for prior_N in (prior_BC[:, 1 : 1 + len(own)] > 0).tolist()]
        parts, places = [], []
        for is_active in set(rows):
            place = [row for row, each in enumerate(rows) if each == is_active]
            active = [number for number, yes in zip(own, is_active, strict=True) if yes]
            parts.append(component_logp(logp_MBTV[:, place], self.component_weights(experts, active)))
            places += place
        order_B = torch.tensor(places, device=logp_MBTV.device).argsort()
        return torch.cat(parts, 1)[:, order_B]

    def _explanation(self, logp_MBTV: Tensor, logp_BTV: Tensor, pi_BTC: Tensor, state: MixtureState) -> Explanation:
        """Share what every component holds of π among its experts. Styles share the probability that they moved: the
        total variation between the mixture without them and with them."""
        experts = len(logp_MBTV) - 1
        own, styles = self.candidates(experts), [*self.styles]
        share_BTM = pi_BTC.new_zeros(*pi_BTC.shape[:2], 1 + experts)
        share_BTM[..., [0, *own]] = pi_BTC[..., : 1 + len(own)]
        if len(own) > 1:
            active_BN = state.prior_BC[:, 1 : 1 + len(own)] > 0
            each_BN = active_BN / active_BN.sum(-1, keepdim=True).clamp_min(1)
            share_BTM[..., own] += pi_BTC[..., -1:] * each_BN[:, None]
        owner_C = torch.tensor([0, *own, *([0] if len(own) > 1 else [])], device=pi_BTC.device)
        if styles:
            plain = self._components_without(styles, logp_MBTV, state.prior_BC)
            moved_BT1 = (logp_BTV.exp() - _mixed(plain, pi_BTC.log()).exp()).abs().sum(-1, keepdim=True) / 2
            share_BTM = share_BTM * (1 - moved_BT1)
            share_BTM[..., styles] = moved_BT1 / len(styles)
            owner_C[0] = styles[0]  # the base in its styles is the first of them
        log_z_BT = product_scores(logp_MBTV.to(logp_BTV.dtype), self.weights).logsumexp(-1)
        more = {"pi_BTC": pi_BTC, "law_BTL": self._per_member(pi_BTC, experts)}
        return Explanation(share_BTM, owner_C[pi_BTC.argmax(-1)], log_z_BT, more)

    def _per_member(self, pi_BTC: Tensor, experts: int) -> Tensor:
        """Return π of every member's own component, 0 where it has none, then of Eq. 2: [B, T, M + 1]."""
        own = self.candidates(experts)
        posterior_BTL = pi_BTC.new_zeros(*pi_BTC.shape[:2], 2 + experts)
        posterior_BTL[..., [0, *own]] = pi_BTC[..., : 1 + len(own)]
        if len(own) > 1:
            posterior_BTL[..., -1] = pi_BTC[..., -1]
        return posterior_BTL

    def _components_without(self, styles: Sequence[int], logp_MBTV: Tensor, prior_BC: Tensor) -> Tensor:
        """Return the components with the styles' columns at 0."""
        weights = self.weights or (1.0,) * (len(logp_MBTV) - 1)
        silent = tuple(0.0 if number in styles else weight for number, weight in enumerate(weights, 1))
        plain = replace(self, weights=silent)
        return plain._components(logp_MBTV.to(working_dtype(logp_MBTV)), prior_BC)


def _mixed(logp_CBTV: Tensor, log_pi_BTC: Tensor) -> Tensor:
    """Return log p̂ at every position, [B, T, V]."""
    flat = mix_components(logp_CBTV.flatten(1, 2), log_pi_BTC.flatten(0, 1))
    return flat.unflatten(0, log_pi_BTC.shape[:2])
