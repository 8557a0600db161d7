"""The columns of the routing table: ours with nothing, a description, examples; peers with as much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tessellm.routing.directions import block_of

from .decisions import Decision
from .ground import SENTENCES, TOKENS, Ground, Texts, subset
from .ours import decide
from .peers import arrow, centroids, logo, semantic_router, seqr, spectr
from .reading import Reading, Readings
from .skills import Asked, Places, development_prompts

NOTHING, DESCRIPTION = "nothing", "description"
EMBEDDERS = {"token vectors": TOKENS, "MiniLM": SENTENCES}
OURS, SEMANTIC, CENTROID = "ours", "semantic-router", "MiniLM centroids"


@dataclass(frozen=True)
class Column:
    """A router, what it was given, and how it decides about the prompts."""

    family: str
    given: str
    decide: Callable[[], list[Decision]]
    examples: int = 0
    embedder: str = ""

    @property
    def name(self) -> str:
        return f"{self.family}: {self.given}" + (f", {self.embedder}" if self.embedder else "")


@dataclass(frozen=True)
class Subject:
    """What columns decide about: prompts with their readings, and the texts that a user may give."""

    ground: Ground
    readings: Sequence[Reading]
    spoken: Sequence[Sequence[int]]  # the tokens of each prompt's last user message
    described: Mapping[str, str]
    examples: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, ground: Ground, kept: Readings, asked: Sequence[Asked], places: Places, most_examples: int) -> Subject:
        readings = kept.of(ground.rows(asked))
        spoken = [list(reading.ids[reading.user]) for reading in readings]
        examples = {name: development_prompts(places, name, most_examples) for name in ground.names}
        return cls(ground, readings, spoken, places.descriptions(), examples)

    def first(self, count: int) -> Subject:
        """Return the same of the first prompts."""
        return replace(self, readings=self.readings[:count], spoken=self.spoken[:count])

    def texts(self, names: Sequence[str], described: bool, examples: int) -> dict[str, Texts]:
        return {
            name: Texts(self.described[name] if described else None, tuple(self.examples[name][:examples]))
            for name in names
        }

    def utterances(self, described: bool, examples: int) -> dict[str, Tensor]:
        """Return the vectors of what a route is given, by MiniLM."""
        texts = self.texts(self.ground.names, described, examples)
        return {
            name: self.ground.sentences.embed(
                [
                    self.ground.ids(text)
                    for text in (*given.examples, *([given.description] if given.description else []))
                ]
            )
            for name, given in texts.items()
        }


def own_columns(subject: Subject, names: Sequence[str] | None = None) -> Iterator[Column]:
    """Our router of these experts with nothing, and with descriptions."""
    chosen = tuple(names or subject.ground.names)
    yield _own(subject, chosen, NOTHING, "", False, 0)
    for title in EMBEDDERS:
        yield _own(subject, chosen, DESCRIPTION, title, True, 0)


def example_columns(subject: Subject, counts: Sequence[int]) -> Iterator[Column]:
    """Our router of all experts with examples, and with descriptions and examples."""
    for title in EMBEDDERS:
        for count in counts:
            yield _own(subject, subject.ground.names, _examples(count), title, False, count)
            yield _own(subject, subject.ground.names, f"{DESCRIPTION}, {_examples(count)}", title, True, count)


def _own(subject: Subject, names: tuple[str, ...], given: str, embedder: str, described: bool, count: int) -> Column:
    def column() -> list[Decision]:
        every = subject.ground.names
        router = subject.ground.routed_by(subject.texts(every, described, count), EMBEDDERS.get(embedder, TOKENS))
        if names != every:
            router = subset(router, names)
        return decide(router, subject.readings, [every.index(name) for name in names])

    return Column(OURS, given, column, count, embedder)


def peer_columns(
    subject: Subject, counts: Sequence[int], expert_data: Mapping[str, Sequence[Reading]]
) -> Iterator[Column]:
    """Routers of others over the same experts."""
    names = subject.ground.names
    for family, route in ((SEMANTIC, semantic_router), (CENTROID, centroids)):
        yield Column(family, DESCRIPTION, partial(_by_texts, subject, route, True, 0))
        for count in counts:
            yield Column(family, _examples(count), partial(_by_texts, subject, route, False, count), count)
    blocks = torch.tensor([block_of(path) or 0 for path in subject.ground.adapted])
    readings = subject.readings
    yield Column("LoGo", NOTHING, partial(logo, names, readings, blocks))
    yield Column("SpectR", NOTHING, partial(spectr, names, readings))
    yield Column("Arrow", NOTHING, partial(arrow, names, readings))
    if expert_data:
        count = min(map(len, expert_data.values()))
        yield Column("SEQR", _examples(count), partial(seqr, names, readings, expert_data), count)


def _by_texts(subject: Subject, route: Callable[..., list[Decision]], described: bool, count: int) -> list[Decision]:
    prompts_BD = subject.ground.sentences.embed(subject.spoken)
    return route(subject.ground.names, prompts_BD, subject.utterances(described, count))


def _examples(count: int) -> str:
    return f"{count} example" + ("s" if count > 1 else "")
