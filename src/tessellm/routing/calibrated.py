"""The router of a composition: calibrated once, and kept by content, so that a second start measures nothing.

Knows a composed model by its members, config, tokenizer, rule and notes alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..members import Member
from ..members.cards import note_undescribed
from ..members.packed import is_packed
from ..members.saved import quick, telling_files
from ..members.sources import Source, digest
from .calibration import Progress, calibration_prompts
from .directions import linear_layers
from .profiles import ExpertToRoute
from .router import BASE_RETENTION, VERSION, DeltaRouter
from .stored import cached_router, keep_router
from .template import render

FEWEST = 32  # calibration prompts that fit into the context; fewer say nothing of ordinary prompts


def prepare_router(model: Any, progress: Progress | None = None, previous: DeltaRouter | None = None) -> None:
    """Give a composition its router, and notes of what it lacks; none where its rule or its settings want none.
    Experts that `previous` measured alike are not measured again."""
    routing = model.routing
    if routing is None or not model.config.routing.get("enabled", True):
        return
    names = [model.config.member_names[number] for number in routing.rule.candidates(len(model.members) - 1)]
    if not names:
        return
    prompts = prompts_of(model)
    if why := _no_router(model, names, prompts):
        _note(model, f"There is no router, so all prompts have one prior: {why}.")
        return
    key = _key(model, names, prompts)
    router = None if key is None else cached_router(key, model.base, model.tokenizer)
    if router is None:
        router = _calibrated(model, names, prompts, progress, previous)
        if key is not None:
            keep_router(key, router)
    model.router = router
    for note in (*router.notes, *_undescribed(model, names)):
        _note(model, note)


def _calibrated(
    model: Any, names: Sequence[str], prompts: list[str], progress: Progress | None, previous: DeltaRouter | None
) -> DeltaRouter:
    experts = {}
    for name in names:
        entry = _entry(model, name)
        examples = tuple(entry.get("examples") or ())
        experts[name] = ExpertToRoute(model.member(name), entry.get("description"), examples)
    settings = model.config.routing
    return DeltaRouter.calibrate(
        model.base,
        model.tokenizer,
        experts,
        prompts=prompts,
        base_retention=settings.get("base_retention", BASE_RETENTION),
        embedder=settings.get("embedder"),
        progress=progress or (lambda done, total: None),
        previous=previous,
    )


def prompts_of(model: Any) -> list[str]:
    """Return the calibration prompts that fit into the context and the vocabulary, the base's examples among them."""
    every = [*(_entry(model, "base").get("examples") or ()), *calibration_prompts()]
    if model.tokenizer is None:
        return every
    limit = model.config.max_position_embeddings or float("inf")
    rows = [render(model.tokenizer, text) for text in every]
    known = model.config.vocab_size
    return [text for text, row in zip(every, rows, strict=True) if row and len(row) <= limit and max(row) < known]


def _no_router(model: Any, names: Sequence[str], prompts: Sequence[str]) -> str | None:
    """Return why there cannot be a router; None where there can."""
    if model.tokenizer is None:
        return "no member came with a tokenizer"
    if len(prompts) < FEWEST:
        limit = model.config.max_position_embeddings
        return f"only {len(prompts)} calibration prompts fit into the context of {limit} and the vocabulary"
    for name in names:
        if not _alike(model, name):
            return f"{name} has other layers than the base, so the two cannot be compared"
    return None


def _alike(model: Any, name: str) -> bool:
    """Whether a member has layers of the base's shapes."""
    ours, theirs = linear_layers(model.base), linear_layers(model.member(name))
    shared = ours.keys() & theirs.keys()
    return bool(shared) and all(_shape(ours[path]) == _shape(theirs[path]) for path in shared)


def _shape(layer: Any) -> tuple[Any, ...]:
    inner = getattr(layer, "base_layer", layer)
    sizes = getattr(inner, "in_features", None), getattr(inner, "out_features", None)
    return sizes if None not in sizes else tuple(inner.weight.shape)


def _undescribed(model: Any, names: Sequence[str]) -> list[str]:
    plain = [name for name in names if not {"description", "examples"} & _entry(model, name).keys()]
    return [note_undescribed(plain)] if plain else []


def _entry(model: Any, name: str) -> dict[str, Any]:
    return next(entry for entry in model.config.members if entry["name"] == name)


def _note(model: Any, note: str) -> None:
    if note not in model.notes:
        model.notes = (*model.notes, note)


def _key(model: Any, names: Sequence[str], prompts: Sequence[str]) -> str | None:
    """Return what the router depends on, as a hash; None where a member's files are not known."""
    members = {member.name: member for member in model.loaded_members}
    if any(name not in members or members[name].source is None for name in ("base", *names)):
        return None
    parts = {
        "version": [__version__, VERSION],
        "settings": model.config.routing,
        "prompts": prompts,
        "template": model.tokenizer.chat_template,
        "tokens": len(model.tokenizer),
        "dtype": is_packed(model.base) or str(model.base.dtype),
        "base": _identity(members["base"]),
        "experts": [
            [
                name,
                _identity(members[name]),
                _entry(model, name).get("description"),
                _entry(model, name).get("examples"),
            ]
            for name in names
        ],
    }
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _identity(member: Member) -> list[Any]:
    """Return what tells a member's weights from others: a hub's commit, a small file's content, or where large files
    are, their sizes and their times."""
    source = member.source
    assert isinstance(source, Source)
    if source.revision is not None:
        return [source.hub_id, source.file, source.revision, member.spec.quantization]
    files = telling_files(source)
    if member.is_adapter:
        return [digest(files)]
    return [str(source.path.resolve()), quick(files), member.spec.quantization]
