"""compose(): members in, a model out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .errors import MemberError, MissingExtraError, RecipeError, nearest
from .members import Loading, Member, MemberSpec, SavedMember, check_name, load_member
from .members.shared_tensors import share_identical
from .model import ComposedConfig, ComposedForCausalLM
from .routing.calibrated import prepare_router
from .routing.calibration import Progress
from .routing.router import BASE_RETENTION
from .rules import DEFAULT, ComposedRule, Mixture, Product, RuleLike, find_rule, resolved, rule_names
from .vocabulary import MemberTokens, Vocabulary, agree
from .vocabulary.chats import render_chat
from .vocabulary.notes import choose_chat_template


@dataclass(frozen=True)
class RoutingOptions:
    """How a composition routes. `router=False` leaves routing out, `base_retention` is the share of ordinary prompts
    that stay with the base, `embedder` a sentence-transformers model beside the base's token vectors."""

    router: bool = True
    base_retention: float = BASE_RETENTION
    embedder: str | None = None

    def __post_init__(self) -> None:
        share, embedder = self.base_retention, self.embedder
        if not isinstance(self.router, bool):
            raise RecipeError(
                f"router: expected true or false; got {self.router!r}. For one of your own, set model.router"
            )
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
            raise RecipeError(f"base_retention: expected a share between 0 and 1, such as 0.95; got {share!r}")
        if embedder is not None and (not isinstance(embedder, str) or not embedder):
            raise RecipeError(f"embedder: expected a sentence-transformers model's name or folder; got {embedder!r}")

    def entry(self) -> dict[str, Any]:
        """Return what the config holds: what is not the default."""
        given = {"enabled": self.router, "base_retention": float(self.base_retention), "embedder": self.embedder}
        default = {"enabled": True, "base_retention": BASE_RETENTION, "embedder": None}
        return {key: value for key, value in given.items() if value != default[key]}


def compose(
    base: str | Path | PreTrainedModel | Mapping[str, Any] | MemberSpec,
    experts: Mapping[str, Any],
    *,
    rule: RuleLike = DEFAULT,
    weights: Mapping[str, float] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat_template: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> ComposedForCausalLM:
    """Compose language models that share a base into one model.

    A member is a hub id, a local folder, the folder of a PEFT adapter, a GGUF file, a loaded model, or a mapping with
    `source` and any of `description`, `examples`, `weight`, `style`, `revision`, `dtype`, `device`, `quantization`,
    `any_base`. `description` is one line, `examples` a list of prompts or a file: the router goes by both (the base's
    examples are prompts that it keeps). With `style: True` an expert is part of every answer. A PeftModel in place of
    `experts` is all its adapters. `rule` is a name, a mapping with `name` and parameters, or a rule object; by default
    `mixture`: the router decides which members answer. `weights` maps experts to numbers, 1 where not given.
    `tokenizer` stands in for a base that was given as a loaded model. `chat_template` says how prompts are put (Jinja,
    as transformers take it), in place of the members' own. `progress` is called with how many calibration prompts were
    read, of how many.

    `options` are those of `RoutingOptions` (`router`, `base_retention`, `embedder`); `device_map`, one device or
    placement for all members, or a mapping from names to theirs; and those of `Loading`, which say how members are
    loaded (`dtype`, `attn_implementation`, `trust_remote_code`, `token`, …).
    """
    routing = {key: options.pop(key) for key in RoutingOptions.__dataclass_fields__ if key in options}
    specs = member_specs(base, experts, weights, options.pop("device_map", None))
    entry = styled_entry(rule_entry(rule), specs)  # what is wrong with it should show before anything is loaded
    settings = RoutingOptions(**routing).entry()
    if not isinstance(chat_template, str | None):
        raise RecipeError(f"chat_template: expected text; got {type(chat_template).__name__}")
    members = load_members(specs, make_loading(options), tokenizer)
    model = assemble(members, entry if any(spec.style for spec in specs.values()) else rule)
    model.config.routing = settings
    if chat_template is not None:
        _put_by(model, chat_template)
    prepare_router(model, progress)
    return model


def member_specs(
    base: Any, experts: Mapping[str, Any], weights: Mapping[str, float] | None, device_map: Any
) -> dict[str, MemberSpec]:
    """Every member's specification by name, the base first. A PeftModel in place of the experts is all its adapters."""
    if hasattr(experts, "peft_config") and hasattr(experts, "get_base_model"):
        experts = dict.fromkeys(experts.peft_config, experts)
    if not isinstance(experts, Mapping) or not experts:
        raise RecipeError("a composition needs at least one expert: expected a mapping from names to members")
    for name in experts:
        check_name(name)
    specs = {"base": member_spec("base", base), **{name: member_spec(name, expert) for name, expert in experts.items()}}
    if not isinstance(weights, Mapping | None):
        raise RecipeError(f"weights are a mapping from experts to numbers; got {type(weights).__name__}")
    for name, weight in (weights or {}).items():
        if name not in experts:
            raise RecipeError(f"there is a weight for {name!r}, but no such expert; {nearest(name, experts)}")
        specs[name] = member_spec(name, specs[name], weight=weight)
    return place(specs, device_map)


def member_spec(name: str, member: Any, **changes: Any) -> MemberSpec:
    """What was said of one member; what is wrong with it is said with its name."""
    try:
        spec = replace(MemberSpec.of(member), **changes)
        if name == "base" and spec.description is not None:
            raise MemberError("a description says when an expert answers; the base answers all else. Leave it out")
        return replace(spec, examples=spec.prompts or None)
    except MemberError as error:
        raise MemberError(f"member {name!r}: {error}") from error


def place(specs: dict[str, MemberSpec], device_map: Any) -> dict[str, MemberSpec]:
    """Put members where `device_map` says: one device for all, or one a name; the name "" stands for the others."""
    devices = device_map if isinstance(device_map, Mapping) else {"": device_map}
    for name in devices:
        if name not in specs and name != "":
            raise RecipeError(f"device_map names {name!r}, but there is no such member; {nearest(name, specs)}")
    return {
        name: spec if spec.device is not None else replace(spec, device=devices.get(name, devices.get("")))
        for name, spec in specs.items()
    }


def make_loading(options: Mapping[str, Any]) -> Loading:
    """Loading options, unknown ones refused."""
    known = Loading.__dataclass_fields__
    for key in options:
        if key not in known:
            own = {*inspect.signature(compose).parameters} - {"options"}
            every = {*known, *own, *RoutingOptions.__dataclass_fields__, "device_map"}
            raise TypeError(f"unexpected argument {key!r}; {nearest(key, every)}")
    return Loading(**options)


def load_members(
    specs: Mapping[str, MemberSpec], loading: Loading, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Member]:
    """Load the base, then the experts; tensors that an expert has in common with the base are kept once."""
    members: list[Member] = []
    for name, spec in specs.items():
        member = load_member(name, spec, members[0] if members else None, loading)
        check_member(member)
        if tokenizer is not None and member.tokenizer is None:
            member = replace(member, tokenizer=tokenizer)
        if members and member.source is not None and not member.is_adapter:
            share_identical(members[0].model, member.model)
        members.append(member)
    return members


def assemble(members: Sequence[Member], rule: RuleLike, vocabulary: Vocabulary | None = None) -> ComposedForCausalLM:
    """Loaded members, made one model."""
    vocabulary, entry = vocabulary or agree([_speaker(member) for member in members]), rule_entry(rule)
    contexts = [context_of(member.model) for member in members]
    config = ComposedConfig(
        members=[SavedMember.of(member, vocabulary.member_end_ids[member.name]).entry() for member in members],
        rule=entry,
        vocab_size=vocabulary.size,
        max_position_embeddings=min((context for context in contexts if context), default=0),
        num_hidden_layers=sum(_text_config(member).num_hidden_layers for member in members),
        eos_token_id=list(vocabulary.end_ids) or None,
        bos_token_id=getattr(_text_config(members[0]), "bos_token_id", None),
        pad_token_id=_pad_id(members[0], vocabulary.size),
        dtype=members[0].model.dtype,
    )
    model = ComposedForCausalLM(config, {m.name: m.model for m in members}, vocabulary.alignments, rule)
    model.generation_config = _generation_config(members[0].model, config)
    model.loaded_members = tuple(members)
    model.notes = _member_notes(members) + vocabulary.notes
    model.tokenizer = _tokenizer(members, vocabulary)
    return model


def _member_notes(members: Sequence[Member]) -> tuple[str, ...]:
    """Every note on members once, with the names of all that it is on."""
    owners: dict[str, list[str]] = {}
    for member in members:
        for note in member.notes:
            owners.setdefault(note.removeprefix(f"{member.name}: "), []).append(member.name)
    return tuple(f"{', '.join(names)}: {note}" for note, names in owners.items())


def rule_entry(rule: RuleLike) -> dict[str, Any]:
    """A rule as the config holds it: its name and parameters."""
    if isinstance(rule, str):
        rule = {"name": rule}
    if not isinstance(rule, Mapping):
        return _described(rule)
    if "name" not in rule:
        raise RecipeError("a rule given as a mapping needs the key 'name'")
    name = rule["name"]
    try:
        found = find_rule(resolved(name)) if isinstance(name, str) else None
    except ValueError as error:
        raise MissingExtraError(str(error)) from None
    if found is None:
        raise RecipeError(f"unknown rule {name!r}; {nearest(str(name), rule_names())}")
    known = set(inspect.signature(found.make).parameters) - {"name", "weights"} if name != DEFAULT else set()
    for key in rule:
        if key not in known | {"name"}:
            hint = nearest(key, known) if known else "it has none"
            raise RecipeError(f"unknown parameter {key!r} of the rule {name!r}; {hint}")
    try:
        ComposedRule.make(rule)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the rule {name!r} cannot be made: {error}") from error
    return dict(rule)


def styled_entry(entry: dict[str, Any], specs: Mapping[str, MemberSpec]) -> dict[str, Any]:
    """A rule's entry with the styles that members were declared to be. Styles of the base alone are Eq. 2."""
    styles = [number for number, spec in enumerate(specs.values()) if spec.style]
    if not styles:
        return entry
    if 0 in styles:
        raise MemberError("member 'base' cannot be a style: a style is an expert that all others are heard in")
    name = entry["name"]
    if name not in (DEFAULT, Mixture.name, Product.name):
        raise RecipeError(
            f"the rule {name!r} knows no styles, and {list(specs)[styles[0]]!r} is declared one. Use the rule mixture, "
            "product, which hears every expert everywhere, or leave out `style`"
        )
    if name == Product.name or len(styles) == len(specs) - 1:
        return {"name": Product.name}
    return {**entry, "name": Mixture.name, "styles": styles}


def _described(rule: RuleLike) -> dict[str, Any]:
    try:
        return ComposedRule.make(rule).describe()
    except TypeError as error:
        raise RecipeError(str(error)) from error


def check_member(member: Member) -> None:
    if isinstance(member.model, ComposedForCausalLM):
        raise MemberError(f"member {member.name!r} is itself a composition. List its members instead")
    wanted = {"input_ids", "past_key_values", "logits_to_keep"}
    missing = wanted - set(inspect.signature(member.model.forward).parameters)
    if missing or member.model.config.is_encoder_decoder:
        lacking = f" (its forward lacks {', '.join(sorted(missing))})" if missing else ""
        raise MemberError(
            f"member {member.name!r}: {type(member.model).__name__} cannot be composed: it is no decoder-only "
            f"language model with a key-value cache{lacking}"
        )
    _check_window(member)


def _check_window(member: Member) -> None:
    """Refuse a sliding window of one token, for which transformers' cache keeps all tokens (keys[-1 + 1 :]): with a
    cache such a model writes something else than without."""
    config = _text_config(member)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if sliding and getattr(config, "sliding_window", None) == 1:
        raise MemberError(
            f"member {member.name!r} has a sliding window of one token, with which transformers decodes wrongly: its "
            "cache keeps all tokens. Expected sliding_window of 2 or more in its config.json"
        )


def context_of(model: Any) -> int:
    """How many tokens a model can read; 0 where it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0


def _text_config(member: Member) -> Any:
    return member.model.config.get_text_config(decoder=True)


def _pad_id(base: Member, size: int) -> int | None:
    """The base's padding token, if it is one of the composition's."""
    pad = getattr(_text_config(base), "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < size else None


def _speaker(member: Member) -> MemberTokens:
    return MemberTokens(member.name, _text_config(member).vocab_size, member.tokenizer, member.end_ids)


def _tokenizer(members: Sequence[Member], vocabulary: Vocabulary) -> PreTrainedTokenizerBase | None:
    tokenizer = next((member.tokenizer for member in members if member.tokenizer is not None), None)
    if tokenizer is None or vocabulary.chat_template in (None, tokenizer.chat_template):
        return tokenizer
    return _with_template(tokenizer, vocabulary.chat_template)


def _put_by(model: ComposedForCausalLM, template: str) -> None:
    """Give a composition the user's chat template, and say so in place of what was said of the members' own."""
    model.tokenizer = _with_template(model.tokenizer, template)
    told = choose_chat_template([_speaker(member) for member in model.loaded_members if member.tokenizer])[1]
    model.notes = (*(note for note in model.notes if note != told), "The chat template is the one given.")


def _with_template(tokenizer: PreTrainedTokenizerBase | None, template: str) -> PreTrainedTokenizerBase:
    """A tokenizer with another chat template, one that puts a prompt."""
    if tokenizer is None:
        raise RecipeError("a chat_template needs a tokenizer, and no member has one; give tokenizer=")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    prompt, wrong = "what is asked", "it leaves out what the user says"
    try:
        put = render_chat(tokenizer, [{"role": "user", "content": prompt}], generation_prompt=False).text
    except Exception as error:  # a template raises what it likes
        put, wrong = "", f"it cannot be run: {error}"
    if prompt not in put:
        raise RecipeError(
            f"chat_template: {wrong}; expected Jinja such as \"Question: {{{{ messages[-1]['content'] }}}}\\nAnswer:\""
        )
    return tokenizer


def _generation_config(base: PreTrainedModel, config: ComposedConfig) -> GenerationConfig:
    generation = GenerationConfig.from_dict(base.generation_config.to_dict() if base.generation_config else {})
    generation.eos_token_id = config.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = config.pad_token_id
    return generation
