"""Which cases a sweep has, and the composition to run them on. Knows no command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..decoding.speculation import Speculation
from ..errors import EngineError
from ..model import ComposedForCausalLM
from .measure import Case, sweep
from .models import first_experts, random_composition

MOST = 1 << 20  # of anything: no machine takes more


def cases(experts: Sequence[int], batches: Sequence[int], prompts: Sequence[int]) -> list[Case]:
    """The first of each together, then each quantity varied by itself: a star, not a grid."""
    for name, values in (("experts", experts), ("batch", batches), ("prompt", prompts)):
        if not values or min(values) < 1 or max(values) > MOST:
            raise EngineError(f"expected whole numbers from 1 to {MOST:,} for {name}; got {list(values)}")
    found = [Case(experts[0], batch, prompts[0]) for batch in batches]
    found += [Case(experts[0], batches[0], prompt) for prompt in prompts[1:]]
    return found + [Case(count, batches[0], prompts[0]) for count in experts[1:]]


def run(
    model: ComposedForCausalLM | None,
    shapes: str | None = None,
    kind: str = "full",
    experts: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    prompts: Sequence[int] = (128,),
    new: int = 64,
    rounds: int = 3,
    rule: str = "evidence",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = True,
    loops: bool = True,
    speculate: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure a composition, or one with random weights of the given shapes. Below two new tokens nothing is timed."""
    if new < 2:
        raise EngineError(f"expected at least two new tokens; got {new}")
    speculation = Speculation(speculate) if speculate is not None else None
    if model is None:
        if shapes is None:
            raise EngineError("expected a composition to measure, or --shapes for one with random weights")
        counts = list(experts) or [2]
        progress(f"random weights in the shapes of {shapes}: a base and {max(counts)} experts ({kind})")
        model = random_composition(shapes, max(counts), kind, rule, device, dtype)
    counts = list(experts) or [len(model.members) - 1]
    todo, whole = cases(counts, batches, prompts), model
    model.config.check_room(max(prompts), new, "the longest prompt", "--new-tokens")
    found = sweep(lambda count: first_experts(whole, count), todo, new, rounds, compiled, loops, speculation, progress)
    return {"shapes": shapes, "kind": kind if shapes else None, "dtype": str(model.dtype).split(".")[-1], **found}
