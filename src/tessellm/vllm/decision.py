"""How a route is asked of the engine and comes back: as a request for one token, whose log-probabilities are those of
the router's prior (worker.py). Token 0 is the base, token k is expert k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..routing import Route
from .versions import SamplingParams

FLAG = "tessellm_route"  # in a request's extra arguments
FOLDER = "tessellm"  # in vLLM's additional configuration: the composition
MOST_SHOWN = 20  # members whose prior comes back: vLLM's default limit of log-probabilities


def route_params(members: int) -> Any:
    """The sampling parameters of a request that asks for its route among that many members."""
    return SamplingParams(
        temperature=0, max_tokens=1, logprobs=min(members, MOST_SHOWN), ignore_eos=True, detokenize=False,
        skip_reading_prefix_cache=True, extra_args={FLAG: True},
    )  # fmt: skip


def read_route(output: Any, members: Sequence[str]) -> Route:
    """The route that came back: the prior of the likeliest members."""
    (answer,) = output.outputs
    shares = {token: math.exp(each.logprob) for token, each in answer.logprobs[0].items()}
    prior = {members[token]: share for token, share in sorted(shares.items()) if share > 0}
    return Route(prior, members[answer.token_ids[0]])
