"""SlotExecutor: forwards over all members of some slots. GraphExecutor (graphs.py) captures and replays them.

The prior comes from a forward of the base alone, before the prompt is read by all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError
from ...model import ComposedForCausalLM
from ..executor import Executor, Pending, StepResult, Views
from ..members.groups import Group
from ..observing import observe
from ..prefill_controller import Chunk
from ..requests import ALL, Branch, Request
from ..routes import Routes
from ..sampling import TokenChoice
from ..self_check import Read, check
from ..speculation import LONGEST
from .compiled_rule import compiled_runner
from .passes import Mixed, RuleRunner, Seen, Workspace, combine, decide, decode_step, prefill
from .slot_buffers import Mixing, SlotBuffers, laid_out
from .slot_pass import RowOrder, TokenBatch, member_logits
from .verification import DraftBuffers, verify


class SlotExecutor(Executor):
    """Runs forwards as they are."""

    moves, padded, takes_forms = True, True, False

    def __init__(self, model: ComposedForCausalLM, work: Workspace, routes: Routes, context: int):
        self.model, self.work, self.routes, self.context = model, work, routes, context
        self.groups = work.groups
        slots, members = work.slots.nonfinite_SM.shape
        self.drafts = DraftBuffers.empty(slots, members, LONGEST, work.slots.token_S.device)
        work.drafts[:] = [self.drafts.draft_SG]

    @torch.inference_mode()
    def enter(self, slot: int, request: Request) -> None:
        if self.routes.needed(request):
            request.route = self.routes.route_whole(request)
            request.components = self.routes.table.by_route(request.route)
        else:
            request.components = self.routes.unrouted(request)
        if request.observer is not None:
            request.components = request.components.with_members(range(len(self.model.members)))
        request.log_pi_C = request.components.log_prior(torch.device("cpu"))
        request.branches = {ALL: Branch()}
        self.work.slots.sampling.enter(slot, request.sampling, self.model.config.vocab_size)
        self.work.slots.mixing.enter(slot, request.components, self.on_device)

    def leave(self, slot: int) -> None:
        self.work.slots.position_S[slot].fill_(-1)

    def copy(self, source: int, target: int, member: int, kv_len: int) -> None:
        for group in self.groups:
            group.cache.copy(source, target, None, kv_len)

    def clear(self, slot: int) -> None:
        for group in self.groups:
            group.cache.clear(slot)

    def move(self, source: int, target: int, kv_len: int) -> None:
        self.copy(source, target, ALL, kv_len)
        self.work.move(source, target)

    def _mixing(self, requests: Sequence[Request]) -> Mixing:
        """Return how requests can be combined in one forward: by the rule where all mix as the composition does."""
        own = self.routes.table.own
        alike = own is not None and all(request.components == own for request in requests)
        return Mixing.RULE if alike else Mixing.COMPONENTS

    def prefill(self, chunk: Chunk, running: Sequence[Request] = (), slots: Sequence[int] = ()) -> Pending:
        assert not running
        requests, slots = [part.request for part in chunk.parts], [part.slot for part in chunk.parts]
        token_BT, position_BT = chunk.padded()
        last = chunk.is_last
        choice = max(request.sampling.choice for request in requests) if last else TokenChoice.NONE
        seen: Seen | None = [] if last and any(request.observer for request in requests) else None
        mixing = self._mixing(requests)
        self.read(slots, token_BT, position_BT, choice, mixing, seen)
        for part in chunk.parts:
            part.branch.computed += part.count
        return self._pending(requests, slots, range(len(slots)), int(last), seen)

    def read(
        self,
        slots: Sequence[int],
        token_BT: Tensor,
        position_BT: Tensor,
        choice: TokenChoice,
        mixing: Mixing,
        seen: Seen | None = None,
    ) -> None:
        """Read tokens of prompts, padded on the left, given on the host."""
        stop, start, width = int(position_BT.max()) + 1, int(position_BT[0, 0]), position_BT.shape[1]
        alike = start >= 0 and bool((position_BT == torch.arange(start, start + width)).all())
        slot_B, token_BT, position_BT = map(self.on_device, (torch.tensor(slots), token_BT, position_BT))
        batch = TokenBatch(token_BT, position_BT, slot_B, stop, 1, start=start if alike else None)
        prefill(self.work, batch, choice, mixing, seen)

    def decode(self, running: Sequence[Request], slots: Sequence[int]) -> Pending:
        choice, kv_len = max(r.sampling.choice for r in running), max(r.kv_len for r in running)
        seen: Seen | None = [] if any(request.observer for request in running) else None
        mixing = self._mixing(running)
        self.step(slots[-1] + 1, mixing, kv_len, choice, seen)
        return self._pending(running, slots, slots, 1, seen)

    def step(self, rows: int, mixing: Mixing, kv_len: int, choice: TokenChoice, seen: Seen | None) -> None:
        """Add one token to each of the first slots."""
        decode_step(self.work, rows, mixing, self.cells(kv_len), choice, seen)

    def _pending(
        self, requests: Sequence[Request], slots: Sequence[int], rows: Sequence[int], scheduled: int, seen: Seen | None
    ) -> Pending:
        fetch = self.fetch(slots)
        if seen:
            token_S, (logp_MBV, logp_BV) = self.work.slots.token_S, seen[0]
            members = len(logp_MBV)
            views: Views = {
                request: [observe(request, list(logp_MBV[:, row : row + 1]), logp_BV[row], int(token_S[slot]), members)]
                for request, slot, row in zip(requests, slots, rows, strict=True)
                if request.observer is not None
            }
            return Pending(requests, slots, [scheduled] * len(slots), partial(_with_views, fetch, views))
        return Pending(requests, slots, [scheduled] * len(slots), fetch)

    def fetch(self, slots: Sequence[int]) -> Callable[[], StepResult]:
        """Take what was just chosen in these slots; the copy to the host is waited for when it is called."""
        chosen = self.work.slots
        token_B1, logprob_B1 = chosen.token_S[slots, None], chosen.logprob_S[slots, None]
        nonfinite_BM = chosen.nonfinite_SM[slots]
        return lambda: StepResult(token_B1.tolist(), logprob_B1.tolist(), nonfinite_BM.tolist())

    def verify(
        self, running: Sequence[Request], slots: Sequence[int], drafts: Sequence[Sequence[int]], length: int
    ) -> StepResult:
        choice, kv_len = max(r.sampling.choice for r in running), max(r.kv_len for r in running)
        if any(request.observer for request in running):
            raise EngineError("drafts on this device are verified without observers")
        mixing = self._mixing(running)
        self.put(self.drafts.draft_SG, self.drafts.planned(slots, drafts))
        self.run_verify(slots[-1] + 1, length, mixing, kv_len + length, choice)
        result = self.drafts.read(self.get(self.drafts.came_SX)(), slots, length + 1)
        for request, slot, tokens, nonfinite in zip(running, slots, result.tokens, result.nonfinite, strict=True):
            if any(nonfinite):  # clear what a draft that a member cannot read left in the cells
                for group in self.groups:
                    group.cache.clear(slot, request.kv_len - 1 + len(tokens))
        return result

    def run_verify(self, rows: int, length: int, mixing: Mixing, kv_len: int, choice: TokenChoice) -> None:
        verify(self.work, self.drafts, rows, length, mixing, self.cells(kv_len), choice)

    def put(self, into: Tensor, values: Tensor) -> None:
        """Copy values from the host into a buffer."""
        into.copy_(values)

    def get(self, buffer: Tensor) -> Callable[[], Tensor]:
        """Copy a buffer to the host as forwards so far leave it; the copy is waited for when it is called."""
        return lambda: buffer

    def rows(self, running: Sequence[Request], slots: Sequence[int]) -> int:
        return self.row_count(slots[-1] + 1)

    def row_count(self, needed: int) -> int:
        """Return the number of rows that a forward runs which needs so many."""
        return needed

    def count_tokens(self) -> None:
        self.work.slots.sampling.count_tokens(self.model.config.vocab_size)

    def worth_moving(self, rows: int, needed: int) -> bool:
        return self.row_count(needed) < self.row_count(rows)

    def cells(self, needed: int) -> int:
        """Return the number of cells that a forward reads which needs so many."""
        return min(self.context, needed)

    def on_device(self, part: Tensor) -> Tensor:
        return part.to(self.work.slots.token_S.device)


def _with_views(fetch: Callable[[], StepResult], views: Views) -> StepResult:
    result = fetch()
    return StepResult(result.tokens, result.logprobs, result.nonfinite, views)


def workspace(
    model: ComposedForCausalLM, groups: Sequence[Group], routes: Routes, slots: int, compiled: bool = False
) -> Workspace:
    """Make what forwards work on. Refuses components that a slot's buffers cannot hold."""
    members, rule = len(model.members), model.rule
    laid_out(routes.table.unrouted(), members)
    own = compiled_runner(rule) if compiled else RuleRunner(partial(combine, rule), partial(decide, rule), True)
    buffers, numbers = SlotBuffers.empty(slots, members, model.device), members * model.config.vocab_size
    switch_prob = getattr(routes.table.inner, "switch_prob", 0.0)
    wide = any(member.dtype == torch.float64 for member in model.members.values())
    mixed: Any = Mixed
    if model.device.type == "cuda" and not wide and importlib.util.find_spec("triton") is not None:
        from .mixture import MOST_MEMBERS, KernelMixed

        mixed = KernelMixed if members <= MOST_MEMBERS else Mixed
    return Workspace(groups, rule, own, buffers, mixed, numbers, switch_prob)


def slot_executor(
    model: ComposedForCausalLM, groups: Sequence[Group], routes: Routes, slots: int, context: int, compiled: bool
) -> Executor:
    """Make the executor of the device that the members are on."""
    if model.device.type != "cuda":
        return SlotExecutor(model, workspace(model, groups, routes, slots), routes, context)
    from .graphs import GraphExecutor

    return GraphExecutor(model, workspace(model, groups, routes, slots, compiled), routes, context)


@torch.inference_mode()
def check_slots(model: ComposedForCausalLM, groups: Sequence[Group], slots: int, context: int) -> None:
    """Compare the groups with their members. Leaves the caches empty."""
    check(model, groups, slot_reads(groups, slots), context)
    for group in groups:
        group.cache.clear(slots - 1)


def slot_reads(groups: Sequence[Group], slots: int) -> tuple[Read, Read]:
    """Read as prompts are, and as steps and drafts are: over all slots; the last has tokens."""

    def prompt(token_1T: Tensor, start: int, stop: int) -> Tensor:
        position_1T = torch.arange(start, stop, device=token_1T.device)[None]
        slot_1 = torch.tensor([slots - 1], device=token_1T.device)
        batch = TokenBatch(token_1T[:, start:stop], position_1T, slot_1, stop, stop - start, start=start)
        return torch.stack([logits[0] for logits in member_logits(groups, batch)]).float().log_softmax(-1)

    def step(token_1T: Tensor, start: int, stop: int) -> Tensor:
        token_ST = token_1T.new_zeros(slots, stop - start)
        position_ST = torch.full_like(token_ST, -1)
        token_ST[-1], position_ST[-1] = token_1T[0, start:stop], torch.arange(start, stop, device=token_1T.device)
        slot_S = torch.arange(slots, device=token_1T.device)
        batch = TokenBatch(token_ST, position_ST, slot_S, stop, stop - start, RowOrder.FIRST_SLOTS)
        return torch.stack([logits[-1] for logits in member_logits(groups, batch)]).float().log_softmax(-1)

    return prompt, step
