"""Read a composition's config.json, and refuse what a hand, another program or a broken disk made of it.

Everything that is later taken for granted is checked here, once, before anything is loaded. Loads nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..compose import rule_entry
from ..errors import CheckpointError, MemberError, RecipeError
from ..members import SavedMember, check_name
from ..members.saved import EXPECTED as MEMBER_KEYS
from ..members.saved import TokenId
from ..model import ComposedConfig
from ..routing.router import BASE_RETENTION
from ..rules import RULES, Mixture
from ..validation import explain

ROUTER = "router.safetensors"
FORMER = "belief"  # the default rule of checkpoints from before
LARGEST = 16 << 20  # bytes of a config.json
MOST_MEMBERS = 1000
Count = Annotated[int, Field(ge=0, lt=2**31)]
Special = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: some models' way to say none
SIZE = "a whole number, not negative"
EXPECTED = {  # by the last known key of where a problem is; members.* is what each of them should be
    **MEMBER_KEYS,
    "members.*": "a mapping with the keys name, kind, weight and end_ids",
    "rule": "a mapping with the key name and the rule's parameters",
    "routing": "a mapping with the keys enabled, base_retention and embedder",
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "num_hidden_layers"), SIZE),
    "eos_token_id": "a list of token ids",
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "a token id"),
    "use_cache": "true or false",
    "notes": "a list of texts",
}


class SavedRouting(BaseModel):
    """How a composition routes, as config.json holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    enabled: bool = True
    base_retention: Annotated[float, Field(gt=0, lt=1)] = BASE_RETENTION
    embedder: Annotated[str, Field(min_length=1)] | None = None


class SavedComposition(BaseModel):
    """A composition as config.json holds it; keys that Hugging Face libraries add are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, strict=True)

    members: Annotated[list[SavedMember], Field(min_length=2, max_length=MOST_MEMBERS)]
    rule: dict[str, Any]
    routing: SavedRouting = SavedRouting()
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    max_position_embeddings: Count
    num_hidden_layers: Count = 0
    eos_token_id: list[TokenId] | TokenId | None = None
    bos_token_id: Special | None = None
    pad_token_id: Special | None = None
    use_cache: bool = True
    notes: list[str] = []

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        names = [member.name for member in self.members]
        if names[0] != "base" or self.members[0].kind != "full":
            raise ValueError("the first member must be the base, a full model")
        for name in names[1:]:
            if names.count(name) > 1:
                raise ValueError(f"two members are called {name!r}")
            check_name(name)
        beyond = [end for member in self.members for end in member.end_ids if end >= self.vocab_size]
        if beyond:
            raise ValueError(f"an end token has the id {beyond[0]}, beyond the vocabulary of {self.vocab_size}")
        return self


def is_composition(folder: Path) -> bool:
    """Whether a folder's config.json says that it is a composition's."""
    try:
        return _read_json(folder / "config.json")["model_type"] == ComposedConfig.model_type
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_config(folder: Path) -> ComposedConfig:
    """Read and check a composition's config."""
    file = folder / "config.json"
    try:
        content = _read_json(file)
        model_type = content.get("model_type")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no composition: there is no config.json in it") from None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is cut off or damaged. Compose again") from error
    if model_type != ComposedConfig.model_type:
        raise CheckpointError(
            f"{folder} holds no composition but a model of type {str(model_type)[:80]!r}. Expected a folder written by "
            "`tessellm compose`, or a recipe"
        )
    check_saved(content, file)
    return renewed(ComposedConfig.from_pretrained(folder))


def renewed(config: ComposedConfig) -> ComposedConfig:
    """Bring a config from before up to date: the rule that took the place of a former default, and no `termination`,
    with notes of what changed."""
    saved = {"rule": config.rule, "termination": config.__dict__.pop("termination", None)}
    config.rule = _present_rule(saved)
    notes = []
    if saved["rule"].get("name") == FORMER:
        notes.append(f"It was saved with the rule {FORMER}, which is gone: the rule {Mixture.name} takes its place.")
    elif saved["rule"].get("name") in RULES and saved["termination"] not in (None, "rule"):
        notes.append(f"It was saved with termination {saved['termination']}, which is gone: its rule decides.")
    if notes:
        config.notes = [*(getattr(config, "notes", None) or []), *notes]
    return config


def _present_rule(content: Mapping[str, Any]) -> Any:
    """Return the rule that a config of today would hold. Rules of other distributions decide about stopping."""
    rule, termination = content["rule"], content.get("termination")
    if not isinstance(rule, Mapping) or not isinstance(rule.get("name"), str):
        return rule
    if rule.get("name") == FORMER:
        return {"name": Mixture.name, **({"styles": rule["styles"]} if rule.get("styles") else {})}
    if rule.get("name") in RULES or termination is None:
        return rule
    return {**rule, "termination": termination}


def check_saved(content: Mapping[str, Any], file: Path) -> SavedComposition:
    """Check what config.json says; errors name `file`."""
    try:
        present = {"rule": _present_rule(content)} if "rule" in content else {}
        saved = SavedComposition.model_validate({**content, **present})
        rule_entry(saved.rule)
    except ValidationError as error:
        raise _damaged(file, explain(error, EXPECTED, _known_keys)) from error
    except (MemberError, RecipeError) as error:
        raise _damaged(file, str(error)) from error
    return saved


def saved_members(config: ComposedConfig, folder: Path) -> list[SavedMember]:
    """Read and check the members in a composition's config."""
    return check_saved(config.to_dict(), folder / "config.json").members


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {why}. Compose again")


def _known_keys(place: tuple[str, ...]) -> Iterable[str]:
    return SavedMember.model_fields if len(place) > 1 else SavedComposition.model_fields


def _read_json(file: Path) -> Any:
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file} is too large")
    return json.loads(file.read_text(encoding="utf-8"))
