"""Eq. 2 and the table of rules: pure functions of log-probabilities. Imports torch alone.

A rule combines the members' next-token log-probabilities into one normalised distribution. It knows nothing
of models, tokenizers or files. Member 0 is the base; the others are experts.

    M members   K = M−1 experts   B batch   T time   V vocabulary   W window

The rule protocol, for rules with and without state:

    rule(logp_MBTV, tokens_BT, mask_BT, state) -> (logp_BTV, state)

tokens[t] is the token fed at t, the one that row t−1 predicted; padding (mask False) is never observed. State is
None at the start of a sequence, else a NamedTuple of tensors with the batch first; it depends on the last
`window` positions at most, so that it can be rebuilt by feeding those again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from . import gates
from .evidence import Evidence, Trace, explained

LARGEST_WEIGHT = 1e6  # float32 log-probabilities times more than this overflow
LOG_FLOOR = -1e4  # how a ratio reads log 0 in its denominator; the paper's own clamp


class Rule(Protocol):
    """How log-probabilities combine. See the module's docstring for the meaning of the arguments."""

    @property
    def name(self) -> str: ...

    @property
    def window(self) -> int: ...

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]: ...


def product(logp_MBV: Tensor, weights_K: Sequence[float] | Tensor | None = None) -> Tensor:
    """Eq. 2 with weights: log p̂ = log p_b + Σ_i w_i (log p_i − log p_b) − log Z (arXiv 2605.28304).

    Any dimensions may stand between the members (first) and the vocabulary (last). The result is normalised, in
    float32 at least. All weights 1 is the paper's rule; one expert with weight 1 is that expert; a negative weight
    is an anti-expert. Weights are used as they are, never divided by their sum.

    Zeros are defined: a token is impossible where a member that counts positively gives it probability 0. Where
    only a negatively counted member does, its log 0 is read as −10⁴, so the token outranks the others. A member
    that counts zero has no say. If nothing is possible, the members contradict each other, and the base speaks.
    """
    return normalise(product_scores(logp_MBV, weights_K), fallback=logp_MBV[0])


def product_scores(logp_MBV: Tensor, weights_K: Sequence[float] | Tensor | None = None) -> Tensor:
    """Eq. 2 before it is normalised. The log of its sum over the vocabulary is log Z, the interference."""
    count_M = member_counts(weights_K, logp_MBV)
    floor_M = torch.where(count_M > 0, -torch.inf, LOG_FLOOR)  # a positive member may say "impossible", others not
    floored_MBV = torch.maximum(logp_MBV.to(count_M.dtype), floor_M.view(-1, *[1] * (logp_MBV.ndim - 1)))
    return torch.tensordot(count_M, floored_MBV, dims=1)


def member_counts(weights_K: Sequence[float] | Tensor | None, logp_MBV: Tensor) -> Tensor:
    """How often each member counts in the sum of log-probabilities: 1 − Σ w for the base, w_i for expert i."""
    experts = logp_MBV.shape[0] - 1
    if experts < 1:
        raise ValueError("a rule takes the base and at least one expert; it was given one member")
    if weights_K is None:
        weights_K = [1.0] * experts
    weight_K = _on_device(weights_K, logp_MBV)
    if weight_K.shape != (experts,):
        raise ValueError(f"expected {experts} weights, one an expert; got shape {tuple(weight_K.shape)}")
    return torch.cat([1 - weight_K.sum(0, keepdim=True), weight_K])


def _on_device(weights_K: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """Weights where the log-probabilities are. Not copied there from the host, which a CUDA graph does not allow."""
    dtype = working_dtype(like)
    if isinstance(weights_K, Tensor):
        return weights_K.to(like.device, dtype)
    return torch.cat([like.new_zeros(0, dtype=dtype), *(like.new_full((1,), w, dtype=dtype) for w in weights_K)])


def normalise(score_BV: Tensor, fallback: Tensor) -> Tensor:
    """Log-softmax; rows in which nothing is possible become the fallback."""
    impossible_B1 = score_BV.amax(-1, keepdim=True) == -torch.inf
    return torch.where(impossible_B1, fallback.to(score_BV.dtype), score_BV).log_softmax(-1)


def tilt(logp_MBV: Tensor, weights_K: Sequence[float] | Tensor) -> Tensor:
    """Put p_i^(w) ∝ p_b^(1−w_i) p_i^(w_i) in the place of every expert: what a weight means to every other rule."""
    dtype, weight_K = working_dtype(logp_MBV), _on_device(weights_K, logp_MBV)
    pairs = zip(logp_MBV[1:].to(dtype), weight_K.unbind(), strict=True)
    base_BV = logp_MBV[0].to(dtype)
    return torch.stack([base_BV, *(product(torch.stack([base_BV, p]), w[None]) for p, w in pairs)])


def working_dtype(logp: Tensor) -> torch.dtype:
    """Half precision is never enough to combine log-probabilities."""
    return torch.promote_types(logp.dtype, torch.float32)


def normalised(logits_M: Sequence[Tensor] | Tensor) -> Tensor:
    """The members' log-probabilities, stacked, in a precision that is enough to combine them."""
    if isinstance(logits_M, Tensor):
        return logits_M.to(working_dtype(logits_M)).log_softmax(-1)
    return torch.stack([logits.to(working_dtype(logits)).log_softmax(-1) for logits in logits_M])


@dataclass(frozen=True)
class Product:
    """The paper's rule, Eq. 2, as a rule object."""

    weights: tuple[float, ...] | None = None
    name = "product"
    window = 0

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        weights = self.weights or (1.0,) * (len(logp_MBTV) - 1)
        speaking = [expert for expert, weight in enumerate(weights) if weight != 0]
        if len(speaking) == 1 and weights[speaking[0]] == 1:  # that expert, to the last bit
            return logp_MBTV[1 + speaking[0]], None
        return product(logp_MBTV, weights), None


@dataclass(frozen=True)
class Weighted:
    """Any other rule, over experts tilted by their weights."""

    rule: Rule
    weights: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def window(self) -> int:
        return self.rule.window

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.rule(tilt(logp_MBTV, self.weights), tokens_BT, mask_BT, state)

    def explain(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any
    ) -> tuple[Tensor, Any, Trace | None]:
        return explained(self.rule, tilt(logp_MBTV, self.weights), tokens_BT, mask_BT, state)


@dataclass(frozen=True)
class RuleEntry:
    """A row of the rule table: what it is called, what makes it, what it is, where it comes from."""

    make: Callable[..., Rule]
    summary: str
    reference: str
    termination: str = "rule"  # who may stop, where the user does not say


DEFAULT = "evidence"
RULES: dict[str, RuleEntry] = {
    "evidence": RuleEntry(
        Evidence,
        "Eq. 2 while the members are compatible, else the owner that the evidence singles out",
        "help(tessellm.evidence); equals arXiv 2605.28304, Eq. 2 where its theory holds",
        termination="owner",
    ),
    "product": RuleEntry(Product, "add log-probabilities, subtract the base's k−1 times", "arXiv 2605.28304, Eq. 2"),
    "owner": RuleEntry(gates.Owner, "the most divergent expert speaks alone", "help(tessellm.gates)"),
    "relative-gate": RuleEntry(
        gates.RelativeGate,
        "Eq. 2 over the experts that diverge by a share of the largest divergence",
        "help(tessellm.gates)",
    ),
    "tail-floor": RuleEntry(
        gates.TailFloor, "Eq. 2 without the tails of all experts but the most divergent", "help(tessellm.gates)"
    ),
    "plausibility": RuleEntry(
        gates.Plausibility, "Eq. 2 on the tokens that an expert finds plausible", "after arXiv 2210.15097"
    ),
}


def make_rule(name: str, weights: Sequence[float] | None = None, **parameters: Any) -> Rule:
    """A rule of the table, by name, with its parameters and the experts' weights."""
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}; known: {', '.join(RULES)}")
    return with_weights(RULES[name].make(**parameters), weights)


def default_termination(name: str) -> str:
    """Who may stop, where the user does not say."""
    return RULES[name].termination if name in RULES else "rule"


def with_weights(rule: Rule, weights: Sequence[float] | None) -> Rule:
    """The same rule over weighted experts."""
    if weights is None or all(weight == 1 for weight in weights):
        return rule
    numbers = tuple(float(weight) for weight in weights)
    return Product(numbers) if isinstance(rule, Product) else Weighted(rule, numbers)


def describe_rule(rule: Rule) -> dict[str, Any]:
    """A rule's name and those of its parameters that are not the default, as a config holds them."""
    entry: dict[str, Any] = {"name": rule.name}
    for field in fields(rule) if is_dataclass(rule) else ():  # type: ignore[var-annotated]
        if field.init and field.name not in ("name", "weights") and getattr(rule, field.name) != field.default:
            entry[field.name] = getattr(rule, field.name)
    return entry


def plain_rule(rule: str | Mapping[str, Any] | Rule) -> tuple[Rule, Sequence[float] | None]:
    """A rule object without weights, and the weights that it came with: those are the experts'."""
    if isinstance(rule, str):
        rule = {"name": rule}
    if isinstance(rule, Mapping):
        rule = make_rule(rule["name"], **{key: value for key, value in rule.items() if key != "name"})
    if isinstance(rule, Weighted):
        return rule.rule, rule.weights
    if isinstance(rule, Product):
        return Product(), rule.weights
    return rule, None
