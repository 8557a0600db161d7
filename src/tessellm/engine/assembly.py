"""Put an engine's parts together: groups that compute what their members do, and an executor for their device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from ..errors import EngineError, FastPathError
from ..model import ComposedForCausalLM
from .branch_executor import BranchExecutor
from .cuda.kernel_cache import keep_kernels
from .executor import Executor
from .members.groups import Group, make_groups, stacks_fine_tunes
from .members.plain import plain_groups
from .prefixes import Prefixes
from .routes import Routes
from .self_check import branch_reads, check, refuse_unknown


def make_executor(
    model: ComposedForCausalLM,
    routes: Routes,
    prefixes: Prefixes,
    slots: int,
    context: int,
    plain: bool,
    compiled: bool,
) -> Executor:
    """Make the fastest executor that runs these members. On a GPU forwards over all members of a slot are captured;
    there `compiled` compiles what has no kernel."""
    if plain:
        return BranchExecutor(model, plain_groups(model), routes, prefixes, slots)
    groups = fast_groups(model, slots, context)
    if runs_slots(groups):
        from .cuda.slot_executor import slot_executor

        return slot_executor(model, groups, routes, slots, context, compiled)
    return BranchExecutor(model, groups, routes, prefixes, slots)


def runs_slots(groups: Sequence[Group]) -> bool:
    """Whether all members of a slot run together: on a GPU, whose kernels are made for that."""
    return any(group.fused is not None or group.module.device.type == "cuda" for group in groups)


def fast_groups(model: ComposedForCausalLM, slots: int, context: int) -> list[Group]:
    """Make groups that equal their members: stacked where that is faster, apart where stacking is not right."""
    if getattr(model, "hf_device_map", None):
        raise FastPathError("the fast path needs all members on one device; these are on several")
    refuse_unknown(model)
    if model.device.type == "cuda":
        keep_kernels()
        torch.cuda.set_device(model.device)  # kernels, streams and graphs go to the current one
    try:
        if stacks_fine_tunes(model):
            with contextlib.suppress(EngineError):
                return _checked_groups(model, slots, context, stacked=True)
        return _checked_groups(model, slots, context, stacked=False)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"{slots} slots of {context} tokens do not fit into the memory of {model.device}: use fewer slots or a "
            f"smaller context. ({str(error).splitlines()[0]})"
        ) from error


def _checked_groups(model: ComposedForCausalLM, slots: int, context: int, stacked: bool) -> list[Group]:
    groups = make_groups(model, slots, context, stacked)
    if runs_slots(groups):
        from .cuda.slot_executor import check_slots

        check_slots(model, groups, slots, context)
    else:
        check(model, groups, branch_reads(groups, len(model.members), slots), context)
    return groups
