"""GGUF files, llama.cpp's format: weights, config and tokenizer in one file, made a plain model by transformers.

Weights are dequantised when they are loaded: what comes out is a model like any other. Knows nothing of where a file
came from. The package `gguf`, which the extra of that name brings, reads the file.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers import modeling_gguf_pytorch_utils as conversion

from ..errors import MemberError, require
from .packed import PACKED

MAGIC = b"GGUF"
DAMAGED = (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError)  # what the reader raises
IN_PACKS = {"Q4_0": "int4", "Q4_1": "int4"}  # packs that hold what a type does, up to the rounding of scales
PLAIN = ("F32", "F16", "BF16", "F64")  # types of tensors that are no quantisation


@contextmanager
def read_once() -> Iterator[None]:
    """Parse each file once in here, quickly, and build the table of tensor names once per architecture.

    transformers parses a file anew for its config, its tokenizer and its weights, and builds the table anew for every
    module: for a model of 135 million parameters that is most of the time that loading takes.
    """
    gguf = require("gguf", "gguf")
    if hasattr(gguf.GGUFReader, "cache_info"):  # inside another
        yield
        return
    reader, names = functools.cache(_quick_reader(gguf.GGUFReader)), functools.cache(gguf.get_tensor_name_map)
    with _replaced(gguf, GGUFReader=reader, get_tensor_name_map=names), _replaced(conversion, tqdm=_no_bar):
        yield


@contextmanager
def _replaced(module: Any, **changes: Any) -> Iterator[None]:
    """Give attributes of a module other values for a while."""
    before = {name: getattr(module, name) for name in changes}
    vars(module).update(changes)
    try:
        yield
    finally:
        vars(module).update(before)


def _quick_reader(reader: Any) -> Any:
    class QuickReader(reader):
        """Reads fields through a plain array: numpy makes slices of a memory map several times slower."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    return QuickReader


def _no_bar(tensors: Iterable[Any], **_: Any) -> Iterable[Any]:
    return tensors


def check(file: Path, owner: str) -> None:
    """Refuse a file that is no GGUF file, is cut off, or is one part of several."""
    with file.open("rb") as stream:
        if stream.read(4) != MAGIC:
            raise MemberError(f"{owner}: {file} is not a GGUF file: it does not begin with the letters GGUF")
    with read_once():
        reader = _parse(file, owner)
    field = reader.get_field("split.count")
    parts = int(field.parts[-1][0]) if field is not None else 1
    if parts > 1:
        raise MemberError(
            f"{owner}: {file} is one of {parts} parts of a model, and transformers reads whole files. Join them first: "
            "llama-gguf-split --merge FIRST_PART JOINED.gguf"
        )


def _parse(file: Path, owner: str) -> Any:
    gguf = require("gguf", "gguf")
    try:
        return gguf.GGUFReader(str(file))
    except DAMAGED as error:
        raise MemberError(f"{owner}: {file} is cut off or damaged. Copy or download it again") from error


def load_model(file: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model with plain weights; return it and transformers' report of missing tensors."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(file.parent, gguf_file=file.name, output_loading_info=True, **_dequantised(), **options)
    forget(model)
    return model, report


def is_dequantised(model: Any) -> bool:
    """Whether a loaded model came from such a file and has plain weights."""
    return getattr(model, "quantization_method", None) == "gguf" and all(
        p.is_floating_point() for p in model.parameters()
    )


def forget(model: Any) -> None:
    """Let a model with plain weights no longer say that they are quantised: it would not be saved."""
    for configured in (model.config, model.config.get_text_config(decoder=True)):
        vars(configured).pop("quantization_config", None)
    for left in ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit"):
        vars(model).pop(left, None)


def _dequantised() -> dict[str, Any]:
    """Ask for plain weights, where transformers would keep an architecture's in blocks."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": kind(dequantize=True)} if kind is not None else {}


def load_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Load the file's tokenizer. One without a padding token pads with its end token, which attention masks hide."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    tokenizer.init_kwargs.pop("gguf_file", None)
    return tokenizer


def load_config(file: Path) -> Any:
    """Read the config of the model in the file."""
    with read_once():
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


def count_parameters(file: Path) -> int:
    """Count the numbers in the file's tensors."""
    with read_once():
        return sum(int(tensor.n_elements) for tensor in _parse(file, "the member").tensors)


def bits_of(file: Path) -> str | None:
    """Return the packed precision that holds most of the file's weights as they are."""
    counts: Counter[str] = Counter()
    for tensor in _parse(file, "the member").tensors:
        counts[IN_PACKS.get(tensor.tensor_type.name, "")] += int(tensor.n_elements)
    return counts.most_common(1)[0][0] or None


def describe_loaded(file: Path, name: str, dtype: str) -> str:
    """Say what became of the file's weights, for the user."""
    kinds = Counter(tensor.tensor_type.name for tensor in _parse(file, f"member {name!r}").tensors)
    quantised = [kind for kind, _ in kinds.most_common() if kind not in PLAIN]
    if not quantised:
        return f"{name}: {file.name} was loaded into plain {dtype} modules"
    became = f"packed in {dtype}" if dtype in PACKED else f"dequantised into plain {dtype} modules"
    return f"{name}: {file.name} holds quantised weights ({', '.join(quantised)}), {became}"
