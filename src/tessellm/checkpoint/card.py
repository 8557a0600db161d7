"""The README that a saved composition carries."""

from __future__ import annotations

from collections.abc import Sequence

from ..members import SavedMember
from ..model import ComposedConfig
from ..rules import find_rule


def model_card(config: ComposedConfig, members: Sequence[SavedMember], name: str, notes: Sequence[str]) -> str:
    """Write a model card in the hub's form."""
    rows = "\n".join(
        f"| {member.name} | {member.kind} | {'' if i == 0 else format(member.weight, 'g')} | "
        f"`{member.source or ''}`{' @ ' + member.revision[:12] if member.revision else ''} |"
        for i, member in enumerate(members)
    )
    rule = config.rule
    parameters = "".join(f", {key} = {value}" for key, value in rule.items() if key != "name")
    entry = find_rule(rule["name"])
    assert entry is not None
    remarks = "\n".join(f"- {note}" for note in notes)
    hub_ids = [str(member.source) for member in members if member.revision]
    base_model = f"base_model: [{', '.join(hub_ids)}]\n" if hub_ids else ""
    return f"""---
library_name: tessellm
pipeline_tag: text-generation
tags: [tessellm, model-composition]
{base_model}---

# {name}

Language models that share a base, composed at decoding time, without training.

| member | kind | weight | source |
|---|---|---|---|
{rows}

Rule: **{rule["name"]}** ({entry.summary}; {entry.reference}){parameters}.
Vocabulary: {config.vocab_size} tokens. Context: {config.max_position_embeddings} tokens.

```python
import tessellm
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

{remarks}
"""
