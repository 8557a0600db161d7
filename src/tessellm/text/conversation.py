"""Conversation: a chat with a composition, one answer at a time, and who answers. Drives an engine with one slot, which
keeps what it has read of the chat so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..engine.engine import Engine
from ..engine.memory import plan_slots
from ..engine.requests import Request
from ..engine.sampling import Sampling
from ..errors import FastPathError, GenerationError, PromptError, nearest, quoted
from ..model import ComposedForCausalLM
from ..routing.route import BASE, Route
from ..vocabulary.chats import render_chat
from .answering import Shares, active_shares, routing_of
from .options import TextOptions, seed_of
from .prompts import check_length, tokenizer_of
from .stops import stop_finder
from .stream import TextStream
from .writer import Writer


class Conversation:
    """A chat so far. `experts`: weights of the experts that answer, none of them: the base; None: as it is routed."""

    def __init__(self, model: ComposedForCausalLM, options: TextOptions):
        self.model, self.options, self.tokenizer = model, options, tokenizer_of(model)
        if not self.tokenizer.chat_template:
            raise PromptError("no member has a chat template, which a chat needs: use tessellm generate")
        context = plan_slots(model, 1).context
        try:
            self.engine = Engine(model, 1, context, compiled=False)
        except FastPathError:
            self.engine = Engine(model, 1, context, plain=True)
        self.turns: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []  # all turns, also those that were forgotten
        self.experts: Mapping[str, float] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system prompt."""
        system = self.options.chat.system if self.options.chat else None
        self.turns = [] if system is None else [{"role": "system", "content": system}]

    def choose(self, names: Sequence[str]) -> None:
        """Let these experts answer, or the base; none: whom the router selects."""
        known = list(self.model.members)
        for name in names:
            if name not in known:
                raise PromptError(f"there is no member {quoted(name)}; {nearest(name, known)}")
        self.experts = {name: 1.0 for name in names if name != BASE} if names else None

    def route(self, text: str) -> Route:
        """Return what the router says of this as the next message."""
        return self.model.route([*self.turns, {"role": "user", "content": text}])  # type: ignore[return-value]

    def answer(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[tuple[Shares, str]]:
        """Answer a message: pieces of text as they come, each with who answers. It ends when `stopped` says so, and
        what was written until then is a turn like any other. A message that cannot be answered is forgotten."""
        ids = self._encode([*self.turns, {"role": "user", "content": text}])
        new = min(self.options.max_new_tokens, self.engine.context - len(ids))
        params = Sampling(
            new, self.options.temperature, self.options.top_p, seed_of(self.options.seed, len(self.turns))
        )
        request = self.engine.limits.check(Request(ids, params, self.experts))
        names = list(self.model.members)
        stream, shown = TextStream(self.tokenizer, self.options.stop, ids), 0
        for _ in Writer(self.engine).write([(request, stop_finder(self.tokenizer, self.options.stop, ids))]):
            if request.finish_reason == "error":
                raise GenerationError(request.error or "the answer failed")
            for token in request.tokens[shown:]:
                if token not in self.engine.ends:
                    stream.add(token)
            shown = len(request.tokens)
            yield active_shares(names, request), stream.release()[0]
            if stopped():
                break
        stream.finish()
        shares = active_shares(names, request)
        yield shares, stream.release(all_of_it=True)[0]
        new_turns: list[dict[str, Any]] = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": stream.text, "answered": shares, "routing": routing_of(names, request)},
        ]
        self.turns += new_turns
        self.history += new_turns

    def _encode(self, turns: Sequence[Mapping[str, Any]]) -> list[int]:
        plain = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
        try:
            put = render_chat(self.tokenizer, plain)
        except Exception as error:  # a template raises what it likes
            raise PromptError(f"the chat template does not take these messages: {error}") from error
        check_length(self.model, put.text, "the chat")
        ids = put.encode(self.tokenizer)
        if len(ids) >= self.engine.context:
            raise PromptError(
                f"the chat has {len(ids):,} tokens, and there is room for {self.engine.context:,}. Forget it, or ask "
                "for less"
            )
        return ids
