"""Add an expert to a composition on disk, or remove one. Everything else stays as it is: only a new expert is
calibrated, members that the folder holds are not written again, and nothing is seen before all of it is written."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..compose import assemble, check_member, styled_entry
from ..errors import CheckpointError, MemberError, nearest
from ..members import Loading, Member, MemberSpec, check_name, load_member
from ..members.cards import UNDESCRIBED
from ..members.folders import expert_name
from ..model import ComposedForCausalLM
from ..routing.calibrated import prepare_router
from ..routing.calibration import Progress
from ..routing.router import DeltaRouter
from ..rules import find_rule
from ..vocabulary import MemberTokens, Vocabulary, agree
from .load import load
from .reader import read_config
from .save import save


def add_expert(
    folder: Path, spec: MemberSpec, name: str | None = None, progress: Progress | None = None
) -> ComposedForCausalLM:
    """Add an expert; its name is its folder's unless given. Return the composition as it is then."""
    before = _config_of(folder)
    name = expert_name(Path(str(spec.source)).name) if name is None else name
    check_name(name)
    if name in read_config(folder).member_names:
        raise MemberError(
            f"{folder} has an expert {name!r} already. Choose another with --name, or remove it first: tessellm remove "
            f"{folder} {name}"
        )
    model = load(folder)
    changed = with_expert(model, spec, name, progress)
    _write(changed, folder, before, model.config.member_names)
    return changed


def remove_expert(folder: Path, name: str) -> ComposedForCausalLM:
    """Remove an expert. Return the composition as it is then."""
    before = _config_of(folder)
    check_removable(str(folder), name, read_config(folder).member_names[1:])
    changed = without_expert(load(folder), name)
    _write(changed, folder, before, changed.config.member_names)
    return changed


def check_removable(whose: str, name: str, experts: Sequence[str]) -> None:
    """Refuse an expert that there is not, and the only one."""
    if name not in experts:
        raise MemberError(f"{whose} has no expert {name!r}; {nearest(name, experts)}")
    if len(experts) == 1:
        raise MemberError(f"{name!r} is the only expert of {whose}, and a composition needs one at least")


def with_expert(
    model: ComposedForCausalLM, spec: MemberSpec, name: str, progress: Progress | None = None
) -> ComposedForCausalLM:
    """Return a composition in memory with one more expert, in the place of one of its name. Weights are not copied."""
    member = load_member(name, spec, model.loaded_members[0], Loading())
    check_member(member)
    vocabulary, notes = _extended(model, member)
    kept = _others(model, name)
    changed = _rebuilt(model, [*kept, member], vocabulary, (*model.notes, *member.notes, *notes))
    prepare_router(changed, progress, _router_of(model))
    return changed


def without_expert(model: ComposedForCausalLM, name: str) -> ComposedForCausalLM:
    """Return a composition in memory with one expert fewer. Weights are not copied."""
    kept = _others(model, name)
    ends = {entry["name"]: tuple(entry["end_ids"]) for entry in model.config.members if entry["name"] != name}
    alignments = {member.name: model.alignments[member.name] for member in kept}
    vocabulary = Vocabulary(model.config.vocab_size, alignments, ends, (), None)
    notes = [note for note in model.notes if not note.startswith(f"{name}: ") and f"'{name}'" not in note]
    changed = _rebuilt(model, kept, vocabulary, notes)
    prepare_router(changed, previous=_router_of(model))
    return changed


def _others(model: ComposedForCausalLM, name: str) -> list[Member]:
    """Return all members but one, with the weights that they have now."""
    weights = {entry["name"]: entry.get("weight", 1.0) for entry in model.config.members}
    others = [member for member in model.loaded_members if member.name != name]
    return [replace(member, spec=replace(member.spec, weight=weights[member.name])) for member in others]


def _config_of(folder: Path) -> bytes:
    """Read a composition's config as it lies on disk."""
    read_config(folder)  # which says what is wrong with it
    return (folder / "config.json").read_bytes()


def _extended(model: ComposedForCausalLM, member: Member) -> tuple[Vocabulary, tuple[str, ...]]:
    """Return the composition's vocabulary with a new member, and notes on how its tokens agree."""
    size, ends = model.config.vocab_size, tuple(model.config.eos_token_id or ())
    text = member.model.config.get_text_config(decoder=True)
    ours = MemberTokens("base", size, model.tokenizer, ends)
    found = agree([ours, MemberTokens(member.name, text.vocab_size, member.tokenizer, member.end_ids)])
    if found.size != size:
        raise MemberError(
            f"member {member.name!r} speaks {found.size} tokens, the composition {size}. Compose all members again"
        )
    known = {entry["name"]: tuple(entry["end_ids"]) for entry in model.config.members}
    alignments = {**model.alignments, member.name: found.alignments[member.name]}
    member_ends = {**known, member.name: found.member_end_ids[member.name]}
    return Vocabulary(size, alignments, member_ends, (), None), tuple(n for n in found.notes if f"'{member.name}'" in n)


def _rebuilt(
    model: ComposedForCausalLM, members: Sequence[Member], vocabulary: Vocabulary, notes: Sequence[str]
) -> ComposedForCausalLM:
    """Assemble other members as this composition was assembled."""
    entry = dict(model.config.rule)
    if find_rule(entry["name"]) is None:
        raise CheckpointError(f"the rule {entry['name']!r} learnt of these experts alone. Compose them again")
    entry.pop("styles", None)
    entry = styled_entry(entry, {member.name: member.spec for member in members})
    changed = assemble(members, entry, vocabulary)
    changed.config.routing = dict(model.config.routing)
    for key in ("pad_token_id", "bos_token_id", "use_cache"):
        setattr(changed.config, key, getattr(model.config, key))
    changed.tokenizer = model.tokenizer
    changed.generation_config = copy.deepcopy(model.generation_config)
    changed.generation_config.eos_token_id = changed.config.eos_token_id
    changed.notes = tuple(dict.fromkeys(note for note in notes if UNDESCRIBED not in note))
    return changed


def _router_of(model: ComposedForCausalLM) -> DeltaRouter | None:
    return model.router if isinstance(model.router, DeltaRouter) else None


def _write(changed: ComposedForCausalLM, folder: Path, before: bytes, stored: Sequence[str]) -> None:
    """Save in place of what was read, unless someone else changed that meanwhile."""
    if (folder / "config.json").read_bytes() != before:
        raise CheckpointError(f"{folder} was changed meanwhile. Nothing was written; run the same command again")
    self_contained = (folder / "members").is_dir()
    save(changed, folder, self_contained, stored=stored if self_contained else ())
