"""LoRA experts: one module tree per expert, every tensor of the base shared by all of them.

An adapter of PEFT's is put on a structural copy of the base: new modules around the same parameters. So k experts
cost one base and k small deltas in memory, no adapter is ever switched on or off, and a base that the user loaded
keeps its own modules. An adapter that changes tensors of the base itself is merged into a full model of its own, so
that nothing leaks into the base. PEFT does the adapters themselves.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import MemberError
from . import sources
from .adapter_config import largest_rank, not_peft, read_adapter_config, short
from .packed import unpack_model
from .quantized import check_dora, check_readable, shared_state
from .trained_on import check_base

PREFIX = "base_model.model."
LARGEST_DELTA = 1e15  # of an entry of a delta: beyond it, squares of what a layer computes overflow float32
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal")  # of LoRA; others (pissa, olora, …) change the base


def share(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the model's structure around the very same parameters and buffers."""
    kept = [*model.parameters(), *model.buffers(), *shared_state(model)]
    memo: dict[int, Any] = {id(part): part for part in kept}
    return copy.deepcopy(model, memo)


def without_adapters(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Copy a loaded model's structure without the adapters that PEFT put into it."""
    if not has_adapters(model):
        return share(model)
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    plain: Any = share(model)
    for path, module in list(plain.named_modules()):
        if isinstance(module, BaseTunerLayer) and getattr(module, "merged", False):
            raise MemberError(f"member {name!r}: an adapter is merged into it. Call unmerge_adapter() on it first")
        if isinstance(module, BaseTunerLayer):
            plain.set_submodule(path, module.get_base_layer())
        elif isinstance(module, AuxiliaryTrainingWrapper):
            plain.set_submodule(path, module.original_module)
    for left in ("peft_config", "_hf_peft_config_loaded"):
        vars(plain).pop(left, None)
    return plain


def has_adapters(model: Any) -> bool:
    """Whether PEFT put adapters into this model. A model without them does not need PEFT."""
    return any(module.__module__.startswith("peft.") for module in map(type, model.modules()))


def load_adapter(
    source: sources.Source, name: str, base: PreTrainedModel, base_source: sources.Source | None, any_base: bool
) -> tuple[PreTrainedModel, bool, str | None]:
    """Put an adapter into the base; return that, whether it is a full model of its own, and a note for the user."""
    config = read_adapter_config(source, name)
    check_readable(base, "base")
    if getattr(config, "use_dora", False):
        check_dora(base, name)
    note = None if any_base else check_base(config.base_model_name_or_path, source, name, base, base_source)
    changed = _changed_tensors(source.directory, base)
    reason = _why_full(config, changed)
    if reason is None:
        peft_model = _attach(source.directory, name, share(base), config)
        adapted = peft_model.get_base_model()
        adapted.peft_config = peft_model.peft_config
        vars(adapted)["_adapter_dtype"] = _stored_dtype(source.directory)
        vars(adapted)["_peft_model"] = peft_model  # not a submodule: only it knows all that PEFT saves
        return adapted.eval(), False, note
    own = copy.deepcopy(base)
    unpack_model(own)
    _fit_embeddings(own, changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about rounding, which the note says
        merged = _attach(source.directory, name, own, config).merge_and_unload()
    rounded = ", its weights quantised anew" if getattr(base, "is_quantized", False) else ""
    return merged.eval(), True, f"{name}: the adapter {reason}, so it was merged into a full model of its own{rounded}"


def adapt_loaded(peft_model: Any, name: str, base: PreTrainedModel) -> tuple[PreTrainedModel, bool, str | None]:
    """Do the same for a PeftModel in memory. Its own base must be this base."""
    adapter, note = _choose(peft_model, name)
    plain = without_adapters(peft_model.get_base_model(), name)
    theirs, ours = (cast(Tensor, model.get_input_embeddings().weight) for model in (plain, base))
    if theirs.shape != ours.shape or not torch.equal(theirs.to(ours), ours):
        raise MemberError(f"member {name!r}: the PeftModel was made on another base: its input embeddings differ")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about embeddings, which are looked at here
        peft_model.save_pretrained(folder, selected_adapters=[adapter])
        inside = Path(folder) / adapter
        source = sources.Source(inside if inside.is_dir() else Path(folder))
        adapted, is_full, why = load_adapter(source, name, base, None, any_base=True)
        return adapted, is_full, "; ".join(filter(None, (note, why))) or None


def _choose(peft_model: Any, name: str) -> tuple[str, str | None]:
    """Return which adapter of a PeftModel is meant: the one that has the expert's name, else the active one; and a
    note where there are others."""
    held, active = list(peft_model.peft_config), peft_model.active_adapters
    if name in held:
        return name, None
    if len(active) != 1:
        raise MemberError(
            f"member {name!r}: {len(active)} adapters of this PeftModel are active at once ({', '.join(active)}). "
            "Call set_adapter with one of them, or give each as an expert of its name"
        )
    if len(held) == 1:
        return active[0], None
    others = ", ".join(adapter for adapter in held if adapter != active[0])
    return active[0], f"{name}: of the PeftModel's adapters the active one was taken, {active[0]}; it also has {others}"


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter that `load_adapter` put in, as PEFT writes it."""
    peft_model: Any = vars(model)["_peft_model"]
    peft_model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    _store_as(vars(model)["_adapter_dtype"], sources.weight_files(folder)[0])
    config = copy.deepcopy(model.peft_config["default"])
    config.base_model_name_or_path = "../base"
    config.save_pretrained(str(folder))


def _stored_dtype(directory: Path) -> torch.dtype | None:
    """Read the dtype of an adapter's tensors on disk; None where they differ."""
    with safe_open(sources.weight_files(directory)[0], "pt") as file:
        found = {file.get_slice(key).get_dtype() for key in file.keys()}
    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}.get(*found) if len(found) == 1 else None


def _store_as(dtype: torch.dtype | None, file: Path) -> None:
    """Write a file's tensors in the dtype that they were loaded from, where that loses nothing."""
    tensors = load_file(file)
    if dtype is None or not all(torch.equal(tensor.to(dtype).to(tensor), tensor) for tensor in tensors.values()):
        return
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, file, metadata={"format": "pt"})


def _attach(directory: Path, name: str, model: PreTrainedModel, config: Any) -> Any:
    """Make a PeftModel of this very model, and check that every tensor of the file found its place and is finite."""
    from peft import PeftModel, get_peft_model_state_dict

    _check_rank(directory, name, config)
    names = set(model.state_dict())
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # missing keys are checked below, where they can be named
            same = _stored_dtype(directory) == model.dtype  # PEFT would make float32 of half precision, twice the size
            peft_model = PeftModel.from_pretrained(model, str(directory), autocast_adapter_dtype=not same)
    except (ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise _no_fit(name, directory, short(error)) from error
    except (TypeError, AttributeError, IndexError, ImportError, ArithmeticError) as error:
        raise not_peft(sources.Source(directory), name, f"PEFT cannot run it: {short(error)}") from error
    finally:
        for parameter, flag in learning:
            parameter.requires_grad_(flag)
    with safe_open(sources.weight_files(directory)[0], "pt") as file:
        stored = {key for key in file.keys() if _base_key(key) not in names}
    state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    odd = sorted(stored ^ {key for key in state if _base_key(key) not in names})
    if odd:
        raise _no_fit(name, directory, f"{len(odd)} tensors have no counterpart, first {odd[0]}")
    _check_finite(name, peft_model, state)
    return peft_model


def _check_rank(directory: Path, name: str, config: Any) -> None:
    """Refuse a rank that no tensor of the file has, before memory is allocated for it."""
    with safe_open(sources.weight_files(directory)[0], "pt") as file:
        largest = max((max(file.get_slice(key).get_shape(), default=0) for key in file.keys()), default=0)
    if (rank := largest_rank(config)) > largest:
        raise _no_fit(name, directory, f"its config has the rank {rank:,}, and no tensor of its file is that large")


def _check_finite(name: str, peft_model: Any, state: dict[str, Tensor]) -> None:
    """Refuse tensors that are not finite, and deltas that a scale makes larger than any product can hold."""
    for key, tensor in state.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise MemberError(f"member {name!r} computes NaN: its weights are damaged, {key} is not finite")
    for path, module in peft_model.named_modules():
        scales = getattr(module, "scaling", None)
        if not isinstance(scales, dict) or "default" not in scales:
            continue
        factors = [
            float(part.abs().amax())
            for key, part in module.named_parameters()
            if key.startswith("lora_") and ".default" in key and part.numel()
        ]
        if not math.prod(factors, start=abs(float(scales["default"]))) <= LARGEST_DELTA:
            raise MemberError(
                f"member {name!r} computes NaN: {path} scales its delta by {float(scales['default']):g}, which "
                "overflows. Check lora_alpha and alpha_pattern in its adapter_config.json"
            )


def _no_fit(name: str, directory: Path, reason: str) -> MemberError:
    named = read_adapter_config(sources.Source(directory), name).base_model_name_or_path
    return MemberError(
        f"member {name!r}: the adapter in {directory} does not fit this base: {reason}. Expected an adapter trained on "
        "the composition's base" + (f"; this one says that it was trained on {named!r}" if named else "")
    )


def _base_key(key: str) -> str:
    """Name the base's tensor that a tensor of an adapter's file belongs to."""
    return key.removeprefix(PREFIX).replace(".base_layer.", ".")


def _changed_tensors(directory: Path, base: PreTrainedModel) -> dict[str, Tensor]:
    """Read the adapter's own versions of tensors of the base, by their names in the base."""
    ours = base.state_dict()
    changed = {}
    with safe_open(sources.weight_files(directory)[0], "pt") as file:
        for key in file.keys():
            name = _base_key(key)
            if name in ours:
                theirs = file.get_tensor(key)
                if theirs.shape != ours[name].shape or not torch.equal(theirs.to(ours[name]), ours[name]):
                    changed[name] = theirs
    return changed


def _why_full(config: Any, changed: dict[str, Tensor]) -> str | None:
    """Say why an adapter cannot share the base's tensors; None if it can."""
    start = getattr(config, "init_lora_weights", True)
    if start not in PLAIN_STARTS:
        return f"changes the weights under it (init_lora_weights: {start})"
    if getattr(config, "modules_to_save", None):
        return f"carries whole modules (modules_to_save: {', '.join(sorted(config.modules_to_save))})"
    return f"carries tensors of the base in its own version (first {min(changed)})" if changed else None


def _fit_embeddings(model: PreTrainedModel, changed: dict[str, Tensor]) -> None:
    """Give the model as many token rows as the adapter's embeddings have."""
    embeddings = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in embeddings and name in changed and len(changed[name]) != len(parameter):
            model.resize_token_embeddings(len(changed[name]), mean_resizing=False)
            return
