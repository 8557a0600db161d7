"""Put an engine's parts together: groups that compute what their members do, and steps for the device they are on."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import replace
from functools import partial

import torch

from ..errors import EngineError, FastPathError
from ..model import ComposedForCausalLM
from ..rules import ComposedRule
from .buffers import RuleStates, SlotBuffers
from .cuda.kernel_cache import keep_kernels
from .members.groups import Group, make_groups, stacks_fine_tunes
from .passes import RuleRunner, Workspace, combine, decide
from .self_check import check, refuse_unknown
from .steps import Steps
from .voices import Voice


def fast_groups(model: ComposedForCausalLM, slots: int, context: int, drafts: bool) -> list[Group]:
    """Make groups that were checked against their members: stacked where that is faster, apart where it is not right.
    `drafts`: several tokens at once are checked, too."""
    if getattr(model, "hf_device_map", None):
        raise FastPathError("the fast path needs all members on one device; these are on several")
    refuse_unknown(model)
    if model.device.type == "cuda":
        keep_kernels()
        torch.cuda.set_device(model.device)  # kernels, streams and graphs go to the current one
    try:
        if stacks_fine_tunes(model):
            with contextlib.suppress(EngineError):
                return _checked_groups(model, slots, context, drafts, stacked=True)
        return _checked_groups(model, slots, context, drafts, stacked=False)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"{slots} slots of {context} tokens do not fit into the memory of {model.device}: use fewer slots or a "
            f"smaller context. ({str(error).splitlines()[0]})"
        ) from error


def _checked_groups(model: ComposedForCausalLM, slots: int, context: int, drafts: bool, stacked: bool) -> list[Group]:
    groups = make_groups(model, slots, context, stacked)
    check(model, groups, slots, context, drafts)
    return groups


def make_steps(model: ComposedForCausalLM, groups: list[Group], voice: Voice, slots: int, context: int) -> Steps:
    """Make steps that run every pass as it is."""
    runner = RuleRunner(partial(combine, voice.rule), partial(decide, voice.rule), drafts_at_once=True)
    members = len(model.members)
    buffers, numbers = SlotBuffers.empty(slots, members, model.device), members * model.config.vocab_size
    return Steps(Workspace(groups, voice, runner, buffers, RuleStates(slots), numbers), context)


def fast_steps(plain: Steps, compiled: bool, few_shapes: bool) -> Steps:
    """Make the fastest steps on the same slots. On a GPU passes are captured; there `compiled` compiles the rule, which
    is many small kernels otherwise, and `few_shapes` prefers some rows more to another number of rows."""
    if plain.work.slots.token_S.device.type != "cuda":
        return plain
    from .cuda.graphs import GraphSteps

    if not compiled:
        return GraphSteps(plain.work, plain.context, few_shapes)
    wide = any(group.module.dtype == torch.float64 for group in plain.work.groups)
    runner = fast_runner(plain.work.voice.rule, plain.work.slots.broken_SM.shape[1], wide)
    return GraphSteps(replace(plain.work, runner=runner), plain.context, few_shapes)


def fast_runner(rule: ComposedRule, members: int, wide: bool = False) -> RuleRunner:
    """Run a rule on a GPU by kernels of its own, where there are some, else compiled. `wide`: logits are of double
    precision, which those kernels do not keep."""
    from .cuda.compiled_rule import compiled_runner

    if rule.mixture is not None and not wide and importlib.util.find_spec("triton") is not None:
        from .cuda.mixture import MOST_MEMBERS, Mixture

        if members <= MOST_MEMBERS:
            return Mixture(rule.mixture).runner()
    return compiled_runner(rule)
