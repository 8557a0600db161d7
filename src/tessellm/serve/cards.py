"""What /v1/models says of the composition, its base and its experts."""

from __future__ import annotations

from ..diagnose.shown import colour, line_style
from ..rules import RULES
from .answers import Model, ModelAbout, ModelMember
from .targets import Targets


def model_card(id_: str, targets: Targets, created: int, context: int) -> Model:
    """Return the card of a model that is served. `root` and `parent` say of experts what vLLM's do."""
    number = targets.number_of(id_)
    if number is None:
        about, root, parent = _composition(targets), targets.model.name_or_path or None, None
    else:
        about = ModelAbout(kind="member")
        root, parent = targets.source_of(number), next(iter(targets.members)) if number else None
    return Model(id=id_, created=created, root=root, parent=parent, max_model_len=context, tessellm=about)


def _composition(targets: Targets) -> ModelAbout:
    config = targets.model.config
    members = zip(config.member_names, targets.members, (None, *config.weights), strict=True)
    return ModelAbout(
        kind="composition",
        rule=config.rule["name"],
        rules=targets.rules,
        summaries={rule: RULES[rule].summary for rule in targets.rules if rule in RULES},
        chat=bool(targets.model.tokenizer.chat_template),
        members=[
            ModelMember(name=name, model=id_, weight=weight, colour=colour(number), line=line_style(number))
            for number, (name, id_, weight) in enumerate(members)
        ],
    )
