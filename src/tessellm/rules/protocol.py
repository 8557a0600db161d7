"""The rule protocol: what a rule is given, what it hands back, and what it can tell of itself.

A rule combines the members' next-token log-probabilities into one normalised distribution. It knows nothing
of models, tokenizers or files. Member 0 is the base; the others are experts.

    M members   K = M−1 experts   B batch   T time   V vocabulary   W window

For rules with and without state:

    rule(logp_MBTV, tokens_BT, mask_BT, state) -> (logp_BTV, state)
    rule.explain(the same)                     -> (logp_BTV, state, Explanation)

tokens[t] is the token fed at t, the one that row t−1 predicted; padding (mask False) is never observed. State is
None at the start of a sequence, else a NamedTuple of tensors with the batch first. Whoever starts within a text feeds
the last `window` positions before it, and gets what feeding it all gives. A window of 0: no state.

A rule need not write all of it: base.py has `BaseRule`, which needs no more than a name and `__call__`, and
`FunctionRule`, which needs a name and a function. Weights and stopping are added by complete.py. A rule may have a
method `check_fit(experts, vocab_size)`, which raises ValueError where its parameters are not those of such members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Weights = Sequence[float] | Tensor  # one per expert; a tensor where gradients are wanted


class Explanation(NamedTuple):
    """Why each row came out as it did; every tensor begins with [B, T]."""

    belief_BTM: Tensor  # the share of each member (or of each law that the rule weighs) in what is said; sums to 1
    owner_BT: Tensor  # the member that decides; 0 where several do, or the base
    log_z_BT: Tensor  # log Z of Eq. 2 over the experts that are heard, nats
    more: Mapping[str, Tensor]  # what this rule alone can tell, by name
    # Names in `more` that others read where a rule fills them:
    #   run_owner_BT    termination: the member that may end the text, 0 where the rule itself decides
    #   trusted_BTM     termination, traces: whose wish to end the text counts
    #   evidence_BTM, interference_BT, blended_BT    traces

    def map(self, function: Callable[[Tensor], Tensor]) -> Explanation:
        """Apply a function, such as a choice of rows, to every tensor."""
        belief, owner, log_z = (function(each) for each in self[:3])
        return Explanation(belief, owner, log_z, {name: function(each) for name, each in self.more.items()})

    @staticmethod
    def joined(whys: Sequence[Explanation]) -> Explanation:
        """Put blocks of one text together."""
        belief, owner, log_z = (torch.cat(pieces, 1) for pieces in zip(*(why[:3] for why in whys), strict=True))
        more = {name: torch.cat([why.more[name] for why in whys], 1) for name in whys[0].more}
        return Explanation(belief, owner, log_z, more)


Explained = tuple[Tensor, Any, Explanation]


@runtime_checkable
class Rule(Protocol):
    """How log-probabilities combine. See the module's docstring for the meaning of the arguments."""

    @property
    def name(self) -> str: ...

    @property
    def window(self) -> int: ...

    @property
    def weights(self) -> Weights | None:
        """The experts' weights that the rule was made with, if any."""

    @property
    def is_product(self) -> bool:
        """Whether it is Eq. 2 itself."""

    @property
    def tells(self) -> frozenset[str]:
        """The names in `more` of its explanations."""

    def __call__(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def explain(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, state: Any) -> Explained:
        """Do what a call does, to the last bit, and say why."""

    def weighted(self, weights: Weights | None) -> Rule | None:
        """Return the rule with weights in it, if it has a way of its own to weigh experts; None: tilt its experts."""

    def describe(self) -> dict[str, Any]:
        """Return its name and those of its parameters that are not the default, as a config holds them."""

    def idle_budget(self, kl_BTK: Tensor, epsilon_BTK: Tensor, why: Explanation) -> tuple[Tensor, Tensor]:
        """Name the member whose law would be ideal, and bound the error that idle experts bring in: both [B, T].

        `kl` is KL(p_i ‖ p_b), `epsilon` is sup_v |log p_i − log p_b| of the experts as the rule hears them.
        """
