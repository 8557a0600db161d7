"""Engine: many requests at once on one composition. Requests enter and leave between steps.

    engine = Engine(model, slots=8)
    requests = engine.generate([[1, 2, 3], [4, 5]], Sampling(max_new_tokens=32))

or `submit` and `step` by hand, as a server does. Token ids only; exact: what it writes is what the reference would.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch

from ..errors import EngineError, GenerationError
from ..model import ComposedForCausalLM
from ..model.cache import Observer
from .assembly import fast_groups, fast_steps, make_steps
from .buffers import PromptRead
from .memory import CONTEXT, return_memory
from .plain import plain_groups
from .prefixes import Prefixes
from .prompt_schedule import PromptSchedule
from .requests import Arrival, Request, RequestLimits
from .sampling import Sampling, TokenChoice
from .speculation import Speculation
from .speculation.speculation import Speculator
from .speculation.who import NOBODY, suggested
from .voices import Voice, sort_rows


class Engine:
    """Slots for sequences, a queue in front of them, and steps that move all of them forward."""

    def __init__(
        self,
        model: ComposedForCausalLM,
        slots: int = 8,
        context: int | None = None,
        compiled: bool = True,
        speculation: Speculation | None = None,
        window: int = 0,
        plain: bool = False,
    ):
        """`window`: the longest of any rule that requests bring, if longer than that of the composition's own.
        `plain`: members run as the reference model runs them, one sequence after another, whatever they are.
        `speculation`: who drafts; by default whomever the rule believes, where that pays (speculation/who.py)."""
        if slots < 1:
            raise EngineError(f"expected at least one slot; got {slots}")
        if plain and speculation not in (None, NOBODY):
            raise EngineError("drafts are for the fast path; leave out either plain or speculation")
        wanted = speculation or (NOBODY if plain else suggested(model))
        wanted.check(model)
        drafts = wanted != NOBODY
        limit = model.config.max_position_embeddings or None
        self.context = min(each for each in (context, limit, CONTEXT if context is None else None) if each)
        self.model, self.voice = model, Voice(model.rule, frozenset(model.config.eos_token_id or ()))
        self.window = max(model.rule.window, window)
        groups = plain_groups(model) if plain else fast_groups(model, slots, self.context, drafts)
        self.steps = make_steps(model, groups, self.voice, slots, self.context)
        if not plain:
            self.steps = fast_steps(self.steps, compiled, few_shapes=drafts)
        self.speculator = Speculator(wanted, model, self.steps) if drafts else None
        strict = drafts and not wanted.by_belief  # where members rest, requests that cannot have drafts go without
        self.limits = RequestLimits(model.config.vocab_size, self.context, self.window, strict)
        self.prefixes = Prefixes(slots, on=not plain)
        self.schedule = PromptSchedule(self.prefixes, self.window, model.device.type == "cuda")
        self.most_rows = slots  # less when memory runs out
        self.waiting: deque[Request] = deque()
        self.in_slot: list[Request | None] = [None] * slots
        self._arriving: deque[Arrival] = deque()
        self._tainted: set[int] = set()  # slots whose cells are not all finite
        self._told: dict[Request, None] = {}  # requests to which something came since the last step

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        voice: Voice | None = None,
        observer: Observer | None = None,
    ) -> Request:
        """Put a request into the queue, for the composition's voice or another voice of its members."""
        request = self.limits.check(Request(list(prompt), sampling or Sampling(), voice, observer))
        self.waiting.append(request)
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
        return bool(self.waiting or self._arriving or any(self.in_slot))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Request]:
        """Run prompts to their ends, in order; one that failed has `finish_reason` error. Bad input: none is run."""
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise GenerationError(f"expected one Sampling, or one for each of {len(prompts)} prompts; got {len(each)}")
        asked = zip(prompts, each, strict=True)
        requests = [self.limits.check(Request(list(prompt), sampled or Sampling())) for prompt, sampled in asked]
        self.waiting.extend(requests)
        while any(request.finish_reason is None for request in requests):
            self.step()
        return requests

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one pass over prompts, then one over all sequences; the requests to which tokens came or that ended."""
        if (device := self.steps.work.slots.token_S.device).type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with the first one
        pace, decoding = self.schedule.pace, any(request is not None and request.asked for request in self.in_slot)
        lagging = bool(self._arriving)
        if pace is not None:
            pace.begin()
        if self.waiting and None in self.in_slot:
            self._admit()
        fed = None
        if any(request is not None and not request.asked for request in self.in_slot):
            self._collect(self.steps.lag, fed := self._prefill())
            if pace is not None:
                pace.fed()
        if fed is None or not self.steps.lag:  # those who are written to have waited for the prompt already
            self._compact()
        if self.speculator and self.speculator.awake([request for request in self.in_slot if request]):
            self._collect(0)  # a draft starts from the last token
            if not (lagging and self._told):  # else those to whom it came hear of it first
                self._collect(0, self._decode(self.speculator))
        else:
            self._collect(self.steps.lag, self._decode(None))
        if pace is not None:
            pace.end(decoding)
        told, self._told = list(self._told), {}
        return told

    def _admit(self) -> None:
        """Give free slots to waiting requests. A slot changes hands when all that its last owner did is known: that is
        waited for where no other one is free."""
        if len(free := self._free_slots()) < len(self.waiting):
            self._collect(0)
            free = self._free_slots()
        while free and self.waiting:
            request, held = self.waiting.popleft(), self.prefixes.written
            request.read_from = (request.voice or self.voice).reads_from(request.prompt)
            slot = max(free, key=lambda slot: (self.prefixes.shared(request, held[slot]), -slot))
            free.remove(slot)
            self.in_slot[slot] = request
            self.steps.work.slots.enter(slot, request.sampling, self.model.config.vocab_size)

    def _free_slots(self) -> list[int]:
        """List the slots that nobody has and no pass on its way writes, as many as may be given away."""
        written = {slot for arrival in self._arriving for slot in arrival.slots}
        free = [slot for slot, request in enumerate(self.in_slot) if request is None]
        most = max(0, self.most_rows - (len(self.in_slot) - len(free)))
        return [slot for slot in free if slot not in written][:most]

    def _prefill(self) -> Arrival | None:
        """Feed the next portion of the prompts in the slots; at their ends the first tokens are chosen."""
        portion = self.schedule.next(self.in_slot, bool(self.waiting), self._copy_cells)
        if portion is None:
            return None
        requests, slots, special = portion.requests, portion.slots, None
        choice = max(request.sampling.choice for request in requests) if portion.last else TokenChoice.NONE
        if portion.reads is not PromptRead.NOTHING and any(r.voice or r.observer for r in requests):
            special = sort_rows(requests, range(len(requests)), self.voice)
        try:
            self.steps.prefill(slots, *portion.tokens(), choice, special, portion.reads, portion.rows)
        except torch.OutOfMemoryError as error:
            return_memory()
            if not self.schedule.feed_less(portion):
                why = f"memory ran out while its prompt was fed, {max(portion.counts)} tokens at once"
                self._give_up(requests[0], why, error)
            return None
        fetch = self.steps.fetch(slots)
        if self.speculator and portion.last:
            self.speculator.drafter.read(requests)  # while the device does, too
        shown = special if portion.last else None
        return Arrival(requests, slots, portion.counts, [int(portion.last)] * len(slots), fetch, shown)

    def _decode(self, speculator: Speculator | None) -> Arrival | None:
        """Add a token to every sequence, or several to each by drafts."""
        slots = [slot for slot, request in enumerate(self.in_slot) if request is not None and request.asked]
        if not slots:
            return None
        running, none = [r for r in self.in_slot if r is not None and r.asked], [0] * len(slots)
        try:
            special = sort_rows(running, slots, self.voice) if any(r.voice or r.observer for r in running) else None
            if speculator:
                result = speculator.decode(running, slots, special, self.schedule.longest_step)
                return Arrival(running, slots, none, [len(tokens) for tokens in result.tokens], lambda: result, special)
            choice, cells = max(r.sampling.choice for r in running), max(r.cells for r in running)
            self.steps.decode(slots[-1] + 1, cells, choice, special)
            return Arrival(running, slots, none, [1] * len(slots), self.steps.fetch(slots), special)
        except torch.OutOfMemoryError as error:
            return_memory()
            self.most_rows = max(1, len(running) - 1)
            youngest = max(running, key=lambda request: request.number)
            why = f"memory ran out while {len(running)} sequences were decoded at once"
            self._give_up(youngest, why, error)
            return None

    def _collect(self, lag: int, sent: Arrival | None = None) -> None:
        """Note a pass that was sent: requests that need no more tokens leave their slots. Then take the results of all
        passes but so many, which may still be on their way."""
        if sent is not None:
            self._arriving.append(sent)
            for request, fed, asked in zip(sent.requests, sent.fed, sent.asked, strict=True):
                if request.advance(fed, asked):
                    self._free(request)
        idle = sent is None and not any(self.in_slot)
        while self._arriving and (len(self._arriving) > lag or idle):
            arrival = self._arriving.popleft()
            result, views = arrival.fetch(), arrival.special.views() if arrival.special else {}
            came = zip(arrival.slots, arrival.asked, result.tokens, result.logprobs, result.broken, strict=True)
            for request, (slot, asked, tokens, logprobs, broken) in zip(arrival.requests, came, strict=True):
                if any(broken):
                    self._taint(slot)
                if request.finish_reason is not None:
                    continue  # it ended while these were on their way
                if not request.tokens and slot not in self._tainted:
                    self.prefixes.wrote(slot, request.prompt[: request.fed])
                if asked:
                    self._told[request] = None
                    request.receive(tokens, logprobs, (request.voice or self.voice).ends, views.get(request, ()))
                    if request.logprobs and math.isnan(request.logprobs[-1]):
                        request.finish("error", self._blame(request, broken))
                    if request.finish_reason is not None:
                        self._free(request)

    def _blame(self, request: Request, broken: Sequence[bool]) -> str:
        """Say why a token has no log-probability."""
        if not any(broken):
            return f"the rule {(request.voice or self.voice).rule.name!r} computes NaN: of finite numbers"
        name = self.model.config.member_names[broken.index(True)]
        return f"member {name!r} computes NaN: its weights are damaged, or overflow in {self.model.dtype}"

    def _taint(self, slot: int) -> None:
        """Mark a slot in which a member computed NaN: nothing of it is read again by others."""
        self._tainted.add(slot)
        self.prefixes.wrote(slot, [])
        if self.in_slot[slot] is None:
            self._clean(slot)

    def _clean(self, slot: int) -> None:
        for group in self.steps.work.groups:
            group.cache.clear(slot)
        self._tainted.remove(slot)

    def _give_up(self, request: Request, why: str, error: torch.OutOfMemoryError) -> None:
        request.finish("error", f"{why}. Use fewer slots or a smaller context. ({str(error).splitlines()[0]})")
        self._free(request)
        self._told[request] = None

    def _free(self, request: Request) -> None:
        if request not in self.in_slot:
            return
        slot = self.in_slot.index(request)
        self.in_slot[slot] = None
        self.steps.work.slots.leave(slot)
        if slot in self._tainted:
            self._clean(slot)
        elif request.tokens:
            self.prefixes.wrote(slot, request.prompt + request.tokens[:-1])

    def _compact(self) -> None:
        """Move the last sequences into holes before them, so that a step has fewer rows: at once, or, where the device
        waits meanwhile, one per step."""
        while self._move_last() and not self.steps.lag:
            pass

    def _move_last(self) -> bool:
        """Move the last sequence into the first hole. False: there is none, or it does not pay."""
        used = [slot for slot, request in enumerate(self.in_slot) if request is not None]
        hole = next((slot for slot in range(len(used)) if self.in_slot[slot] is None), None)
        request = self.in_slot[source := max(used, default=0)]
        if hole is None or request is None or not request.asked or not self.steps.worth_moving(source + 1, len(used)):
            return False
        self._collect(0)  # a slot changes hands when all that its owner did is known
        if self.in_slot[source] is request:
            self._copy_cells(source, hole, request.cells)
            self.steps.work.move(source, hole)
            self.in_slot[source], self.in_slot[hole] = None, request
            self.prefixes.moved(source, hole)
            if source in self._tainted:
                self._tainted.add(hole)
                self._clean(source)
        return True

    def _copy_cells(self, source: int, target: int, cells: int) -> None:
        for group in self.steps.work.groups:
            group.cache.copy_slot(source, target, cells)
