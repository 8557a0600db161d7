"""DeltaRouter: decides which members should answer a prompt.

`calibrate` makes a router. `tap` collects energies while the base reads a prompt, `route` decides from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .calibration import FEATURES, EnergyScale, Progress, Scale, calibration_prompts, measure, pool
from .conversations import read_alone
from .decision import DecisionWeights, Signals, Thresholds, prior, scores
from .directions import count_blocks, directions
from .energy import Energies, block_of, plan_blocks, shared_inputs, stack_directions, tapped
from .examples import ExampleClassifier, classifier_input
from .profiles import ExpertProfile, ExpertToRoute, described, fingerprint, similarity, unchanged, under
from .route import BASE, Route, RoutedPrompt
from .template import ChatMarks, render
from .text import Embedder, SentenceModel, TokenVectors

BASE_RETENTION = 0.95
VERSION = 3


class OutdatedRouterError(CheckpointError):
    """A stored router measures in another way than this version does."""


class DeltaRouter:
    """Routes by delta energy and text. Build one by `calibrate`, or read it by `from_state`."""

    def __init__(
        self,
        profiles: Mapping[str, ExpertProfile],
        settings: dict[str, Any],
        embedders: Mapping[str, Embedder],
        marks: ChatMarks,
        classifier: ExampleClassifier | None = None,
        base: Any = None,
    ):
        """`base` reads the last message of a conversation once more; without it the prompt's own energies count."""
        self.classifier, self.base = classifier, base
        self.profiles, self.settings, self.embedders, self.marks = dict(profiles), settings, dict(embedders), marks
        self.weights = DecisionWeights.shipped(embedders)
        self.experts = tuple(name for name, profile in profiles.items() if profile.directions)
        self.notes = tuple(
            f"expert {name!r} equals the base in the linear layers of its blocks, up to rounding: it is never selected"
            for name in profiles
            if name not in self.experts
        )
        self._own = [profiles[name].directions for name in self.experts]
        self.stacked = stack_directions(settings["groups"], self._own, settings["blocks"])
        self._set_scales()

    @classmethod
    def calibrate(
        cls,
        base: Any,
        tokenizer: Any,
        experts: Mapping[str, ExpertToRoute],
        *,
        prompts: Sequence[str] | None = None,
        base_retention: float = BASE_RETENTION,
        embedder: str | None = None,
        progress: Progress = lambda done, total: None,
        previous: DeltaRouter | None = None,
    ) -> DeltaRouter:
        """Run the base over calibration prompts and set the thresholds. Experts that `previous` measured alike keep
        what it measured."""
        prompts = calibration_prompts() if prompts is None else list(prompts)
        rows, marks = [render(tokenizer, text) for text in prompts], ChatMarks.of(tokenizer)
        spoken = [row[marks.read(row).user] for row in rows]
        table = base.get_input_embeddings().weight
        embedders: dict[str, Embedder] = {"tokens": TokenVectors.fit(table, spoken)}
        if embedder is not None:
            embedders["sentences"] = SentenceModel(embedder, tokenizer)
        blocks = plan_blocks(count_blocks(base), len(experts))
        found = {
            name: {
                path: rows for path, rows in directions(base, expert.model, name).items() if block_of(path) in blocks
            }
            for name, expert in experts.items()
        }
        paths = sorted({path for own in found.values() for path in own})
        settings = {
            "version": VERSION,
            "blocks": blocks,
            "groups": shared_inputs(base, paths),
            "prompts": fingerprint(prompts, table),
            "base_retention": base_retention,
            "embedder": embedder,
        }
        same = previous is not None and all(previous.settings[key] == settings[key] for key in ("prompts", "blocks"))
        kept = unchanged(previous.profiles if previous is not None and same else {}, found)
        new = [name for name in found if name not in kept and found[name]]
        features_PFK = _measure(base, [found[name] for name in new], settings, rows, marks, progress)
        vectors_PD = {key: each.embed(spoken) for key, each in embedders.items()}
        profiles = {}
        for name, expert in experts.items():
            features = features_PFK[..., new.index(name)] if name in new else torch.zeros(len(rows), FEATURES)
            vectors = described(expert.description, embedders, tokenizer)
            profiles[name] = ExpertProfile(
                found[name],
                kept.get(name, features),
                similarity(vectors_PD, vectors),
                vectors,
                expert.description,
                tuple(expert.examples),
            )
        router = cls(profiles, settings, embedders, marks, base=base)
        router.learn_examples(base, tokenizer, vectors_PD)
        return router

    @contextmanager
    def tap(self, base: nn.Module) -> Iterator[Energies]:
        """Collect energies in every forward pass of `base` inside the context."""
        energies = Energies(self.stacked, len(self.experts))
        with tapped(base, energies, list(self.stacked)):
            yield energies

    def route(self, prompts: Sequence[RoutedPrompt]) -> list[Route]:
        """Decide for each prompt. Energies of its last tokens alone will do, if the user span is among them."""
        if not self.experts:
            return [Route({BASE: 1.0}, BASE) for _ in prompts]
        if self.base is not None:
            prompts = read_alone(prompts, self.marks, self._read)
        choose_BK, accept_BK = scores(self._signals(prompts), self.weights, self.limits.floor)
        priors_BC = prior(choose_BK, accept_BK, self.limits.threshold, self.weights).tolist()
        names = (BASE, *self.experts)
        routes = []
        for row, accept in zip(priors_BC, accept_BK.tolist(), strict=True):
            given = {name: one if one > -inf else None for name, one in zip(self.experts, accept, strict=True)}
            selected = names[max(range(len(row)), key=row.__getitem__)]
            routes.append(Route(dict(zip(names, row, strict=True)), selected, given, self.limits.threshold))
        return routes

    @torch.no_grad()
    def _read(self, ids: list[int]) -> Tensor:
        """Return the energies of a text's tokens."""
        with self.tap(self.base) as tap:
            self.base.base_model(
                input_ids=torch.tensor([ids], device=self.base.get_input_embeddings().weight.device), use_cache=False
            )
        return tap.take()[0]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the router as tensors and as what JSON holds."""
        tensors: dict[str, Tensor] = {}
        about = {}
        for name, profile in self.profiles.items():
            own = {f"directions/{path}": rows for path, rows in profile.directions.items()}
            own |= {f"vectors/{key}": rows for key, rows in profile.vectors.items()}
            own |= {"features": profile.features_PF, "similarity": profile.similarity_PS}
            tensors |= {f"experts/{name}/{key}": tensor.contiguous() for key, tensor in own.items()}
            about[name] = {"description": profile.description, "examples": list(profile.examples)}
        tokens = self.embedders["tokens"]
        assert isinstance(tokens, TokenVectors)
        tensors |= {f"base/{key}": tensor.contiguous() for key, tensor in tokens.tensors().items()}
        if self.classifier is not None:
            tensors |= {f"examples/{key}": tensor for key, tensor in vars(self.classifier).items()}
        return tensors, {**self.settings, "experts": about}

    @classmethod
    def from_state(
        cls, tensors: Mapping[str, Tensor], about: Mapping[str, Any], base: Any, tokenizer: Any
    ) -> DeltaRouter:
        """Return the router that `state` described."""
        if about.get("version") != VERSION:
            raise OutdatedRouterError(
                f"the router was calibrated by another version of tessellm (format {about.get('version')!r}, expected "
                f"{VERSION}). Load the composition and save it again: that calibrates it anew"
            )
        settings = {key: value for key, value in about.items() if key != "experts"}
        profiles = {}
        for name, own in about["experts"].items():
            kept = under(tensors, f"experts/{name}/")
            profiles[name] = ExpertProfile(
                under(kept, "directions/"),
                kept["features"],
                kept["similarity"],
                under(kept, "vectors/"),
                own["description"],
                tuple(own["examples"]),
            )
        learnt = under(tensors, "examples/")
        classifier = ExampleClassifier(**learnt) if learnt else None
        table = base.get_input_embeddings().weight
        embedders: dict[str, Embedder] = {"tokens": TokenVectors.from_tensors(table, under(tensors, "base/"))}
        if settings["embedder"] is not None:
            embedders["sentences"] = SentenceModel(settings["embedder"], tokenizer)
        can_run = base if isinstance(base, nn.Module) else None
        return cls(profiles, settings, embedders, ChatMarks.of(tokenizer), classifier, can_run)

    def _set_scales(self) -> None:
        """Fit z-scores and the threshold on the calibration prompts. Few numbers are fitted, so none are held out."""
        self.limits = Thresholds(0.0, 0.0)
        if not self.experts:
            return
        own = [self.profiles[name] for name in self.experts]
        self._features_PFK = torch.stack([each.features_PF for each in own], -1)
        similarity_PKS = torch.stack([each.similarity_PS for each in own], 1)
        self._energy_scale, self._text_scale = EnergyScale.of(self._features_PFK), Scale.of(similarity_PKS)
        odds_PK = torch.zeros(similarity_PKS.shape[:2]) if self.classifier is None else self.classifier.odds_PK
        self.calibration = self._standardised(self._features_PFK, similarity_PKS, odds_PK)
        self.limits = Thresholds.of(self.calibration, self.weights, self.settings["base_retention"])

    def _standardised(self, features_BFK: Tensor, similarity_BKS: Tensor, odds_BK: Tensor) -> Signals:
        own = [self.profiles[name] for name in self.experts]
        described_K = torch.tensor([bool(each.description) and not each.examples for each in own])
        return Signals(self._energy_scale.z(features_BFK), self._text_scale.z(similarity_BKS), odds_BK, described_K)

    def _signals(self, prompts: Sequence[RoutedPrompt]) -> Signals:
        features, spoken = [], []
        for prompt in prompts:
            skipped = len(prompt.ids) - len(prompt.energy_TK)  # tokens before those whose energies are given
            span = slice(max(prompt.user.start - skipped, 0), max(prompt.user.stop - skipped, 0))
            features.append(pool(prompt.energy_TK, span))
            spoken.append(list(prompt.ids[prompt.user]))
        features_BFK = torch.stack(features)
        vectors_BD = {key: each.embed(spoken) for key, each in self.embedders.items()}
        similarity_BKS = torch.stack([similarity(vectors_BD, self.profiles[name].vectors) for name in self.experts], 1)
        odds_BK = torch.zeros(similarity_BKS.shape[:2])
        if self.classifier is not None:
            odds_BK = self.classifier.odds(self._classifier_input(features_BFK, vectors_BD))
        return self._standardised(features_BFK, similarity_BKS, odds_BK)

    def _classifier_input(self, features_BFK: Tensor, vectors_BD: Mapping[str, Tensor]) -> Tensor:
        return classifier_input(self._energy_scale.features.z(features_BFK), list(vectors_BD.values()))

    def learn_examples(self, base: Any, tokenizer: Any, vectors_PD: Mapping[str, Tensor]) -> None:
        """Fit the classifier, where experts have examples; the base reads these once."""
        texts = [(n, text) for n, name in enumerate(self.experts) for text in self.profiles[name].examples]
        if not texts:
            return
        rows = [render(tokenizer, text) for _, text in texts]
        features_NFK = _measure(base, self._own, self.settings, rows, self.marks)
        spoken = [row[self.marks.read(row).user] for row in rows]
        self.classifier = ExampleClassifier.fit(
            self._classifier_input(self._features_PFK, vectors_PD),
            self._classifier_input(features_NFK, {key: each.embed(spoken) for key, each in self.embedders.items()}),
            torch.tensor([n for n, _ in texts]),
            len(self.experts),
        )
        self._set_scales()


def _measure(
    base: Any,
    own: Sequence[Mapping[str, Tensor]],
    settings: dict[str, Any],
    rows: list[list[int]],
    marks: ChatMarks,
    progress: Progress = lambda done, total: None,
) -> Tensor:
    """Return the features of experts on the calibration prompts, [P, F, K]."""
    if not own:
        return torch.zeros(len(rows), FEATURES, 0)
    stacked = stack_directions(settings["groups"], own, settings["blocks"])
    energies = Energies(stacked, len(own))
    with tapped(base, energies, list(stacked)):
        return measure(base, energies, rows, marks, progress)
