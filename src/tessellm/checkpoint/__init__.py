"""A composition on disk: save and load, linked or self-contained.

    config.json             members, weights, rule; where each member is and what it was when it was saved
    model.safetensors       the experts' weights in the rule and, where ids are permuted, the id maps
    router.safetensors      what the router measured; its settings are in config.json
    tokenizer…, generation_config.json, chat_template.jinja
    modeling_tessellm.py    lets `trust_remote_code=True` load it without `import tessellm`
    README.md               a model card
    members/NAME/           self-contained only: every member as a checkpoint or adapter of its own
    shared/                 self-contained only: tensors that several members have in common

A linked folder names its members by hub id and revision, or by a path relative to itself.
"""

from .links import saved_spec
from .load import (
    load,
    load_as_hugging_face,
    read_own_tensors,
    saved_alignment,
)
from .reader import is_composition, read_config, saved_members
from .save import check_target, save

__all__ = [
    "check_target",
    "is_composition",
    "load",
    "load_as_hugging_face",
    "read_config",
    "read_own_tensors",
    "save",
    "saved_alignment",
    "saved_members",
    "saved_spec",
]
