"""A rule as passes run it: just called, or compiled, which makes a few kernels of many small ones.

    combine   log-probabilities and the rule over them, for a step
    say       what the rule says along drafts, where a pass has several tokens a row
    observe   its state after those of them that stand

A step is compiled for each number of rows, which it runs thousands of times. Passes over drafts come in many shapes, so
rows and tokens stay open there, and only one row alone is a case of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..rules import Rule, normalised

Combined = tuple[Tensor, Any]


def combine(rule: Rule, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Combined:
    """The rule over the members' logits."""
    return rule(normalised(logits_M), token_BT, mask_BT, state)


def say(rule: Rule, logp_MBTV: Tensor, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Tensor:
    return rule(logp_MBTV, token_BT, mask_BT, state)[0]


def observe(rule: Rule, logp_MBTV: Tensor, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Any:
    return rule(logp_MBTV, token_BT, mask_BT, state)[1]


class PlainRule:
    """The rule as it is."""

    def __init__(self, rule: Rule):
        self.rule = rule

    def combine(self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Combined:
        return combine(self.rule, logits_M, token_BT, mask_BT, state)

    def say(self, logp_MBTV: Tensor, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Tensor:
        return say(self.rule, logp_MBTV, token_BT, mask_BT, state)

    def observe(self, logp_MBTV: Tensor, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Any:
        return observe(self.rule, logp_MBTV, token_BT, mask_BT, state)


class CompiledRule(PlainRule):
    """The rule, compiled when a shape first comes; engines with the same rule and shapes share what was compiled."""

    def __init__(self, rule: Rule):
        super().__init__(rule)
        self._compiled: Any = _shared if _hashable(rule) else lru_cache(_shared.__wrapped__)

    def combine(self, logits_M: Sequence[Tensor], token_BT: Tensor, mask_BT: Tensor, state: Any) -> Combined:
        one = logits_M[0]
        step = self._compiled(combine, False, self.rule, one.device, one.dtype, len(logits_M), *one.shape)
        found: Combined = step(logits_M, token_BT, mask_BT, state)
        return found

    def say(self, logp_MBTV: Tensor, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Tensor:
        return self._open(say, logp_MBTV)(_fixed(logp_MBTV), token_BT, mask_BT, state)

    def observe(self, logp_MBTV: Tensor, token_BT: Tensor, mask_BT: Tensor, state: Any) -> Any:
        return self._open(observe, logp_MBTV)(_fixed(logp_MBTV), token_BT, mask_BT, state)

    def _open(self, function: Callable[..., Any], logp_MBTV: Tensor) -> Callable[..., Any]:
        members, _, _, vocabulary = logp_MBTV.shape
        found: Callable[..., Any] = self._compiled(
            function, True, self.rule, logp_MBTV.device, logp_MBTV.dtype, members, vocabulary
        )
        return found


@lru_cache(maxsize=256)
def _shared(function: Any, dynamic: bool, rule: Rule, *shape: Any) -> Callable[..., Any]:
    """A function of a rule, compiled. It has code of its own, since the compiler gives up on code that comes in too
    many shapes, and always this very rule, since it may be compiled again for another that is equal."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return partial(torch.compile(own, fullgraph=True, dynamic=dynamic), rule)


def _hashable(rule: Rule) -> bool:
    try:
        hash(rule)
    except TypeError:
        return False
    return True


def _fixed(logp_MBTV: Tensor) -> Tensor:
    """Neither members nor vocabulary ever change."""
    for axis in (0, 3):
        torch._dynamo.mark_static(logp_MBTV, axis)
    return logp_MBTV
