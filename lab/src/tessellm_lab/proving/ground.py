"""The base, the experts and a calibrated router of them: made once, shared by all columns."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.members import Loading, Member, MemberSpec, load_member
from tessellm.members.sources import digest, weight_files
from tessellm.routing import calibration, directions, energy, router
from tessellm.routing.calibration import calibration_prompts
from tessellm.routing.profiles import ExpertToRoute
from tessellm.routing.router import DeltaRouter
from tessellm.routing.stored import cached_router, keep_router
from tessellm.routing.template import render
from tessellm.routing.text import MINILM, Embedder, SentenceModel
from tessellm.vocabulary.chats import encode_chat

from .reading import Log, Readings, adapted_layers
from .skills import Asked, Places

TOKENS, SENTENCES = "tokens", "sentences"  # embedders: the base's token vectors, MiniLM


class Remembering:
    """An embedder that embeds each row of token ids once."""

    def __init__(self, embedder: Embedder):
        self._embedder = embedder
        self._known: dict[tuple[int, ...], Tensor] = {}

    def embed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        new = list({tuple(row) for row in rows} - self._known.keys())
        if new:
            self._known.update(zip(new, self._embedder.embed(new), strict=True))
        return torch.stack([self._known[tuple(row)] for row in rows])


def subset(router: DeltaRouter, names: Sequence[str]) -> DeltaRouter:
    """Return the router of some of the experts, with scales and a threshold of their own."""
    profiles = {name: router.profiles[name] for name in names}
    return DeltaRouter(profiles, router.settings, router.embedders, router.marks)


@dataclass(frozen=True)
class Texts:
    """What a user says of an expert."""

    description: str | None = None
    examples: tuple[str, ...] = ()


class Ground:
    """The base with its experts, a router of all of them without texts, and routers with texts made from it."""

    def __init__(
        self,
        places: Places,
        names: Sequence[str],
        template: bool = True,
        log: Log = print,
        most_calibration: int | None = None,
    ):
        self.names, self.log = tuple(names), log
        self.base: Member = load_member("base", MemberSpec(places.base), None, Loading(dtype="float32"))
        tokenizer: Any = self.base.tokenizer
        if not template:
            tokenizer.chat_template = None
        self.tokenizer = tokenizer
        folders = {name: places.adapter(name) for name in names}
        self.experts: dict[str, Any] = {
            name: load_member(name, MemberSpec(folder), self.base, Loading()).model for name, folder in folders.items()
        }
        self.prompts = self._fitting(calibration_prompts())[:most_calibration]
        self.router = self._calibrated([digest(weight_files(folder)) for folder in folders.values()], template)
        self._routers: dict[Any, DeltaRouter] = {}

    def readings(self, out: Path) -> Readings:
        return Readings(self.base.model, self.router, list(self.experts.values()), out, self.log)

    @property
    def adapted(self) -> list[str]:
        """The layers that any adapter changes, as a reading orders them."""
        return sorted({path for model in self.experts.values() for path in adapted_layers(model)})

    def rows(self, asked: Sequence[Asked]) -> list[list[int]]:
        """Return prompts as token ids, in the chat template where there is one."""
        return [self._row(each) for each in asked]

    def routed_by(self, texts: Mapping[str, Texts], embedder: str = TOKENS) -> DeltaRouter:
        """Return a router of all experts that knows these texts; energies are not measured again."""
        key = (embedder, tuple(texts.items()))
        if embedder == TOKENS and not any(given.description or given.examples for given in texts.values()):
            return self.router
        if key not in self._routers:
            experts = {
                name: ExpertToRoute(self.experts[name], given.description, given.examples)
                for name, given in texts.items()
            }
            with self._sentences_once():
                self._routers[key] = DeltaRouter.calibrate(
                    self.base.model, self.tokenizer, experts, prompts=self.prompts,
                    embedder=MINILM if embedder == SENTENCES else None, previous=self.router,
                )  # fmt: skip
        return self._routers[key]

    @contextmanager
    def _sentences_once(self) -> Iterator[None]:
        """Let calibrations embed each sentence once, and load the model once."""
        usual = router.SentenceModel
        try:
            setattr(router, SentenceModel.__name__, lambda source, tokenizer: self.sentences)
            yield
        finally:
            setattr(router, SentenceModel.__name__, usual)

    @cached_property
    def sentences(self) -> Embedder:
        return Remembering(SentenceModel(MINILM, self.tokenizer))

    def ids(self, text: str) -> list[int]:
        """Return a text's token ids, without template."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _row(self, asked: Asked) -> list[int]:
        if not self.tokenizer.chat_template:
            return list(self.tokenizer(asked.text).input_ids)
        return encode_chat(self.tokenizer, [{"role": role, "content": text} for role, text in asked.messages])

    def _calibrated(self, digests: Sequence[str], template: bool) -> DeltaRouter:
        """Return the router of all experts without texts, calibrated by this or an earlier run."""
        about = [*self.names, *digests, str(template), *self.prompts]
        about += map(inspect.getsource, (calibration, directions, energy, router))
        key = "proving-" + hashlib.sha256("\0".join(about).encode()).hexdigest()[:32]
        found = cached_router(key, self.base.model, self.tokenizer)
        if found is None:
            experts = {name: ExpertToRoute(model) for name, model in self.experts.items()}
            found = DeltaRouter.calibrate(
                self.base.model, self.tokenizer, experts, prompts=self.prompts, progress=self._progress
            )
            keep_router(key, found)
        return found

    def _fitting(self, prompts: Sequence[str]) -> list[str]:
        """Return the prompts that fit into the base's context."""
        limit = self.base.model.config.max_position_embeddings
        return [text for text in prompts if len(render(self.tokenizer, text)) <= limit]

    def _progress(self, done: int, total: int) -> None:
        self.log(f"{done} of {total} calibration prompts read")
