"""One more example of what a member should answer, in a calibrated router. No calibration prompt is read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointError
from .calibration import pool
from .decision import prior, scores
from .profiles import ExpertProfile, fingerprint, similarity
from .route import BASE, RoutedPrompt
from .router import DeltaRouter
from .template import render


def with_example(
    router: DeltaRouter, member: str, text: str, read: RoutedPrompt, base: Any, tokenizer: Any, prompts: Sequence[str]
) -> DeltaRouter:
    """Return a router that knows one more example. `read`: the text as the base read it; `prompts`: what the router was
    calibrated on, the base's examples first."""
    table = base.get_input_embeddings().weight
    if fingerprint(prompts, table) != router.settings["prompts"]:
        raise CheckpointError(
            "the router was calibrated on other prompts than this version brings. Compose again to add examples"
        )
    if member == BASE:
        prompts = [text, *prompts]
        profiles = _with_prompt(router, read)
    else:
        own = router.profiles[member]
        profiles = {**router.profiles, member: replace(own, examples=(*own.examples, text))}
    settings = {**router.settings, "prompts": fingerprint(prompts, table)}
    changed = DeltaRouter(profiles, settings, router.embedders, router.marks, base=router.base)
    rows = [render(tokenizer, prompt) for prompt in prompts]
    spoken = [row[router.marks.read(row).user] for row in rows]
    changed.learn_examples(base, tokenizer, {key: each.embed(spoken) for key, each in router.embedders.items()})
    return changed


def _with_prompt(router: DeltaRouter, read: RoutedPrompt) -> dict[str, ExpertProfile]:
    """Return the experts' profiles with one more calibration prompt, the first."""
    features_FK = pool(read.energy_TK, read.user)
    vectors = {key: each.embed([list(read.ids[read.user])]) for key, each in router.embedders.items()}
    profiles = dict(router.profiles)
    for number, name in enumerate(router.experts):
        profile = router.profiles[name]
        features = torch.cat([features_FK[None, :, number].to(profile.features_PF), profile.features_PF])
        found = torch.cat([similarity(vectors, profile.vectors), profile.similarity_PS])
        profiles[name] = replace(profile, features_PF=features, similarity_PS=found)
    return profiles


def retention(router: DeltaRouter) -> float:
    """Return the share of the calibration prompts that stay with the base."""
    if not router.experts:
        return 1.0
    choose_PK, accept_PK = scores(router.calibration, router.weights, router.limits.floor)
    prior_PC = prior(choose_PK, accept_PK, router.limits.threshold, router.weights)
    return float((prior_PC.argmax(-1) == 0).float().mean())
