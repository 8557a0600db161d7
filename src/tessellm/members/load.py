"""One member becomes a loaded causal language model with its tokenizer and end tokens, from wherever it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import MemberError
from . import adapters, gguf_files, sources
from .packed import PACKED, is_packed, pack_model
from .precision import packs_pay, widen
from .quantized import quantization_config
from .sources import Source
from .spec import Loading, Member, MemberSpec, dtype_of

UNLOADABLE = (  # what transformers raises when a folder's files are not what they should be
    *(AssertionError, AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError),
    SafetensorError,
)


def load_member(name: str, spec: MemberSpec, base: Member | None, loading: Loading) -> Member:
    """Load one member. `base` is None for the base itself, which has to come first."""
    try:
        member = _load_member(name, spec, base, loading)
    except torch.OutOfMemoryError as error:
        raise MemberError(
            f"member {name!r} does not fit into the device's memory. Load it in a smaller dtype or quantized, put "
            f"members on several devices (device_map), or use adapters. ({str(error).splitlines()[0]})"
        ) from error
    _check_weights(member)
    return member


def _check_weights(member: Member) -> None:
    """Refuse parameters on "meta", which hold no numbers, unless they are offloaded and come when needed."""
    places = {str(place) for place in getattr(member.model, "hf_device_map", {}).values()}
    if not places & {"cpu", "disk"} and any(parameter.is_meta for parameter in member.model.parameters()):
        raise MemberError(f"member {member.name!r} is on the device 'meta', without weights. Load it on a real device")


def _load_member(name: str, spec: MemberSpec, base: Member | None, loading: Loading) -> Member:
    if isinstance(spec.source, nn.Module):
        return _take_loaded(name, spec, spec.source, base)
    source = sources.find(spec.source, f"member {name!r}", spec.revision, **loading.download_options())
    if source.file is not None:
        return _load_gguf(name, spec, source, loading)
    sources.check_files(source.directory, f"member {name!r}")
    if not source.is_adapter:
        model = _load_full(name, spec, source, loading)
        tokenizer = load_tokenizer(source.directory, loading)
        return _by_default(Member(name, model, spec, source, tokenizer=tokenizer), loading)
    if base is None:
        raise MemberError(
            f"the base cannot be an adapter: {source.directory} holds adapter_config.json. "
            "Give the model that it adapts"
        )
    _check_same_as_base(name, spec, base)
    model, is_full, note = adapters.load_adapter(source, name, base.model, base.source, spec.any_base)
    tokenizer = load_tokenizer(source.directory, loading) or base.tokenizer
    return Member(name, model, spec, source, not is_full, tokenizer, (note,) if note else ())


def _check_same_as_base(name: str, spec: MemberSpec, base: Member) -> None:
    """Refuse settings of an adapter that are not its base's, inside which it runs."""
    if spec.dtype not in (None, "auto") and dtype_of(spec.dtype) != base.model.dtype:
        raise MemberError(
            f"member {name!r} is an adapter and runs in its base's dtype, {base.model.dtype}; it cannot have the "
            f"dtype {spec.dtype}. Set the base's, or leave it out"
        )
    if spec.quantization is not None:
        raise MemberError(f"member {name!r} is an adapter; quantize the base that it runs in, and it will share that")
    if spec.device is not None and spec.device != base.spec.device:
        raise MemberError(
            f"member {name!r} is an adapter and runs where its base is ({base.spec.device or base.model.device}); it "
            f"cannot be put on {spec.device}"
        )


def _take_loaded(name: str, spec: MemberSpec, model: Any, base: Member | None) -> Member:
    """Make a member of a model in memory. The composition gets modules of its own around the same tensors."""
    given = [key for key in ("revision", "dtype", "quantization") if getattr(spec, key) is not None]
    if given:
        raise MemberError(f"member {name!r} is a loaded model; {given[0]} cannot be set any more. Leave it out")
    is_peft_model = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    if is_peft_model and base is not None:
        adapted, is_full, note = adapters.adapt_loaded(model, name, base.model)
        return Member(name, adapted, spec, None, not is_full, base.tokenizer, (note,) if note else ())
    if is_peft_model:
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise MemberError(f"member {name!r}: expected a causal language model; got {type(model).__name__}")
    if base is not None and adapters.has_adapters(model):
        raise MemberError(f"member {name!r}: an adapter is inside this model. Give the PeftModel, or its folder")
    own = adapters.without_adapters(model, name)
    if gguf_files.is_dequantised(own):
        gguf_files.forget(own)
    return Member(name, own, spec, None)


def _load_gguf(name: str, spec: MemberSpec, source: Source, loading: Loading) -> Member:
    if spec.quantization is not None or loading.quantization_config is not None:
        raise MemberError(
            f"member {name!r} is a GGUF file, whose weights are dequantised when loaded; it cannot be quantized anew. "
            "Leave quantization out, or give a folder of safetensors"
        )
    with gguf_files.read_once():
        gguf_files.check(source.path, f"member {name!r}")
        with _telling(name, source):
            model, report = gguf_files.load_model(source.path, _options(spec, loading))
            tokenizer = gguf_files.load_tokenizer(source.path)
        _pack(model, name, spec, loading, source)
        dtype = is_packed(model) or str(model.dtype).removeprefix("torch.")
        note = gguf_files.describe_loaded(source.path, name, dtype)
    model = _complete(name, model, report, source)
    return _by_default(Member(name, model, spec, source, tokenizer=tokenizer, notes=(note,)), loading)


def _by_default(member: Member, loading: Loading) -> Member:
    """Choose the precision where nobody did."""
    if (member.spec.dtype or loading.dtype) not in (None, "auto"):
        return member
    note = widen(member.model)
    notes = member.notes + ((f"{member.name}: {note}",) if note else ())
    return replace(member, notes=notes, default_dtype=True)


def _load_full(name: str, spec: MemberSpec, source: Source, loading: Loading) -> PreTrainedModel:
    quantization = quantization_config(spec.quantization) or loading.quantization_config
    load: Any = AutoModelForCausalLM.from_pretrained
    with _telling(name, source):
        model, report = load(
            source.directory,
            use_safetensors=True,
            trust_remote_code=loading.trust_remote_code,
            output_loading_info=True,
            **_options(spec, loading),
            **({} if quantization is None else {"quantization_config": quantization}),
        )
    model = _complete(name, model, report, source)
    _pack(model, name, spec, loading)
    return model


def _pack(model: Any, name: str, spec: MemberSpec, loading: Loading, source: Source | None = None) -> None:
    """Pack a member's weights where its dtype says so; by default those of a file that has so few bits, where a CPU
    multiplies faster by packs."""
    dtype = spec.dtype or loading.dtype
    if dtype in (None, "auto") and source is not None and model.device.type == "cpu":
        bits = gguf_files.bits_of(source.path)
        dtype = bits if bits is not None and packs_pay(bits) else None
    if dtype not in PACKED:
        return
    if spec.quantization is not None or loading.quantization_config is not None:
        raise MemberError(f"member {name!r}: give either the dtype {dtype} or a quantization")
    pack_model(model, dtype, name)


def _options(spec: MemberSpec, loading: Loading) -> dict[str, Any]:
    dtype = spec.dtype or loading.dtype
    options = {
        "dtype": torch.float32 if dtype in PACKED else dtype,
        "device_map": spec.device,
        "attn_implementation": loading.attn_implementation,
    }
    return {key: value for key, value in options.items() if value is not None}


@contextmanager
def _telling(name: str, source: Source) -> Iterator[None]:
    """Turn transformers' errors into one message that names the member."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except UNLOADABLE as error:
        raise MemberError(f"member {name!r}: {source.path} cannot be loaded: {_in_one_line(error)}") from error


def _complete(name: str, model: Any, report: Any, source: Source) -> PreTrainedModel:
    """Check that every tensor of the model was in the files; return it, ready to run."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise MemberError(
            f"member {name!r}: {source.path} lacks {len(missing)} tensors of a {type(model).__name__}, "
            f"first {missing[0]}"
        )
    return model.eval()


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:400] + "…"


def load_config(source: Source) -> Any:
    """Read the config of a full member from its files."""
    return gguf_files.load_config(source.path) if source.file else AutoConfig.from_pretrained(source.directory)


def load_tokenizer(directory: Path, loading: Loading) -> PreTrainedTokenizerBase | None:
    """Load the folder's tokenizer; None where it has none."""
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
    )
    if not any((directory / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=loading.trust_remote_code)
    except UNLOADABLE as error:
        raise MemberError(f"the tokenizer in {directory} cannot be loaded: {_in_one_line(error)}") from error
