"""Which constituents of a text can be read linearly off which layers of which member?

Beside every score stand two controls: the same decoder on shuffled labels (what it finds where nothing is), and on a
model of the same architecture with random weights (what the architecture gives away for free). Held-out combinations
of constituents are asked about by giving each combination a `group` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tessellm.errors import MemberError, PromptError
from tessellm.model import ComposedForCausalLM

from .activations import block_names, matching, text_features
from .decoders import FOLDS, Score, predict_names, predict_numbers, score_names, score_numbers
from .labelled import Labelled

SHUFFLES = 3


@dataclass(frozen=True)
class Decodability:
    """How well one label is read off one layer."""

    member: str | None  # None: a plain model
    layer: str
    label: str
    kind: str  # number: scores are R²; name: scores are shares right
    score: Score
    shuffled: tuple[float, ...]  # the scores of shuffled copies of the label
    random_weights: float | None  # the score on the same architecture with random weights; None: not asked for


@dataclass(frozen=True)
class Probing:
    """How to measure."""

    folds: int = FOLDS  # of the cross-validation
    random_weights: bool = True  # also probe the architecture with random weights
    seed: int = 0
    batch_size: int = 16


def probe(
    model: nn.Module,
    examples: Sequence[Labelled],
    layers: Sequence[str] = (),
    tokenizer: Any = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> list[Decodability]:
    """Read every label off every layer named (all blocks if none is), in each member of a composition. `settings` are
    those of Probing."""
    probing = Probing(**settings)
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise PromptError("the model has no tokenizer, so texts cannot be read. Save one into its folder")
    rows, positions = encode(tokenizer, examples, _context_of(model))
    labels, groups_N = Labels.of(examples), group_numbers(examples)
    check_enough(labels, groups_N, probing.folds)
    say = progress or (lambda text: None)
    found: list[Decodability] = []
    controls: dict[Any, dict[str, dict[str, Score]]] = {}
    for member, module, ids in _to_probe(model, rows):
        names = matching(module, layers) if layers else block_names(module)
        if not names:
            raise MemberError(f"{type(module).__name__} has no list of blocks. Name layers with --layer")
        say(f"{member or 'model'}: reading {len(rows)} texts")
        features = text_features(_runner(module), module, names, ids, positions, probing.batch_size)
        made: dict[str, dict[str, Score]] = {}
        if probing.random_weights:
            key = (type(module), _architecture(module), tuple(names), tuple(map(tuple, ids)))
            if key not in controls:
                say(f"{member or 'model'}: random weights")
                controls[key] = _random_scores(module, names, ids, positions, labels, groups_N, probing)
            made = controls[key]
        for name, x_ND in features.items():
            say(f"{member or 'model'}: {name}")
            for label, (score, shuffled) in decode(
                x_ND, labels, groups_N, probing.folds, SHUFFLES, probing.seed
            ).items():
                random = made[name][label].value if name in made else None
                found.append(Decodability(member, name, label, labels.kind(label), score, shuffled, random))
    return found


@dataclass(frozen=True)
class Labels:
    """All labels of all examples as tensors."""

    numbers: Mapping[str, Tensor]  # [N] float64
    names: Mapping[str, Tensor]  # [N] class numbers
    classes: Mapping[str, list[str]]

    @classmethod
    def of(cls, examples: Sequence[Labelled]) -> Labels:
        columns = {name: [example.labels[name] for example in examples] for name in examples[0].labels}
        texts = {name: column for name, column in columns.items() if isinstance(column[0], str)}
        classes = {name: sorted({str(value) for value in column}) for name, column in texts.items()}
        return cls(
            {name: _scaled(column) for name, column in columns.items() if name not in texts},
            {name: torch.tensor([classes[name].index(str(v)) for v in column]) for name, column in texts.items()},
            classes,
        )

    def kind(self, label: str) -> str:
        return "number" if label in self.numbers else "name"


def _scaled(column: Sequence[Any]) -> Tensor:
    """Numbers, brought within ±1 where their squares would overflow or vanish; R² is the same on every scale."""
    y_N = torch.tensor(column, dtype=torch.float64)
    largest = float(y_N.abs().max())
    return y_N if largest == 0 or 1e-100 < largest < 1e100 else y_N / largest


def decode(
    x_ND: Tensor, labels: Labels, groups_N: Tensor, folds: int = FOLDS, shuffles: int = SHUFFLES, seed: int = 0
) -> dict[str, tuple[Score, tuple[float, ...]]]:
    """Each label's score from these features, and those of its shuffled copies."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(len(x_ND)), *(torch.randperm(len(x_ND), generator=generator) for _ in range(shuffles))]
    x_ND = x_ND.double()
    found: dict[str, tuple[Score, tuple[float, ...]]] = {}
    if labels.numbers:
        y_NJ = torch.stack([y_N[order] for y_N in labels.numbers.values() for order in orders], 1)
        predicted, mean = predict_numbers(x_ND, y_NJ, groups_N, folds, seed)
        scores = [score_numbers(predicted[:, j], mean[:, j], y_NJ[:, j], groups_N, seed) for j in range(y_NJ.shape[1])]
        for index, label in enumerate(labels.numbers):
            own = scores[index * len(orders) : (index + 1) * len(orders)]
            found[label] = own[0], tuple(score.value for score in own[1:])
    for label, y_N in labels.names.items():
        y_JN = torch.stack([y_N[order] for order in orders])
        predicted, commonest = predict_names(x_ND, y_JN, len(labels.classes[label]), groups_N, folds, seed)
        own = [score_names(*each, groups_N, seed) for each in zip(predicted, commonest, y_JN, strict=True)]
        found[label] = own[0], tuple(score.value for score in own[1:])
    return {label: found[label] for label in [*labels.numbers, *labels.names]}


def encode(tokenizer: Any, examples: Sequence[Labelled], limit: int | None) -> tuple[list[list[int]], list[int]]:
    """Token ids of every text, and the token at which to read it."""
    found = [_encoded(tokenizer, example, limit, number) for number, example in enumerate(examples, 1)]
    return [row for row, _ in found], [position for _, position in found]


def fitting(model: Any, tokenizer: Any, examples: Sequence[Labelled]) -> tuple[list[Labelled], list[str]]:
    """The examples that the model can read, and what is wrong with the others."""
    kept, problems = [], []
    for number, example in enumerate(examples, 1):
        try:
            _encoded(tokenizer, example, _context_of(model), number)
            kept.append(example)
        except PromptError as error:
            problems.append(str(error))
    if not kept:
        raise PromptError(f"the model can read none of the examples; {problems[0]}")
    return kept, problems


def _encoded(tokenizer: Any, example: Labelled, limit: int | None, number: int) -> tuple[list[int], int]:
    where, spans = example.where or f"example {number}", getattr(tokenizer, "is_fast", False)
    if not spans and example.position is not None:
        raise PromptError("this tokenizer does not say where its tokens stand in the text; leave 'position' out")
    encoded = tokenizer(example.text, return_offsets_mapping=spans)
    row = list(encoded["input_ids"])
    if not row:
        raise PromptError(f"{where} has no tokens: {example.text!r}")
    if limit and len(row) > limit:
        raise PromptError(f"{where} has {len(row)} tokens; the model's context is {limit}")
    return row, _token_at(encoded["offset_mapping"], example, where) if spans else len(row) - 1


def _token_at(offsets: Sequence[tuple[int, int]], example: Labelled, where: str) -> int:
    if isinstance(example.position, str):
        start = example.text.rindex(example.position)
        span = start, start + len(example.position)
    else:
        span = example.position or (0, len(example.text))
    inside = [t for t, (start, end) in enumerate(offsets) if start < span[1] and end > span[0] and end > start]
    if not inside:
        raise PromptError(f"{where}: no token stands at characters {span[0]} to {span[1]}")
    return inside[-1]


def group_numbers(examples: Sequence[Labelled]) -> Tensor:
    keys = [("group", e.group) if e.group is not None else ("text", e.text) for e in examples]
    index = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([index[key] for key in keys])


def check_enough(labels: Labels, groups_N: Tensor, folds: int) -> None:
    """Refuse what no decoder could be judged on."""
    groups = len(groups_N.unique())
    if groups < 2 * folds:
        raise PromptError(
            f"{len(groups_N)} examples in {groups} groups are too few for {folds} folds: expected at least {2 * folds} "
            "groups (examples with the same text are one group)"
        )
    for label, y_N in {**labels.numbers, **labels.names}.items():
        if len(y_N.unique()) < 2:
            raise PromptError(f"label {label!r} is the same in every example; there is nothing to decode")


def _to_probe(model: nn.Module, rows: list[list[int]]) -> list[tuple[str | None, nn.Module, list[list[int]]]]:
    """The modules to look into, and each one's own token ids."""
    if not isinstance(model, ComposedForCausalLM):
        return [(None, model, rows)]
    return [
        (name, model.member(name), [model.alignments[name].to_member(torch.tensor(row)).tolist() for row in rows])
        for name in model.config.member_names
    ]


def _runner(module: nn.Module) -> Callable[..., Any]:
    def run(ids_BT: Tensor, mask_BT: Tensor) -> Any:
        return module(input_ids=ids_BT, attention_mask=mask_BT)

    return run


def _random_scores(
    module: Any, names: Sequence[str], rows: Any, positions: Any, labels: Labels, groups_N: Tensor, probing: Probing
) -> dict[str, dict[str, Score]]:
    """Scores of the same layers in the same architecture with random weights; an adapter's own parts have none."""
    random = with_random_weights(module, probing.seed)
    known = {name for name, _ in random.named_modules()}
    shared = [name for name in names if name in known]
    features = text_features(_runner(random), random, shared, rows, positions, probing.batch_size)
    return {
        name: {
            label: score for label, (score, _) in decode(x_ND, labels, groups_N, probing.folds, 0, probing.seed).items()
        }
        for name, x_ND in features.items()
    }


def with_random_weights(module: Any, seed: int) -> nn.Module:
    """A model of the same class and config, freshly initialised."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = type(module)(module.config)
    return made.to(device=module.device, dtype=module.dtype).eval()


def _architecture(module: Any) -> str:
    return str(sorted((k, str(v)) for k, v in module.config.to_dict().items() if not k.startswith("_")))


def _context_of(model: Any) -> int | None:
    return getattr(model.config, "max_position_embeddings", None)
