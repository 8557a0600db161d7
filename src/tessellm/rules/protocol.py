"""The rule protocol: what a rule is given, and what it hands back.

A rule combines the members' next-token log-probabilities into one normalised distribution. It knows nothing
of models, tokenizers or files. Member 0 is the base; the others are experts.

    M members   K = M−1 experts   B batch   T time   V vocabulary   W window

For rules with and without state:

    rule(logp_MBTV, tokens_BT, mask_BT, state) -> (logp_BTV, state)

tokens[t] is the token fed at t, the one that row t−1 predicted; padding (mask False) is never observed. State is
None at the start of a sequence, else a NamedTuple of tensors with the batch first; it depends on the last
`window` positions at most, so that it can be rebuilt by feeding those again.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Rule(Protocol):
    """How log-probabilities combine. See the module's docstring for the meaning of the arguments."""

    @property
    def name(self) -> str: ...

    @property
    def window(self) -> int: ...

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]: ...
