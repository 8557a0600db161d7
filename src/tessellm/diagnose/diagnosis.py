"""diagnose(): can these be composed, where do they interfere, what to do. Prompts in, findings out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import PromptError
from ..model import ComposedForCausalLM
from ..text.chat import Chat
from ..text.options import TextOptions
from ..text.prompts import tokenizer_of
from .advice import Advice, Symptoms, advise, doubtful
from .changes import Change, Effect, measure, other_ways
from .interference import Interference, interference, rows_of
from .kept import KeptRows
from .prompts import Example, as_example, check_examples, without_repeats
from .rates import Rate, average
from .reading import batches, traced
from .score import chance_apart, chance_right
from .trace import Trace, check_composition, finite

Progress = Callable[[int, int], None]
"""Called with how many texts are done, and of how many."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, over all texts, and each text's trace. `to_html()` is the report."""

    members: tuple[str, ...]
    weights: tuple[float, ...]
    rule: str
    tokens: int
    found: Interference
    advice: tuple[Advice, ...]
    examples: tuple[Example, ...]
    traces: tuple[Trace, ...]
    predicted: Rate  # share of texts that are right, as far as traces tell
    loss: float  # how much less that is than if the loudest expert spoke alone at every token
    skipped: tuple[str, ...] = ()

    @property
    def texts(self) -> int:
        return len(self.traces)

    @property
    def clean(self) -> bool:
        return self.advice[0].kind == "clean"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the traces, for programs."""
        plain = {name: getattr(self, name) for name in ("members", "weights", "rule", "texts", "tokens")}
        parts = {"found": asdict(self.found), "advice": [asdict(each) for each in self.advice]}
        predicted = {"predicted": asdict(self.predicted), "loss": self.loss}
        return finite({**plain, "clean": self.clean, **predicted, **parts, "skipped": list(self.skipped)})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def to_html(self) -> str:
        """One self-contained page: findings, figures, and the texts coloured by owner."""
        from .report import report_page

        return report_page(self)


def diagnose(
    model: ComposedForCausalLM,
    prompts: Sequence[Any],
    *,
    batch_size: int = 8,
    skip_malformed: bool = False,
    progress: Progress | None = None,
    **writing: Any,
) -> Diagnosis:
    """Diagnose a composition on prompts: strings, which it continues, or mappings with `prompt` and the `text` to be
    read after it (or `text` alone). `writing` says how prompts are put and continued: max_new_tokens (64), temperature,
    seed, chat (a tessellm.text.chat.Chat)."""
    check_composition(model)
    tokenizer_of(model)
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise PromptError(f"expected a list of prompts; got {type(prompts).__name__}")
    options = writing_options(**writing)
    given = [as_example(entry, f"prompt {number}") for number, entry in enumerate(prompts, 1)]
    different, repeated = without_repeats(given) if options.temperature == 0 else (given, [])
    examples, skipped = check_examples(model, different, options, skip_malformed)
    torch.manual_seed(options.seed)
    traces: list[Trace] = []
    kept = KeptRows(model.device)
    for part in batches(examples, batch_size):
        traces += traced(model, part, options, kept)
        if progress is not None:
            progress(len(traces), len(examples))
    return conclude(
        model,
        examples,
        traces,
        [*repeated, *skipped],
        lambda changes: measure(model, examples, traces, changes, options, batch_size, kept),
    )


def writing_options(
    *, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0, chat: Chat | None = None
) -> TextOptions:
    """Make the options under which texts are written for a diagnosis; others cannot be honoured there."""
    return TextOptions(max_new_tokens, temperature, seed=seed, chat=chat)


def conclude(
    model: ComposedForCausalLM,
    examples: Sequence[Example],
    traces: Sequence[Trace],
    skipped: Sequence[str],
    measured: Callable[[list[Change]], list[Effect]],
) -> Diagnosis:
    """From traces to findings; `measured` says what changes would do."""
    members = tuple(model.config.member_names)
    rows = rows_of(traces)
    found = interference(rows, members, traces)
    predicted = average(chance_right(rows), torch.arange(rows.texts), rows.texts)
    loss = max(0.0, float(chance_apart(rows).mean()) - predicted.value)
    written = any(example.text is None for example in examples)
    effects = measured(other_ways(model, doubtful(found)))
    symptoms = Symptoms(
        found, str(model.rule.name), model.config.weights, predicted, loss, rows.texts, written, tuple(effects)
    )
    return Diagnosis(
        members, model.config.weights, str(model.rule.name), len(rows.text_R), found, tuple(advise(symptoms)),
        tuple(examples), tuple(traces), predicted, loss, tuple(skipped),
    )  # fmt: skip
