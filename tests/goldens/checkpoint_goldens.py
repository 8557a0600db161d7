"""Tiny saved compositions of every kind, and what a loaded one says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import tessellm

from conftest import build_model, character_tokenizer, perturbed, save_lora, save_member
from decoding_goldens import logit_rows
from gguf_cases import model_for, write_gguf

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 512}  # fmt: skip
KINDS = ("linked", "self-contained", "adapters", "adapters-self-contained", "gguf", "evidence", "belief")
PROMPT = [5, 9, 23, 40, 11, 7, 30]


def save_all(home: Path) -> None:
    """Save members and compositions; files of members get one time, which links to them remember."""
    members = home / "members"
    base, tokenizer = build_model("llama", **SMALL), character_tokenizer()
    save_member(base, members / "base", tokenizer)
    save_member(perturbed(base, 1), members / "math")
    save_member(perturbed(base, 2), members / "coding")
    _save_adapter(members / "base", members / "lora")
    write_gguf(members / "base.gguf", model_for(0), "Q4_0")
    write_gguf(members / "math.gguf", model_for(1), "Q4_0")
    for file in members.rglob("*"):
        os.utime(file, (1e9, 1e9))
    for kind in KINDS:
        _compose(kind, members).save_pretrained(home / kind, self_contained="self-contained" in kind)


def _save_adapter(base: Path, folder: Path) -> None:
    """Save one whose files do not say where they were made."""
    config = save_lora(base, folder, 3, target_modules=["q_proj"]) / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "base"}, indent=2))
    (folder / "README.md").unlink()


def _compose(kind: str, members: Path) -> Any:
    if kind == "gguf":
        return tessellm.compose(members / "base.gguf", {"math": members / "math.gguf"}, rule="product")
    experts = {"math": members / "math", "coding": members / "coding"}
    if "adapters" in kind:
        experts["coding"] = members / "lora"
    rule = kind if kind in ("evidence", "belief") else "product"
    return tessellm.compose(members / "base", experts, weights={"math": 0.7}, rule=rule)


def loaded(folder: Path) -> dict[str, Any]:
    """Say what a folder loads as, whatever its rule: members, vocabulary, where it stops; and what it computes."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")  # as recorded: int4 has other logits
    config = model.config
    made = model.generate(torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), max_new_tokens=8)
    return {
        "rule": config.rule["name"],
        "termination": getattr(model.rule.rule, "policy", "rule"),  # of the lab's rule alone
        "members": [[member["name"], member["kind"], member["weight"]] for member in config.members],
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "special": [config.eos_token_id, config.bos_token_id, config.pad_token_id],
        "tokenizer": model.tokenizer.convert_ids_to_tokens(PROMPT),
        "logits": logit_rows(model, PROMPT),
        "written": made[0, len(PROMPT) :].tolist(),
    }


def saved_rule(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["rule"]["name"]
