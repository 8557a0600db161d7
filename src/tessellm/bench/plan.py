"""Which cases a sweep has, and the composition to run them on. Knows no command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..decoding.speculation import Speculation
from ..errors import EngineError
from ..model import ComposedForCausalLM
from ..model.variants import is_alone
from .measure import Case, sweep
from .models import first_experts, random_composition

MOST = 1 << 20  # of anything: no machine takes more
Progress = Callable[[str], None]


def cases(experts: Sequence[int], batches: Sequence[int], prompts: Sequence[int]) -> list[Case]:
    """The first of each together, then each quantity varied by itself: a star, not a grid."""
    for name, values in (("experts", experts), ("batch", batches), ("prompt", prompts)):
        least = 0 if name == "experts" else 1  # a member alone has none
        if not values or min(values) < least or max(values) > MOST:
            raise EngineError(f"expected whole numbers from 1 to {MOST:,} for {name}; got {list(values)}")
    found = [Case(experts[0], batch, prompts[0]) for batch in batches]
    found += [Case(experts[0], batches[0], prompt) for prompt in prompts[1:]]
    return found + [Case(count, batches[0], prompts[0]) for count in experts[1:]]


@dataclass(frozen=True)
class SweepPlan:
    """What to measure of a composition, and against what."""

    experts: Sequence[int] = ()  # all that it has, if none is given
    batches: Sequence[int] = (1,)
    prompts: Sequence[int] = (128,)
    new: int = 64
    rounds: int = 3
    compiled: bool = True
    loops: bool = True
    speculate: str | None = None

    def __post_init__(self) -> None:
        if self.new < 2:  # below two new tokens nothing is timed
            raise EngineError(f"expected at least two new tokens; got {self.new}")


@dataclass(frozen=True)
class RandomWeights:
    """A composition with random weights, to be made."""

    shapes: str
    kind: str = "full"
    rule: str = "evidence"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def make(self, experts: Sequence[int], progress: Progress) -> ComposedForCausalLM:
        count = max(experts or [2])
        progress(f"random weights in the shapes of {self.shapes}: a base and {count} experts ({self.kind})")
        return random_composition(self.shapes, count, self.kind, self.rule, self.device, self.dtype)


def run_random(weights: RandomWeights, plan: SweepPlan, progress: Progress = lambda text: None) -> dict[str, Any]:
    """Measure random weights of the given shapes."""
    return {**run(weights.make(plan.experts, progress), plan, progress), "shapes": weights.shapes, "kind": weights.kind}


def run(model: ComposedForCausalLM, plan: SweepPlan, progress: Progress = lambda text: None) -> dict[str, Any]:
    """Measure a composition."""
    speculation = Speculation(plan.speculate) if plan.speculate is not None else None
    if is_alone(model) and plan.experts:
        raise EngineError("one member has no experts to choose among: leave out --experts")
    todo = cases(list(plan.experts) or [len(model.members) - 1], plan.batches, plan.prompts)
    model.config.check_room(max(plan.prompts), plan.new, "the longest prompt", "--new-tokens")
    found = sweep(
        lambda count: model if is_alone(model) else first_experts(model, count),
        todo,
        plan.new,
        plan.rounds,
        plan.compiled,
        plan.loops,
        speculation,
        progress,
    )
    return {"shapes": None, "kind": None, "dtype": str(model.dtype).split(".")[-1], **found}
