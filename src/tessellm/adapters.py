"""LoRA experts: one module tree an expert, every tensor of the base shared by all of them.

An adapter of PEFT's is put on a structural copy of the base: new modules around the same parameters. So k experts
cost one base and k small deltas in memory, no adapter is ever switched on or off, and a base that the user loaded
keeps its own modules. PEFT does the adapters themselves.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import sources
from .errors import MemberError


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model's structure around the very same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo)


def load_adapter(
    source: sources.Source,
    name: str,
    base: PreTrainedModel,
    base_source: sources.Source | None,
    any_base: bool,
) -> tuple[PreTrainedModel, bool, str | None]:
    """The base with the adapter in it; whether it is a full model of its own; a note for the user, if one is due."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(source.directory))
    if config.is_prompt_learning:
        raise MemberError(
            f"member {name!r}: {source.directory} is a {config.peft_type.value} adapter, which adds virtual tokens "
            "that the other members do not see. Expected LoRA or another adapter of the layers"
        )
    note = None if any_base else _check_base(config.base_model_name_or_path, name, base, base_source)
    reason = _why_full(config, source.directory)
    if reason is None:
        return _attach(source.directory, name, share(base)), False, note
    own = copy.deepcopy(base)
    _fit_embeddings(own, source.directory)
    merged = _attach(source.directory, name, own, merge=True)
    return merged, True, f"{name}: the adapter {reason}, so it was merged into a full model of its own"


def adapt_loaded(peft_model: Any, name: str, base: PreTrainedModel) -> tuple[PreTrainedModel, bool, str | None]:
    """The same for a PeftModel that the user has in memory. Its own base must be this base."""
    theirs: Tensor = peft_model.get_base_model().get_input_embeddings().weight
    ours = next(iter(base.get_input_embeddings().parameters()))
    if theirs.shape != ours.shape or not torch.equal(theirs.to(ours), ours):
        raise MemberError(f"member {name!r}: the PeftModel was made on another base: its input embeddings differ")
    with tempfile.TemporaryDirectory() as folder:
        peft_model.save_pretrained(folder)
        return load_adapter(sources.Source(Path(folder)), name, base, None, any_base=True)


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter that `load_adapter` put in, as PEFT writes it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = copy.deepcopy(model.peft_config["default"])
    config.base_model_name_or_path = "../base"
    state = get_peft_model_state_dict(model, adapter_name="default")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"base_model.model.{key}": tensor.contiguous().cpu() for key, tensor in state.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(str(folder))


def _attach(directory: Path, name: str, model: PreTrainedModel, merge: bool = False) -> PreTrainedModel:
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing keys are checked below, where they can be named
            peft_model = PeftModel.from_pretrained(model, str(directory))
    except (ValueError, RuntimeError, KeyError) as error:
        raise MemberError(
            f"member {name!r}: the adapter in {directory} does not fit this base: {_first_line(error)}. "
            "Expected an adapter trained on the composition's base"
        ) from error
    for parameter, flag in learning:
        parameter.requires_grad_(flag)
    with safe_open(sources.weight_files(directory)[0], "pt") as file:
        stored = set(file.keys())
    loaded = set(get_peft_model_state_dict(peft_model))
    if not merge and stored != loaded:
        odd = sorted(stored ^ loaded)
        raise MemberError(
            f"member {name!r}: the adapter in {directory} does not fit this base: {len(odd)} tensors have no "
            f"counterpart, first {odd[0]}"
        )
    if merge:
        return peft_model.merge_and_unload()
    inner: Any = peft_model.get_base_model()
    inner.peft_config = peft_model.peft_config
    return inner.eval()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 and lines[0].startswith("Error") else lines[0]


def _why_full(config: Any, directory: Path) -> str | None:
    """Why an adapter cannot share the base's tensors; None if it can."""
    from safetensors import safe_open

    if config.modules_to_save:
        return f"carries whole modules (modules_to_save: {', '.join(sorted(config.modules_to_save))})"
    with safe_open(sources.weight_files(directory)[0], "pt") as file:
        whole = [key for key in file.keys() if key.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight"))]
    return f"carries embeddings of its own ({whole[0]})" if whole else None


def _fit_embeddings(model: PreTrainedModel, directory: Path) -> None:
    from safetensors import safe_open

    with safe_open(sources.weight_files(directory)[0], "pt") as file:
        rows = [file.get_slice(key).get_shape()[0] for key in file.keys() if "embed" in key and key.endswith("weight")]
    if rows and rows[0] != model.config.get_text_config(decoder=True).vocab_size:
        model.resize_token_embeddings(rows[0], mean_resizing=False)


def _check_base(
    trained_on: str | None, name: str, base: PreTrainedModel, base_source: sources.Source | None
) -> str | None:
    """Refuse an adapter that was surely trained on another base; a note where that cannot be told."""
    if not trained_on or base_source is None:
        return None
    ours = base_source.hub_id or str(base_source.directory)
    if _same_name(trained_on, ours) or _same_name(trained_on, getattr(base.config, "name_or_path", "")):
        return None
    theirs = Path(trained_on).expanduser()
    if theirs.is_dir():
        files = sources.weight_files(theirs.resolve())
        if files and sources.digest(files) == sources.digest(sources.weight_files(base_source.directory)):
            return None
    elif base_source.hub_id is None or not sources.HUB_ID.match(trained_on):
        return f"{name}: the adapter says it was trained on {trained_on}; whether that is this base cannot be told"
    raise MemberError(
        f"member {name!r}: the adapter was trained on {trained_on}, but the composition's base is {ours}. "
        "Use that base, or set any_base: true on this expert if the two hold the same weights"
    )


def _same_name(left: str, right: str) -> bool:
    return Path(left).name == Path(right).name if left and right else False
