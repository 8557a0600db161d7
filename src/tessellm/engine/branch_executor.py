"""BranchExecutor: runs the active members of each sequence, and no others. Synchronous; what a CPU runs.

    enter      a branch of the base where the prompt is to be routed, else one of every active member
    prefill    parts of prompts and the running sequences in one forward, which reads the weights once; at the end of a
               routed prompt the active members' branches follow, and a base outside the set leaves
    decode     one forward over the branches of all sequences; mix, sample, update π
    verify     the same over drafts

Shapes: A active members of a sequence, B sequences, C components, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model import ComposedForCausalLM
from .components import Components
from .executor import Executor, Pending, StepResult, Views
from .members.branches import BranchTokens, branch_logp
from .members.groups import Group
from .observing import observe
from .prefill_controller import Chunk, PromptPart
from .prefixes import Prefixes
from .requests import Branch, Request
from .routes import Routes
from .sampling import SamplingBuffers


class BranchExecutor(Executor):
    """Runs what is meant."""

    joint = True

    def __init__(
        self, model: ComposedForCausalLM, groups: Sequence[Group], routes: Routes, prefixes: Prefixes, slots: int
    ):
        self.model, self.groups, self.routes, self.prefixes = model, groups, routes, prefixes
        self.slots = SamplingBuffers.empty(slots, model.device)

    def enter(self, slot: int, request: Request) -> None:
        self.slots.enter(slot, request.sampling, self.model.config.vocab_size)
        if self.routes.needed(request):
            request.branches = {0: Branch()}
        else:
            self._activate(request, self.routes.unrouted(request))

    def _activate(self, request: Request, components: Components) -> None:
        """Give a request its active members. A branch that is there stays; one that is not active leaves."""
        if request.observes_all:
            components = components.with_members(range(len(self.model.members)))
        request.components, request.log_pi_C = components, components.log_prior(self.model.device)
        request.branches = {member: request.branches.get(member, Branch()) for member in components.members}

    def copy(self, source: int, target: int, member: int, kv_len: int) -> None:
        group = next(group for group in self.groups if member in group.members)
        group.cache.copy(source, target, group.members.index(member), kv_len)

    def clear(self, slot: int) -> None:
        for group in self.groups:
            group.cache.clear(slot)
            for member in group.members:
                self.prefixes.wrote(slot, member, [])

    def rows(self, running: Sequence[Request], slots: Sequence[int]) -> int:
        return sum(len(request.branches) for request in running)

    def prefill(self, chunk: Chunk, running: Sequence[Request] = (), slots: Sequence[int] = ()) -> Pending:
        parts = chunk.parts
        branches = [
            BranchTokens(part.member, part.slot, part.tokens, part.branch.computed, int(part.is_last)) for part in parts
        ]
        branches += self._next_tokens(running, slots, [[]] * len(running))
        routing = [*(part.request.components is None for part in parts), *[False] * (len(branches) - len(parts))]
        if any(routing):
            logp, energies = self.routes.read(self.groups, branches, routing)
        else:
            logp, energies = branch_logp(self.groups, branches), [None] * len(branches)
        for part, logp_TV, energy_TK in zip(parts, logp, energies, strict=False):
            self._note(part, logp_TV, energy_TK)
        read = {part.request: part.slot for part in parts if part.request.is_read}
        routed = [request for request in read if request.components is None]
        for request, route in zip(routed, self.routes.route(routed), strict=True):
            request.route = route
            self._activate(request, self.routes.table.by_route(route))
        ready = [request for request in read if request.is_read]
        rows = [self._first_rows(request) for request in ready] + _by_sequence(running, logp[len(parts) :])
        return self._pending([*ready, *running], [*(read[request] for request in ready), *slots], rows)

    def _note(self, part: PromptPart, logp_TV: Tensor, energy_TK: Tensor | None) -> None:
        """Note what a part of a prompt left: tokens in the row, energies, log-probabilities behind the last."""
        branch, start = part.branch, part.branch.computed
        last = start + part.count - 1
        group = next(group for group in self.groups if part.member in group.members)
        finite = group.cache.is_finite(part.slot, group.members.index(part.member), last)
        held = len(self.prefixes.held(part.slot, part.member).tokens)
        finite = finite and held == start  # else tokens before these are not
        self.prefixes.wrote(part.slot, part.member, part.request.prompt[: last + 1 if finite else held])
        if energy_TK is not None:
            branch.energies.append(energy_TK)
            if finite:
                self.prefixes.note_energies(part.slot, part.member, start, energy_TK)
        branch.logp_V = logp_TV[-1] if part.is_last else None
        branch.computed = last + 1

    def _first_rows(self, request: Request) -> list[Tensor]:
        """Return the log-probabilities behind a prompt that all branches have read, by member, [1, V]."""
        rows = []
        for branch in request.branches.values():
            assert branch.logp_V is not None
            rows.append(branch.logp_V[None])
            branch.logp_V, branch.energies = None, []
        return rows

    def decode(self, running: Sequence[Request], slots: Sequence[int]) -> Pending:
        return self._pending(running, slots, self._forward(running, slots, [[]] * len(running)))

    def _forward(
        self, running: Sequence[Request], slots: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        """Read the last token of every sequence, and its draft: log-probabilities by sequence and member, [T, V]."""
        return _by_sequence(running, branch_logp(self.groups, self._next_tokens(running, slots, drafts)))

    def _next_tokens(
        self, running: Sequence[Request], slots: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[BranchTokens]:
        """List what every branch reads next: the last token of its sequence, and a draft."""
        return [
            BranchTokens(member, slot, [request.tokens[-1], *draft], request.kv_len - 1, 1 + len(draft))
            for request, slot, draft in zip(running, slots, drafts, strict=True)
            for member in request.branches
        ]

    def _pending(self, requests: Sequence[Request], slots: Sequence[int], rows: list[list[Tensor]]) -> Pending:
        """Choose a token for every sequence from its members' log-probabilities."""
        result = self._choose(requests, slots, rows)
        return Pending(requests, slots, [1] * len(requests), lambda: result)

    def _choose(self, requests: Sequence[Request], slots: Sequence[int], rows: list[list[Tensor]]) -> StepResult:
        if not requests:
            return StepResult([], [], [])
        logp_BV, parts = mix_rows(requests, rows)
        position_B = torch.tensor([request.kv_len or len(request.prompt) for request in requests])
        choice = max(request.sampling.choice for request in requests)
        allowed_BV = allowed(requests, logp_BV)
        token_B, logprob_B = self.slots.choose(logp_BV, list(slots), position_B.to(logp_BV.device), choice, allowed_BV)
        tokens, nonfinite = token_B.tolist(), self._nonfinite(requests, rows)
        views: Views = {}
        for n, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if request.observer is not None:
                views[request] = [observe(request, rows[n], logp_BV[n], token, len(self.model.members))]
            update_posterior(request, parts[n], token)
            if request.form is not None:
                request.form.accept(token)
            if request.penalised:
                self.slots.counts[0][slots[n], token] += 1
        return StepResult(
            [[token] for token in tokens],
            [[logprob] for logprob in logprob_B.tolist()],
            nonfinite,
            views,
        )

    def _nonfinite(self, requests: Sequence[Request], rows: list[list[Tensor]]) -> list[list[bool]]:
        """Return per sequence which members computed NaN."""
        found = []
        for request, own in zip(requests, rows, strict=True):
            members = [False] * len(self.model.members)
            for member, logp_TV in zip(request.branches, own, strict=True):
                members[member] = bool(logp_TV[:, 0].isnan().any())
            found.append(members)
        return found

    def verify(
        self, running: Sequence[Request], slots: Sequence[int], drafts: Sequence[Sequence[int]], length: int
    ) -> StepResult:
        rows = self._forward(running, slots, drafts)
        tokens: list[list[int]] = []
        logprobs: list[list[float]] = []
        views: Views = {}
        for request, slot, draft, own in zip(running, slots, drafts, rows, strict=True):
            tokens.append([])
            logprobs.append([])
            for t in range(1 + len(draft)):
                at = [logp_TV[t : t + 1] for logp_TV in own]
                result = self._choose_next(request, slot, at, t, views)
                if result is None and draft and t == 0:
                    break  # the draft may have spoilt it: without one it is read again
                token, logprob = result or (0, float("nan"))
                tokens[-1].append(token)
                logprobs[-1].append(logprob)
                if t == len(draft) or token != draft[t]:
                    break
        nonfinite = self._nonfinite(running, rows)
        for request, slot, new, found in zip(running, slots, tokens, nonfinite, strict=True):
            for group in self.groups if any(found) else ():
                group.cache.clear(slot, request.kv_len - 1 + len(new))  # a step may multiply cells that it masks
        return StepResult(tokens, logprobs, nonfinite, views)

    def _choose_next(
        self, request: Request, slot: int, rows: list[Tensor], t: int, views: Views
    ) -> tuple[int, float] | None:
        """Choose the token behind `t` tokens of a draft; None where a member computed NaN."""
        logp_1V, (part_C1V,) = mix_rows([request], [rows])
        if bool(logp_1V[0, 0].isnan()):
            return None
        position_1 = torch.tensor([request.kv_len + t], device=logp_1V.device)
        choice, allowed_1V = request.sampling.choice, allowed([request], logp_1V)
        token_1, logprob_1 = self.slots.choose(logp_1V, [slot], position_1, choice, allowed_1V)
        token = int(token_1)
        if request.observer is not None:
            views.setdefault(request, []).append(observe(request, rows, logp_1V[0], token, len(self.model.members)))
        update_posterior(request, part_C1V, token)
        if request.form is not None:
            request.form.accept(token)
        return token, float(logprob_1)


def _by_sequence(requests: Sequence[Request], logp: Sequence[Tensor]) -> list[list[Tensor]]:
    """Share out log-probabilities of branches, one sequence's behind another's."""
    rows = iter(logp)
    return [[next(rows) for _ in request.branches] for request in requests]


def mix_rows(requests: Sequence[Request], rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Mix each sequence's members, [1, V] each: log p̂, [B, V], and its components, [C, 1, V]. Sequences with the same
    components are mixed together; one with a lone member is that member's row."""
    alike: dict[Components, list[int]] = {}
    for n, request in enumerate(requests):
        assert request.components is not None
        alike.setdefault(request.components, []).append(n)
    mixed: list[Tensor] = [torch.empty(0)] * len(requests)
    parts: list[Tensor] = [torch.empty(0)] * len(requests)
    for components, places in alike.items():
        if components.is_lone:
            for n in places:
                mixed[n], parts[n] = rows[n][0], rows[n][0][None]
            continue
        logp_ABV = torch.stack([torch.cat([rows[n][a] for n in places]) for a in range(len(components.members))])
        logp_CBV = components.logp(logp_ABV)
        log_pi_BC = torch.stack([requests[n].log_pi_C for n in places])  # type: ignore[misc]
        mixed_BV = components.mix(logp_CBV, log_pi_BC)
        for place, n in enumerate(places):
            mixed[n], parts[n] = mixed_BV[place : place + 1], logp_CBV[:, place : place + 1]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed), parts


def allowed(requests: Sequence[Request], logp_BV: Tensor) -> Tensor | None:
    """Return the tokens that each sequence's form allows, [B, V]; None where no sequence has a form."""
    if all(request.form is None for request in requests):
        return None
    allowed_BV = torch.ones_like(logp_BV, dtype=torch.bool)
    for row_V, request in zip(allowed_BV, requests, strict=True):
        if request.form is not None:
            row_V.copy_(request.form.allowed())
    return allowed_BV


def update_posterior(request: Request, part_C1V: Tensor, token: int) -> None:
    """Update π by what each component gave the token that was chosen."""
    if len(part_C1V) > 1:
        assert request.components is not None
        assert request.log_pi_C is not None
        request.log_pi_C = request.components.update(request.log_pi_C[None], part_C1V[:, 0, token][None])[0]
