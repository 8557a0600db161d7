"""diagnose(): can these be composed, where do they interfere, what to do. Prompts in, findings out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import PromptError
from ..model import ComposedForCausalLM
from ..text.chat import Chat
from ..text.options import TextOptions
from ..text.prompts import encode_examples, encode_prompt, tokenizer_of
from ..text.reference import left_padded, settings_of
from .advice import Advice, advise
from .certificate import Certificate, certificate
from .interference import Interference, interference, rows_of
from .prompts import Example, as_example, check_examples
from .rates import Rate, average
from .score import chance_apart, chance_right
from .trace import Trace, check_composition, finite, trace, trace_generation

Progress = Callable[[int, int], None]
"""Called with how many texts are done, and of how many."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, over all texts, and each text's trace. `to_html()` is the report."""

    members: tuple[str, ...]
    weights: tuple[float, ...]
    rule: str
    termination: str
    tokens: int
    found: Interference
    certificate: Certificate
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
        plain = {name: getattr(self, name) for name in ("members", "weights", "rule", "termination", "texts", "tokens")}
        proof = asdict(self.certificate) | {"vacuous": self.certificate.vacuous, "holds": self.certificate.holds}
        parts = {"found": asdict(self.found), "certificate": proof, "advice": [asdict(each) for each in self.advice]}
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
    read after it (or `text` alone). What the composition wrote itself is what the certificate is about. `writing` says
    how prompts are put and continued: max_new_tokens (64), temperature, seed, chat (a tessellm.text.chat.Chat)."""
    check_composition(model)
    tokenizer_of(model)
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise PromptError(f"expected a list of prompts; got {type(prompts).__name__}")
    options = writing_options(**writing)
    given = [as_example(entry, f"prompt {number}") for number, entry in enumerate(prompts, 1)]
    examples, skipped = check_examples(model, given, options, skip_malformed)
    torch.manual_seed(options.seed)
    traces: list[Trace] = []
    for part in batches(examples, batch_size):
        traces += traced(model, part, options)
        if progress is not None:
            progress(len(traces), len(examples))
    return conclude(model, examples, traces, skipped)


def writing_options(
    *, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0, chat: Chat | None = None
) -> TextOptions:
    """Make the options of texts that are written to be diagnosed; others cannot be honoured there."""
    return TextOptions(max_new_tokens, temperature, seed=seed, chat=chat)


def conclude(
    model: ComposedForCausalLM, examples: Sequence[Example], traces: Sequence[Trace], skipped: Sequence[str] = ()
) -> Diagnosis:
    """From traces to findings."""
    members = tuple(model.config.member_names)
    rows = rows_of(traces)
    found, proof = interference(rows, members, traces), certificate(rows, members)
    predicted = average(chance_right(rows), torch.arange(rows.texts), rows.texts)
    loss = max(0.0, float(chance_apart(rows).mean()) - predicted.value)
    advice = advise(found, proof, str(model.rule.name), model.config.termination, predicted, loss, model.config.weights)
    return Diagnosis(
        members, model.config.weights, str(model.rule.name), model.config.termination, len(rows.text_R), found, proof,
        tuple(advice), tuple(examples), tuple(traces), predicted, loss, tuple(skipped),
    )  # fmt: skip


def batches(examples: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """In order; prompts to be continued and texts to be read do not share a batch."""
    part: list[Example] = []
    for example in examples:
        if part and (len(part) == size or (part[0].text is None) != (example.text is None)):
            yield part
            part = []
        part.append(example)
    yield part


def traced(model: ComposedForCausalLM, examples: Sequence[Example], options: TextOptions) -> list[Trace]:
    """One trace a text, without padding; the prompt's tokens are there but not scored."""
    if examples[0].text is None:
        rows = [encode_prompt(model, example.prompt, "the prompt", options.chat) for example in examples]
        starts = [len(row) for row in rows]
        ids_BT, mask_BT = left_padded(rows, model)
        _, written = trace_generation(model, ids_BT, mask_BT, **settings_of(model, options))
        mask_BT = torch.cat([mask_BT.bool().cpu(), written.scored[:, ids_BT.shape[1] :]], 1)
    else:
        encoded = encode_examples(model, [(example.prompt, example.text or "") for example in examples], options.chat)
        starts = [start for _, start in encoded]
        ids_BT, mask_BT = left_padded([row for row, _ in encoded], model)
        written = trace(model, ids_BT, mask_BT)
        mask_BT = mask_BT.bool().cpu()
    return [written.text(number, mask_BT[number], start) for number, start in enumerate(starts)]
