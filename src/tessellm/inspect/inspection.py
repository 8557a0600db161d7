"""What `tessellm inspect` shows: members, sizes, shared bytes, vocabulary agreement, rule."""

from __future__ import annotations

from typing import Any

from ..compose import context_of
from ..members.shared_tensors import unique_bytes
from ..model import ComposedForCausalLM
from ..rules import find_rule


def inspect_model(model: ComposedForCausalLM) -> dict[str, Any]:
    """Everything that a user should know of a composition before running it."""
    members = list(model.members.values())
    rule = model.config.rule
    about = find_rule(rule["name"])
    assert about is not None
    apart = sum(unique_bytes([member]) for member in members)
    return {
        "members": [_member_row(model, number) for number in range(len(members))],
        "rule": {
            "name": rule["name"],
            "parameters": {key: value for key, value in rule.items() if key != "name"},
            "summary": about.summary,
            "reference": about.reference,
        },
        "vocab_size": model.config.vocab_size,
        "context": model.config.max_position_embeddings,
        "end_tokens": [_token_text(model, token) for token in model.config.eos_token_id or []],
        "bytes": unique_bytes(members),
        "shared_bytes": apart - unique_bytes(members),
        "notes": list(model.notes),
    }


def _member_row(model: ComposedForCausalLM, number: int) -> dict[str, Any]:
    entry = model.config.members[number]
    style = ", style" if number in {*model.config.styles, *model.config.rule.get("styles", ())} else ""
    member: Any = model.members[entry["name"]]
    upto = list(model.members.values())[: number + 1]
    return {
        "name": entry["name"],
        "kind": entry["kind"] + style,
        "weight": f"{entry['weight']:g}" if number else "",
        "architecture": type(member).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel"),
        "parameters": _own_parameters(model, member) if entry["kind"] == "adapter" else member.num_parameters(),
        "added_bytes": unique_bytes(upto) - unique_bytes(upto[:-1]),  # shared tensors count for the first who has them
        "dtype": str(member.dtype).removeprefix("torch."),
        "context": context_of(member),
        "source": entry.get("source") or "(loaded model)",
    }


def _own_parameters(model: ComposedForCausalLM, adapter: Any) -> int:
    """What an adapter adds to its base's parameters."""
    base = {id(parameter) for parameter in model.base.parameters()}
    return sum(parameter.numel() for parameter in adapter.parameters() if id(parameter) not in base)


def _token_text(model: ComposedForCausalLM, token: int) -> str:
    return str(token) if model.tokenizer is None else f"{token} {model.tokenizer.convert_ids_to_tokens(token)!r}"
