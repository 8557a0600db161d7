"""A composition's rule, compiled, which makes a few kernels of many small ones.

A step is compiled for each number of rows, which it runs thousands of times; drafts are judged token by token, by what
was compiled for steps: they come in many shapes, and compiling for them would take minutes. A rule that cannot be
compiled is called as it is.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...errors import first_line
from ...rules import BaseRule
from .passes import Decided, Logits, RuleRunner, combine

log = logging.getLogger("tessellm.engine")
PARTS = 128  # of a vocabulary on a GPU


def decide_in_parts(rule: BaseRule, logits_M: Logits) -> Decided:
    """Choose the likeliest token as `decide` does; the compiler does not share out a search by itself."""
    logp_BTV, nonfinite_BM = combine(rule, logits_M)
    return *best(logp_BTV[:, -1]), nonfinite_BM


def best(logp_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Find the likeliest token of each row and its log-probability, part by part of the vocabulary."""
    part_BPN = parts(logp_BV, -torch.inf)
    top_BP, at_BP = part_BPN.max(-1)
    logprob_B, part_B = top_BP.max(-1)
    return part_B * part_BPN.shape[-1] + at_BP.gather(-1, part_B[..., None])[..., 0], logprob_B


def parts(x_BV: Tensor, fill: float) -> Tensor:
    """Cut a vocabulary into pieces, as many as keep a GPU busy: each is searched in one pass, and they in another."""
    padded = torch.nn.functional.pad(x_BV, (0, -x_BV.shape[-1] % PARTS), value=fill)
    return padded.unflatten(-1, (PARTS, -1))


def compiled_runner(rule: BaseRule) -> RuleRunner:
    """Compile a rule when a shape first comes. Engines with the same rule and shapes share what was compiled for it."""
    compiled: Callable[..., Any] = _shared if _hashable(rule) else lru_cache(_shared.__wrapped__)

    def run(function: Callable[..., Any], logits_M: Sequence[Tensor]) -> Any:
        logits_MBTV = together(logits_M)
        shape = logits_MBTV.device, logits_MBTV.dtype, *logits_MBTV.shape
        return compiled(function, rule, *shape)(logits_MBTV)

    return RuleRunner(partial(run, combine), partial(run, decide_in_parts), drafts_at_once=False)


@lru_cache(maxsize=256)
def _shared(function: Any, rule: BaseRule, *shape: Any) -> Callable[..., Any]:
    """Compile a function of a rule. It has code of its own, since the compiler gives up on code that comes in too many
    shapes, and always this very rule, since it may be compiled again for another that is equal."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return _Compiled(torch.compile(own, fullgraph=True, dynamic=False), partial(function, rule), rule)


class _Compiled:
    """A compiled function of a rule; the function itself once the compiler has failed at it, which is said."""

    def __init__(self, compiled: Callable[..., Any], plain: Callable[..., Any], rule: BaseRule):
        self.run: Callable[..., Any] = partial(compiled, rule)
        self.plain, self.rule = plain, rule

    def __call__(self, *given: Any) -> Any:
        """Call without warnings: the first call compiles, and the compiler's remarks about itself are not for our
        users. A graph that was captured does not come here."""
        if self.run is self.plain:
            return self.plain(*given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.run(*given)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any kind; one that is the rule's own comes again
                log.warning("the rule %r runs uncompiled, which is slower: %s", self.rule.name, first_line(error))
                log.debug("where the compiler failed:", exc_info=error)
                self.run = self.plain
        return self.plain(*given)


def together(logits_M: Sequence[Tensor]) -> Tensor:
    """Stack the members' logits; without a copy where they lie in one tensor already, as a fused pass leaves them."""
    one, step = logits_M[0], 0 if len(logits_M) == 1 else logits_M[1].storage_offset() - logits_M[0].storage_offset()
    for member, logits in enumerate(logits_M):
        same = logits.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
        if not same or logits.storage_offset() != one.storage_offset() + member * step or step < 0:
            return torch.stack(list(logits_M))
        if logits.stride() != one.stride() or logits.shape != one.shape or logits.dtype != one.dtype:
            return torch.stack(list(logits_M))
    return one.as_strided((len(logits_M), *one.shape), (step, *one.stride()), one.storage_offset())


def _hashable(rule: BaseRule) -> bool:
    try:
        hash(rule)
    except TypeError:
        return False
    return True
