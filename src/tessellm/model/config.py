"""What a composition is, as config.json holds it. Knows no weights and no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from transformers import PreTrainedConfig

from ..rules import DEFAULT, Product, RuleLike, resolved
from .room import check_room


class ComposedConfig(PreTrainedConfig):
    """What a composition is: its members, their weights, the rule. `members[0]` is the base.

    A member is a mapping with the keys of `members.SavedMember`; `rule` is one with `name` and the rule's parameters.
    """

    model_type = "tessellm"

    members: list[dict[str, Any]] = field(default_factory=list)
    rule: dict[str, Any] = field(default_factory=lambda: {"name": resolved(DEFAULT)})
    routing: dict[str, Any] = field(default_factory=dict)  # enabled, base_retention, embedder, where not the default
    vocab_size: int = 0
    max_position_embeddings: int = 0
    num_hidden_layers: int = 0
    bos_token_id: int | None = None
    eos_token_id: list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True

    @property
    def member_names(self) -> list[str]:
        return [member["name"] for member in self.members]

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(float(member["weight"]) for member in self.members[1:])

    @property
    def styles(self) -> list[int]:
        """The numbers of the experts that were declared to be styles, 1 for the first."""
        return [number for number, member in enumerate(self.members) if number and member.get("style")]

    def meant(self, rule: RuleLike) -> RuleLike:
        """Return what a rule given by its name, or without styles, means for these members."""
        entry = {"name": rule} if isinstance(rule, str) else rule
        if not isinstance(entry, Mapping) or resolved(entry["name"]) != resolved(DEFAULT) or not self.styles:
            return rule
        if len(self.styles) == len(self.members) - 1 and entry["name"] == DEFAULT:
            return Product.name
        return {"styles": self.styles, **entry, "name": resolved(DEFAULT)}

    def check_room(self, length: int, new: int, what: str = "the prompt", option: str = "max_new_tokens") -> None:
        """Refuse a prompt of `length` tokens that leaves no room for `new` ones, before any is written."""
        check_room(length, new, self.max_position_embeddings, what, option)
