"""Engine: many requests at once on one composition. Requests enter and leave between steps.

    engine = Engine(model, slots=8)
    requests = engine.generate([[1, 2, 3], [4, 5]], Sampling(max_new_tokens=32))

or `submit` and `step` by hand, as a server does. Token ids only; exact: what it writes is what the reference would.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ..errors import EngineError, FastPathError, GenerationError, PromptError
from ..model import ComposedForCausalLM
from ..model.room import SLOT, check_room
from .members.groups import Members, make_groups
from .memory import CONTEXT
from .plain import plain_groups
from .prefill import Prefill
from .prefixes import Prefixes
from .requests import Request
from .sampling import Sampling, how
from .self_check import check, refuse_unknown
from .speculation import Speculation
from .speculation.speculation import Speculator
from .state import SlotState
from .steps import Steps, Written, make_steps
from .voices import Special, Voice, Watcher, special

NO_ENDS: frozenset[int] = frozenset()
Arriving = tuple[list[Request], Callable[[], Written], Special | None]


class Engine:
    """Slots for sequences, a queue in front of them, and steps that move all of them forward."""

    def __init__(
        self,
        model: ComposedForCausalLM,
        slots: int = 8,
        context: int | None = None,
        stacked: bool | None = None,
        compiled: bool = True,
        speculation: Speculation | None = None,
        window: int = 0,
        plain: bool = False,
    ):
        """`window`: the longest of any rule that requests bring, if longer than that of the composition's own.
        `plain`: members run as the reference model runs them, one sequence after another, whatever they are."""
        if slots < 1:
            raise EngineError(f"expected at least one slot; got {slots}")
        limit = model.config.max_position_embeddings or None
        self.context = min(each for each in (context, limit, CONTEXT if context is None else None) if each)
        self.model, self.ends = model, frozenset(model.config.eos_token_id or ())
        self.window = max(model.rule.window, window)
        if plain and speculation:
            raise EngineError("drafts are for the fast path; leave out either plain or speculation")
        groups: Sequence[Members] = (
            plain_groups(model) if plain else self._checked_groups(slots, stacked, speculation is not None)
        )
        self.state = SlotState(model, groups, slots)
        self.steps = Steps(self.state, self.context) if plain else make_steps(self.state, self.context, compiled)
        self.speculator = Speculator(speculation, model, self.state, self.steps) if speculation else None
        self.prefixes = Prefixes(slots, self.context if plain else self.window + 1)
        self.prefill = Prefill(self.state, self.steps, self.prefixes, self.window)
        self.most_rows = slots  # less when memory runs out
        self.waiting: deque[Request] = deque()
        self._failed: list[Request] = []  # since the last step
        self.in_slot: list[Request | None] = [None] * slots
        self._arriving: deque[Arriving] = deque()

    def _checked_groups(self, slots: int, stacked: bool | None, several: bool) -> Sequence[Members]:
        """Groups that compute what their members do: stacked as wished, else apart."""
        if getattr(self.model, "hf_device_map", None):
            raise FastPathError("the fast path needs all members on one device; these are on several")
        refuse_unknown(self.model)
        try:
            groups = make_groups(self.model, slots, self.context, stacked)
            check(self.model, groups, slots, self.context, several)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"{slots} slots of {self.context} tokens do not fit into the memory of {self.model.device}: use fewer "
                f"slots or a smaller context. ({str(error).splitlines()[0]})"
            ) from error
        except EngineError:
            if stacked is not None:
                raise
            return self._checked_groups(slots, False, several)
        return groups

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        voice: Voice | None = None,
        watcher: Watcher | None = None,
    ) -> Request:
        """Put a request into the queue: of the composition, or of another voice of its members."""
        request = self.checked(Request(list(prompt), sampling or Sampling(), voice, watcher))
        self.waiting.append(request)
        return request

    def checked(self, request: Request) -> Request:
        """The same request, if it can be fulfilled, for `waiting`; changes nothing, so any thread may call it."""
        tokens, new, size = request.prompt, request.sampling.max_new_tokens, self.model.config.vocab_size
        if not tokens:
            raise PromptError("the prompt is empty: expected at least one token id")
        if not all(0 <= token < size for token in tokens):
            raise PromptError(
                f"expected token ids from 0 to {size - 1}; got {next(t for t in tokens if not 0 <= t < size)}"
            )
        check_room(len(tokens), new, self.context, option="max_new_tokens, or make the engine larger", whose=SLOT)
        if self.speculator and request.sampling.penalises:
            raise GenerationError("drafts are checked position by position: no penalties for what was written before")
        self._check_special(request.voice, request.watcher)
        return request

    def _check_special(self, voice: Voice | None, watcher: Watcher | None) -> None:
        if self.speculator and (voice or watcher):
            raise GenerationError("drafts are checked by the composition's own rule: no other voices, no watchers")
        if voice and voice.rule.window > self.window:
            raise GenerationError(
                f"the rule {voice.rule.name!r} looks back {voice.rule.window} tokens, this engine {self.window}: make "
                f"it with window={voice.rule.window}"
            )

    def cancel(self, request: Request) -> None:
        """Drop a request; its slot is free at once."""
        if not request.done:
            request.finish("cancelled")
            self._free(request)
            if request in self.waiting:
                self.waiting.remove(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._arriving or any(self.in_slot))

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One prefill pass, one decoding step; the requests to which tokens came or that ended."""
        self._admit()
        self._prefill()
        drafter = self.speculator if self.speculator and self.speculator.awake() else None
        arrived = self._arrivals(0) if drafter else []  # a draft starts from the last token
        self._decode(drafter)
        failed, self._failed = self._failed, []
        return list(dict.fromkeys(arrived + self._arrivals(0 if drafter else self.steps.lag) + failed))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Request]:
        """Run prompts to their ends, in order; one that failed has `finish_reason` error. Bad input: none is run."""
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise GenerationError(f"expected one Sampling, or one for each of {len(prompts)} prompts; got {len(each)}")
        asked = zip(prompts, each, strict=True)
        requests = [self.checked(Request(list(prompt), sampled or Sampling())) for prompt, sampled in asked]
        self.waiting.extend(requests)
        while not all(request.done for request in requests):
            self.step()
        return requests

    def _admit(self) -> None:
        free = [slot for slot, request in enumerate(self.in_slot) if request is None]
        free = free[: max(0, self.most_rows - (len(self.in_slot) - len(free)))]
        while free and self.waiting:
            request = self.waiting.popleft()
            slot = self.prefixes.best_free(request.prompt, free)
            free.remove(slot)
            request.slot, self.in_slot[slot] = slot, request
            self.state.enter(request)

    def _prefill(self) -> None:
        portion = self.prefill.next(self.in_slot, bool(self.waiting))
        if portion is None:
            return
        try:
            self.prefill.feed(portion)
        except torch.OutOfMemoryError as error:
            _return_memory()
            if not self.prefill.feed_less(portion):
                why = f"memory ran out while its prompt was fed, {portion.width} tokens at once"
                self._give_up(portion.requests[0], why, error)
            return
        if portion.last:
            self._expect(portion.requests, portion.slots, portion.asked)
            if self.speculator:
                self.speculator.drafter.read(portion.requests)  # while the device does, too

    def _give_up(self, request: Request, why: str, error: torch.OutOfMemoryError) -> None:
        request.finish("error", f"{why}. Use fewer slots or a smaller context. ({str(error).splitlines()[0]})")
        self._free(request)
        self._failed.append(request)

    def _decode(self, drafter: Speculator | None) -> None:
        running = [r for r in self.in_slot if r is not None and r.prefilled and r.asked]
        if not running:
            return
        self._compact()
        rows = max(r.slot for r in running if r.slot is not None) + 1
        slots = [r.slot for r in running if r.slot is not None]
        asked = special(running, slots)
        try:
            if drafter:
                self._receive(running, drafter.decode(running, rows))
                return
            cells = max(len(r.prompt) + r.asked for r in running)
            self.steps.decode(rows, cells, how(r.sampling for r in running), asked)
        except torch.OutOfMemoryError as error:
            _return_memory()
            youngest = max(running, key=lambda r: r.number)
            self.most_rows = max(1, len(running) - 1)
            self._give_up(youngest, f"memory ran out while {len(running)} sequences were decoded at once", error)
            return
        self._expect(running, slots, asked)

    def _expect(self, requests: list[Request], slots: list[int], asked: Special | None) -> None:
        """Note that a token is on its way to each; those that need no more leave their slots."""
        self._arriving.append((requests, self.steps.fetch(slots), asked))
        for request in requests:
            request.asked += 1
            if request.asked == request.sampling.max_new_tokens:
                self._free(request)

    def _receive(self, requests: list[Request], written: Written) -> None:
        """Note several tokens each that are here already."""
        self._arriving.append((requests, lambda: written, None))
        for request, tokens in zip(requests, written[0], strict=True):
            request.asked += len(tokens)

    def _arrivals(self, lag: int) -> list[Request]:
        """What came, but for so many passes that may still be on their way."""
        arrived: list[Request] = []
        while self._arriving and (len(self._arriving) > lag or not any(self.in_slot)):
            arrived += self._collect(*self._arriving.popleft())
        return arrived

    def _collect(self, requests: list[Request], fetch: Callable[[], Written], asked: Special | None) -> list[Request]:
        arrived = []
        views = asked.views() if asked else {}
        for request, tokens, logprobs in zip(requests, *fetch(), strict=True):
            if request.done:
                continue  # it ended while these were on their way
            ends = NO_ENDS if request.sampling.ignore_end else (request.voice or self).ends
            left = request.sampling.max_new_tokens - len(request.tokens)
            if not ends.isdisjoint(tokens) or math.isnan(sum(logprobs)):
                ended = (n for n, (t, p) in enumerate(zip(tokens, logprobs, strict=True), 1) if t in ends or p != p)
                left = min(left, next(ended))
            request.receive(tokens[:left], logprobs[:left])
            if request in views:
                request.seen.append(views[request])
            if math.isnan(request.logprobs[-1]):
                request.finish(
                    "error", f"a member computes NaN: its weights are damaged, or overflow in {self.model.dtype}"
                )
            elif request.tokens[-1] in ends:
                request.finish("stop")
            elif len(request.tokens) == request.sampling.max_new_tokens:
                request.finish("length")
            if request.done:
                self._free(request)
            arrived.append(request)
        return arrived

    def _free(self, request: Request) -> None:
        if request.slot is not None and self.in_slot[request.slot] is request:
            self.in_slot[request.slot] = None
            self.state.leave(request.slot)
            self.prefixes.wrote(request.slot, request.prompt[: request.fed] + request.tokens[:-1])

    def _compact(self) -> None:
        """Move the last running sequence into a hole before it, so that a step has fewer rows."""
        used = [slot for slot, request in enumerate(self.in_slot) if request is not None]
        hole = next((slot for slot in range(len(used)) if self.in_slot[slot] is None), None)
        request = self.in_slot[used[-1]]
        if (
            hole is None
            or request is None
            or not request.prefilled
            or not self.steps.worth_moving(used[-1] + 1, len(used))
        ):
            return
        source, cells = used[-1], len(request.prompt) + request.asked
        self.state.move(source, hole, cells)
        self.in_slot[source], self.in_slot[hole], request.slot = None, request, hole
        self.prefixes.moved(source, hole)


def _return_memory() -> None:
    """What the allocator keeps for later is needed now."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
