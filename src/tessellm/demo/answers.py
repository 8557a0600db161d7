"""Answers of a composition, of its base and of the right expert alone, with the members' shares at every token.

Knows prompts and an engine; nothing of how answers are shown.

Shapes: T tokens, M members (0 is the base).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..engine.engine import Engine
from ..engine.requests import Request
from ..engine.sampling import Sampling
from ..model import ComposedForCausalLM
from ..model.variants import alone
from ..rules import Explanation
from ..text.chat import Chat
from ..text.prompts import tokenizer_of
from ..text.stops import UNFINISHED
from .prompts import Asked


@dataclass
class DemoAnswer:
    """What was said to one prompt. `pieces` joined are the composition's answer; each has its row of shares."""

    asked: Asked
    pieces: list[str] = field(default_factory=list)
    share_TM: list[list[float]] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)  # by member
    stopped: bool = False  # by an end token, not by the length

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def owners(self) -> list[int]:
        """The member with the largest share, per piece."""
        return [max(range(len(share_M)), key=share_M.__getitem__) for share_M in self.share_TM]


def answer_all(model: ComposedForCausalLM, prompts: Sequence[Asked], new_tokens: int) -> list[DemoAnswer]:
    """Have the composition answer all prompts at once, greedily, and keep the shares. Each prompt is read by
    itself: a processor's work grows with padding."""
    rows, answers, requests = encoded(model, prompts), [DemoAnswer(asked) for asked in prompts], []
    engine = _engine(model, rows, new_tokens)
    for row in rows:
        requests.append(engine.submit(row, Sampling(new_tokens), observer=observe_shares))
        engine.step()
    while engine.busy:
        engine.step()
    for answer, request in zip(answers, requests, strict=True):
        answer.stopped = request.finish_reason == "stop"
        _add_pieces(model, answer, request)
    return answers


def answer_alone(model: ComposedForCausalLM, name: str, answers: Sequence[DemoAnswer], new_tokens: int) -> None:
    """Have one member answer the same prompts by itself."""
    rows = encoded(model, [answer.asked for answer in answers])
    requests = _engine(alone(model, name), rows, new_tokens).generate(rows, Sampling(new_tokens))
    for answer, request in zip(answers, requests, strict=True):
        answer.alone[name] = tokenizer_of(model).decode(request.tokens, skip_special_tokens=True)


def encoded(model: ComposedForCausalLM, prompts: Sequence[Asked]) -> list[list[int]]:
    """Prompts in the chat template, as token ids."""
    tokenizer = tokenizer_of(model)
    return [Chat().put(tokenizer, asked.prompt).encode(tokenizer) for asked in prompts]


def observe_shares(logp_MB1V: Tensor, token_B1: Tensor, composed_B1V: Tensor, why: Explanation) -> dict[str, Tensor]:
    """Observe each member's share in what is said."""
    return {"share": why.share_BTM[:, 0]}


def _engine(model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new_tokens: int) -> Engine:
    return Engine(model, len(rows), max(map(len, rows)) + new_tokens, compiled=False)


def _add_pieces(model: ComposedForCausalLM, answer: DemoAnswer, request: Request) -> None:
    """Text as it grew by each token; half characters wait for their other half, end tokens have none."""
    tokenizer, shown = tokenizer_of(model), ""
    for count, view in enumerate(request.seen, 1):
        text = tokenizer.decode(request.tokens[:count], skip_special_tokens=True)
        if len(text) > len(shown) and not text.endswith(UNFINISHED):
            answer.pieces.append(text[len(shown) :])
            answer.share_TM.append(view["share"])
            shown = text
