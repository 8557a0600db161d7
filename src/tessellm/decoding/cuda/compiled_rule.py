"""A rule as passes run it: just called, or compiled, which makes a few kernels of many small ones.

    combine   log-probabilities and the rule over them, for a step
    decide    the same, and the best token of it, where no more is asked for
    along     what it says along drafts, where a pass has several tokens a row, and its state after those that stand

A step is compiled for each number of rows, which it runs thousands of times. Drafts are read token by token, by what
was compiled for steps: they come in many shapes, and compiling for them would take minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...rules import Rule, normalised
from ...rules.sums import parts

Combined = tuple[Tensor, Any]
Decided = tuple[Tensor, Tensor, Any]
Logits = Sequence[Tensor] | Tensor


def combine(rule: Rule, logits_M: Logits, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Combined:
    """The rule over the members' logits."""
    return rule(normalised(logits_M), token_BT, mask_BT, state)


def decide(rule: Rule, logits_M: Logits, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Decided:
    """The best token after the last position, its log-probability, and the rule's state."""
    logp_BTV, state = combine(rule, logits_M, token_BT, mask_BT, state)
    return *best(logp_BTV[:, -1]), state


def best(logp_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row and its log-probability. Compiled, a search is never shared out by itself."""
    if not torch.compiler.is_compiling():
        logprob_B, token_B = logp_BV.max(-1)
        return token_B, logprob_B
    piece_BPN = parts(logp_BV, -torch.inf)
    top_BP, at_BP = piece_BPN.max(-1)
    logprob_B, piece_B = top_BP.max(-1)
    return piece_B * piece_BPN.shape[-1] + at_BP.gather(-1, piece_B[:, None])[:, 0], logprob_B


@dataclass(frozen=True)
class Along:
    """What a rule says along drafts, and its state after those that stand."""

    logp_BTV: Tensor
    after: Callable[[Tensor], Any]


class PlainRule:
    """The rule as it is."""

    at_once = True  # drafts are read together, not token by token

    def __init__(self, rule: Rule):
        self.rule = rule

    def combine(self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Combined:
        return combine(self.rule, logits_M, token_BT, mask_BT, state)

    def decide(self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Decided:
        return decide(self.rule, logits_M, token_BT, mask_BT, state)

    def along(self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Along:
        logp_MBTV = normalised(logits_M)
        said_BTV = self.rule(logp_MBTV, token_BT, mask_BT, state)[0]
        return Along(said_BTV, lambda kept_BT: self.rule(logp_MBTV, token_BT, kept_BT, state)[1])


class CompiledRule(PlainRule):
    """The rule, compiled when a shape first comes; engines with the same rule and shapes share what was compiled."""

    at_once = False

    def __init__(self, rule: Rule):
        super().__init__(rule)
        self._compiled: Any = _shared if _hashable(rule) else lru_cache(_shared.__wrapped__)

    def combine(self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Combined:
        found: Combined = self._step(combine, together(logits_M), token_BT, mask_BT, state)
        return found

    def decide(self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Decided:
        found: Decided = self._step(decide, together(logits_M), token_BT, mask_BT, state)
        return found

    def _step(self, function: Callable[..., Any], logits_MBTV: Tensor, *given: Any) -> Any:
        shape = logits_MBTV.device, logits_MBTV.dtype, *logits_MBTV.shape
        return self._compiled(function, self.rule, *shape)(logits_MBTV, *given)


@lru_cache(maxsize=256)
def _shared(function: Any, rule: Rule, *shape: Any) -> Callable[..., Any]:
    """A function of a rule, compiled. It has code of its own, since the compiler gives up on code that comes in too
    many shapes, and always this very rule, since it may be compiled again for another that is equal."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return partial(_quietly, torch.compile(own, fullgraph=True, dynamic=False), rule)


def _quietly(function: Callable[..., Any], *given: Any) -> Any:
    """The first call compiles, and what the compiler remarks about itself is not for our users. Later calls are few: a
    graph that was captured does not come here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*given)


def together(logits_M: Sequence[Tensor]) -> Tensor:
    """The members' logits as one tensor: not copied where they lie in one already, as a fused pass leaves them."""
    one, step = logits_M[0], 0 if len(logits_M) == 1 else logits_M[1].storage_offset() - logits_M[0].storage_offset()
    for member, logits in enumerate(logits_M):
        same = logits.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
        if not same or logits.storage_offset() != one.storage_offset() + member * step or step < 0:
            return torch.stack(list(logits_M))
        if logits.stride() != one.stride() or logits.shape != one.shape or logits.dtype != one.dtype:
            return torch.stack(list(logits_M))
    return one.as_strided((len(logits_M), *one.shape), (step, *one.stride()), one.storage_offset())


def _hashable(rule: Rule) -> bool:
    try:
        hash(rule)
    except TypeError:
        return False
    return True
