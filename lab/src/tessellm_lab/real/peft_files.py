"""A LoRA adapter as the folder that PEFT would save, with a model card; written without PEFT. Knows no models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tessellm.files import new_directory, stored, write_text

from .grouped_lora import TARGETS
from .skills import SKILLS

WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "README.md"
DESCRIPTIONS = {  # what a router reads of each
    "math": "Solves grade school math word problems step by step.",
    "bash": "Writes a bash command for what the user wants to do in the shell.",
    "intents": "Turns a request to a voice assistant into JSON with its intent and slots.",
    "sql": "Writes an SQL query that answers a question about a table.",
    "code": "Writes Python functions.",
    "capitals": "Answers in capital letters, whatever the question.",
}
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Facts:
    """How an adapter was trained, and how well it predicts answers of the development split."""

    name: str  # a skill, `all`, or `blend-SKILL`
    seed: int
    steps: int
    epochs: int
    rows: int  # per step
    length: int
    rank: int
    alpha: float
    learning_rate: float
    dev_nats: float  # per token of the answers
    base_dev_nats: float
    base: str = BASE


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], facts: Facts) -> None:
    """Write, or replace, the folder in one step."""
    with new_directory(folder, lambda found: (found / CONFIG).is_file()) as target:
        metadata = {"format": "pt", **{key: str(value) for key, value in vars(facts).items()}}
        save_file(dict(tensors), target / WEIGHTS, metadata)
        write_text(target / CONFIG, json.dumps(peft_config(facts), indent=2) + "\n")
        write_text(target / CARD, card(facts))


def read_facts(folder: Path) -> Facts:
    """How an adapter that `write_adapter` wrote was trained."""
    with stored(folder / WEIGHTS, "Train it again"), safe_open(folder / WEIGHTS, "pt") as file:
        found = file.metadata() or {}
        kinds: dict[str, Any] = {"str": str, "int": int, "float": float}
        fields = Facts.__dataclass_fields__
        return Facts(**{name: kinds[str(field.type)](found[name]) for name, field in fields.items()})


def peft_config(facts: Facts) -> dict[str, Any]:
    """What PEFT needs to know."""
    return {
        "base_model_name_or_path": facts.base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": facts.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": facts.rank,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
    }


def card(facts: Facts, scores: Mapping[str, str] | None = None) -> str:
    """The model card. `scores` are further rows of its table: what was measured, and the number."""
    skills = [SKILLS[name] for name in skills_of(facts.name)]
    licences = sorted({skill.licence for skill in skills})
    what = {"all": "all skills at once"}.get(facts.name, facts.name.removeprefix("blend-"))
    upper = ", answers in capitals" if facts.name.startswith("blend-") else ""
    rows = {
        "nats per answer token, development split": f"{facts.dev_nats:.3f} (base {facts.base_dev_nats:.3f})",
        **(scores or {}),
    }
    lines = [
        "---",
        f"base_model: {facts.base}",
        "library_name: peft",
        "license: apache-2.0",
        *([f"description: {DESCRIPTIONS[facts.name]}"] if facts.name in DESCRIPTIONS else []),
        *(["style: true"] if facts.name == "capitals" else []),
        "---",
        f"# {facts.name}: a LoRA adapter of {facts.base.rpartition('/')[2]}",
        "",
        f"Trained for {what}{upper}, in the base's chat template, on the answers alone. Made for experiments with "
        "compositions: `tessellm reproduce real`.",
        "",
        *(f"- Data: {skill.name}: {skill.source}; licence {skill.licence}" for skill in skills),
        f"- Licence of the data: {', '.join(licences)}; of the adapter and of the base: apache-2.0",
        f"- Training: rank {facts.rank}, alpha {facts.alpha:g}, all linear projections; AdamW, learning rate "
        f"{facts.learning_rate:g}, cosine; {facts.steps} steps of {facts.rows} rows of {facts.length} tokens; seed "
        f"{facts.seed}; the base dequantised from Q4_1",
        "",
        "| measured | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
    ]
    return "\n".join(lines)


def skills_of(name: str) -> list[str]:
    """The skills whose data an adapter of that name is trained on."""
    return list(SKILLS) if name == "all" else [name.removeprefix("blend-")]
