"""Engine: many requests at once on one composition. Requests enter and leave between steps.

    engine = Engine(model, slots=8)
    requests = engine.generate([[1, 2, 3], [4, 5]], Sampling(max_new_tokens=32))

or `submit` and `step` by hand, as a server does. Token ids only; exact: what it writes is what the reference would.

A request waits for a slot, its prompt is read (prefill_controller.py), perhaps routed (routes.py), and then one token
is added per step. An executor (executor.py) computes; the engine decides when.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from ..errors import EngineError, GenerationError
from ..model import ComposedForCausalLM
from ..model.cache import Observer
from .assembly import make_executor
from .executor import Pending
from .memory import CONTEXT, return_memory
from .prefill_controller import PrefillController
from .prefixes import Prefixes
from .requests import ALL, Request, RequestLimits
from .routes import Routes
from .sampling import Sampling
from .speculation import Speculation
from .speculation.speculator import Speculator


class Engine:
    """Slots for sequences, a queue in front of them, and steps that move all of them forward."""

    def __init__(
        self,
        model: ComposedForCausalLM,
        slots: int = 8,
        context: int | None = None,
        compiled: bool = True,
        speculation: Speculation | None = None,
        plain: bool = False,
    ):
        """`plain`: members run as the reference model runs them, one sequence after another, whatever they are."""
        if slots < 1:
            raise EngineError(f"expected at least one slot; got {slots}")
        wanted = speculation or Speculation("none")
        if plain and wanted.drafts:
            raise EngineError("drafts are for the fast path; leave out either plain or speculation")
        limit = model.config.max_position_embeddings or None
        self.context = min(each for each in (context, limit, CONTEXT if context is None else None) if each)
        self.model, self.ends = model, frozenset(model.config.eos_token_id or ())
        self.prefixes = Prefixes(slots, on=not plain)
        self.executor = make_executor(model, Routes(model), self.prefixes, slots, self.context, plain, compiled)
        names, vocabulary = tuple(model.members), model.config.vocab_size
        self.limits = RequestLimits(vocabulary, self.context, wanted.drafts, names, self.executor.takes_forms)
        self.executor.few_shapes = wanted.drafts
        self.speculator = Speculator(self.executor, model.device.type == "cpu") if wanted.drafts else None
        self.controller = PrefillController(self.prefixes, model.device.type == "cuda", self.executor.padded)
        self.most_rows = slots  # less when memory runs out
        self.waiting: deque[Request] = deque()
        self.in_slot: list[Request | None] = [None] * slots
        self._pending: deque[Pending] = deque()
        self._nonfinite: set[int] = set()  # slots whose cells are not all finite
        self._changed: dict[Request, None] = {}  # requests to which something came since the last step

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        experts: Mapping[str, float] | None = None,
        observer: Observer | None = None,
        observes_all: bool = False,
    ) -> Request:
        """Put a request into the queue. `experts`: the weights of the experts that answer; none: the base."""
        request = Request(list(prompt), sampling or Sampling(), experts, observer, observes_all)
        self.waiting.append(self.limits.check(request))
        return request

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """Drop a request; its slot is free at once."""
        if not request.done:
            request.finish("cancelled")
            self._free(request)
            if request in self.waiting:
                self.waiting.remove(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._pending or any(self.in_slot))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Request]:
        """Run prompts to their ends, in order; one that failed has `finish_reason` error. Bad input: none is run."""
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise GenerationError(f"expected one Sampling, or one for each of {len(prompts)} prompts; got {len(each)}")
        pairs = zip(prompts, each, strict=True)
        requests = [self.limits.check(Request(list(prompt), params or Sampling())) for prompt, params in pairs]
        self.waiting.extend(requests)
        while any(request.finish_reason is None for request in requests):
            self.step()
        return requests

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run a forward over prompts and one over all sequences, which may be the same; return the requests to which
        tokens came or that ended."""
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)  # a thread begins with the first one
        executor, pace = self.executor, self.controller.pace
        running, pending = self._running(), bool(self._pending)
        if pace is not None:
            pace.begin(sum(len(request.branches) for request in running))
        if self.waiting and None in self.in_slot:
            self._admit()
        prefilled, joint = None, executor.joint and self.speculator is None
        if any(request is not None and not request.scheduled for request in self.in_slot):
            self._collect(executor.in_flight, prefilled := self._prefill(running if joint else []))
        if prefilled is None or not joint:
            self._decode_all(prefilled, pending)
        if pace is not None:
            pace.end(bool(running))
        changed, self._changed = list(self._changed), {}
        return changed

    def _decode_all(self, prefilled: Pending | None, pending: bool) -> None:
        """Run one forward over all sequences. `pending`: some results were on their way when the step began."""
        executor = self.executor
        if prefilled is None or not executor.in_flight:  # running requests have waited for the prompt already
            self._compact()
        if self.speculator and self.speculator.is_on(self._running()):
            self._collect(0)  # a draft starts from the last token
            if not (pending and self._changed):  # else those to which it came hear of it first
                self._collect(0, self._decode(self.speculator))
        else:
            self._collect(executor.in_flight, self._decode(None))

    def _running(self) -> list[Request]:
        return [request for request in self.in_slot if request is not None and request.scheduled]

    def _admit(self) -> None:
        """Give free slots to waiting requests. A slot changes hands when all that its last owner did is known: that is
        waited for where no other one is free."""
        if len(free := self._free_slots()) < len(self.waiting):
            self._collect(0)
            free = self._free_slots()
        while free and self.waiting:
            request = self.waiting.popleft()
            slot = max(free, key=lambda slot: (self._held(request, slot), -slot))
            free.remove(slot)
            self.in_slot[slot] = request
            self.executor.enter(slot, request)

    def _held(self, request: Request, slot: int) -> int:
        """Return how many tokens of a prompt a slot's rows hold."""
        return sum(self.prefixes.shared(request, rows[slot]) for rows in self.prefixes.rows.values())

    def _free_slots(self) -> list[int]:
        """List the slots that nobody has and no pending forward writes, as many as may be given away."""
        written = {slot for pending in self._pending for slot in pending.slots}
        free = [slot for slot, request in enumerate(self.in_slot) if request is None]
        most = max(0, self.most_rows - (len(self.in_slot) - len(free)))
        return [slot for slot in free if slot not in written][:most]

    def _slots_of(self, running: Sequence[Request]) -> list[int]:
        return [slot for slot, request in enumerate(self.in_slot) if request in running]

    def _prefill(self, running: list[Request]) -> Pending | None:
        """Read the next chunk of the prompts in the slots; at their ends the first tokens are chosen. Running requests
        are decoded in the same forward."""
        chunk = self.controller.next(self.in_slot, bool(self.waiting), self.executor.copy)
        if chunk is None:
            return None
        try:
            return self.executor.prefill(chunk, running, self._slots_of(running))
        except torch.OutOfMemoryError as error:
            return_memory()
            if not self.controller.read_less(chunk):
                width = max(part.count for part in chunk.parts)
                why = f"memory ran out while its prompt was read, {width} tokens at once"
                self._give_up(chunk.parts[0].request, why, error)
            return None

    def _decode(self, speculator: Speculator | None) -> Pending | None:
        """Add a token to every sequence, or several to each by drafts."""
        running = self._running()
        slots = self._slots_of(running)
        if not slots:
            return None
        try:
            if speculator is None:
                return self.executor.decode(running, slots)
            result = speculator.decode(running, slots)
            return Pending(running, slots, [len(tokens) for tokens in result.tokens], lambda: result)
        except torch.OutOfMemoryError as error:
            return_memory()
            self.most_rows = max(1, len(running) - 1)
            youngest = max(running, key=lambda request: request.number)
            why = f"memory ran out while {len(running)} sequences were decoded at once"
            self._give_up(youngest, why, error)
            return None

    def _collect(self, in_flight: int, sent: Pending | None = None) -> None:
        """Note a forward that was sent: requests that need no more tokens leave their slots. Then take the results of
        all forwards but so many, which may still be on their way."""
        if sent is not None:
            self._pending.append(sent)
            for request, scheduled in zip(sent.requests, sent.scheduled, strict=True):
                if request.advance(scheduled) and self.executor.in_flight:
                    self._free(request)
        idle = sent is None and not any(self.in_slot)
        while self._pending and (len(self._pending) > in_flight or idle):
            pending = self._pending.popleft()
            result = pending.fetch()
            came = zip(pending.slots, pending.scheduled, result.tokens, result.logprobs, result.nonfinite, strict=True)
            for request, (slot, scheduled, tokens, logprobs, nonfinite) in zip(pending.requests, came, strict=True):
                if any(nonfinite):
                    self._note_nonfinite(slot)
                if request.finish_reason is not None:
                    continue  # it ended while these were on their way
                if ALL in request.branches and not request.tokens and slot not in self._nonfinite:
                    self.prefixes.wrote(slot, ALL, request.prompt[: request.branches[ALL].computed])
                if scheduled:
                    self._changed[request] = None
                    request.receive(tokens, logprobs, self.ends, result.views.get(request, ()))
                    if request.logprobs and math.isnan(request.logprobs[-1]):
                        request.finish("error", self._blame(nonfinite))
                    elif request.form is not None and request.form.failure is not None:
                        request.finish("error", request.form.failure)
                    if request.finish_reason is not None:
                        self._free(request)

    def _blame(self, nonfinite: Sequence[bool]) -> str:
        """Say why a token has no log-probability."""
        if not any(nonfinite):
            return f"the rule {self.model.rule.name!r} computes NaN: of finite numbers"
        name = self.model.config.member_names[nonfinite.index(True)]
        return f"member {name!r} computes NaN: its weights are damaged, or overflow in {self.model.dtype}"

    def _note_nonfinite(self, slot: int) -> None:
        """Mark a slot in which a member computed NaN: nothing of it is read again by others."""
        self._nonfinite.add(slot)
        self.prefixes.wrote(slot, ALL, [])
        if self.in_slot[slot] is None:
            self._clean(slot)

    def _clean(self, slot: int) -> None:
        self.executor.clear(slot)
        self._nonfinite.discard(slot)

    def _give_up(self, request: Request, why: str, error: torch.OutOfMemoryError) -> None:
        request.finish("error", f"{why}. Use fewer slots or a smaller context. ({str(error).splitlines()[0]})")
        self._free(request)
        self._changed[request] = None

    def _free(self, request: Request) -> None:
        if request not in self.in_slot:
            return
        slot = self.in_slot.index(request)
        self.in_slot[slot] = None
        self.executor.leave(slot)
        if slot in self._nonfinite:
            self._clean(slot)
        elif request.tokens:
            for member in request.branches:
                self.prefixes.wrote(slot, member, request.prompt + request.tokens[:-1])

    def _compact(self) -> None:
        """Move the last sequences into holes before them, so that a step has fewer rows: at once, or, where the device
        waits meanwhile, one per step."""
        while self.executor.moves and self._move_last() and not self.executor.in_flight:
            pass

    def _move_last(self) -> bool:
        """Move the last sequence into the first hole. False: there is none, or it does not pay."""
        used = [slot for slot, request in enumerate(self.in_slot) if request is not None]
        hole = next((slot for slot in range(len(used)) if self.in_slot[slot] is None), None)
        request = self.in_slot[source := max(used, default=0)]
        worth = self.executor.worth_moving(source + 1, len(used))
        if hole is None or request is None or not request.scheduled or not worth:
            return False
        self._collect(0)  # a slot changes hands when all that its owner did is known
        if self.in_slot[source] is request:
            self.executor.move(source, hole, request.kv_len)
            self.in_slot[source], self.in_slot[hole] = None, request
            self.prefixes.moved(source, hole)
            if source in self._nonfinite:
                self._nonfinite.add(hole)
                self._clean(source)
        return True
