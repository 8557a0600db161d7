"""Was an adapter trained on this base? By the weights where both are folders here, else by what the two are called."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import LONGEST_QUOTED, MemberError, quoted
from . import sources

GGUF_OF = re.compile(r"[.-](i?q\d\w*|b?f\d+)\.gguf$|\.gguf$")  # what a GGUF file's name adds to its model's
COPIES = {  # words of a name that say how a copy is stored or who uploaded it, not which model it is
    *("unsloth", "meta", "hf", "mlx", "gguf", "bnb", "nf4", "gptq", "awq", "quantized", "dynamic", "4bit", "8bit"),
    *("int4", "int8", "fp8", "fp16", "bf16", "f16", "w4a16", "w8a8", "w8a16"),
}


def check_base(
    trained_on: str | None,
    source: sources.Source,
    name: str,
    base: PreTrainedModel,
    base_source: sources.Source | None,
) -> str | None:
    """Refuse an adapter that was surely trained on another base; return a note where that is not certain."""
    ours = base_source.name if base_source else base.name_or_path
    if not isinstance(trained_on, str) or not trained_on or not ours or trained_on == ours:
        return None
    theirs = Path(source.directory / trained_on if trained_on.startswith(".") else trained_on).expanduser()
    folder = base_source.path if base_source else Path(ours)
    if sources.exists(theirs) and theirs.resolve() == folder.resolve():
        return None
    if sources.exists(theirs) and theirs.is_dir() and folder.is_dir():
        if _same_weights(theirs, folder):
            return None
    elif _same_name(trained_on, ours):
        return None
    elif model_words(trained_on) == model_words(ours):
        return f"{name}: the adapter was trained on {trained_on}, by its name a copy of {ours}; its shapes fit"
    elif not (_is_hub_id(trained_on) and _is_hub_id(ours)):
        shown = trained_on if len(trained_on) <= LONGEST_QUOTED else quoted(trained_on)
        return f"{name}: the adapter says it was trained on {shown}; whether that is this base cannot be told"
    raise MemberError(
        f"member {name!r}: the adapter was trained on {trained_on}, but the composition's base is {ours}. "
        "Use that base, or set any_base: true on this expert if the two hold the same weights"
    )


def _last_name(name: str) -> str:
    """Return a model's name without its owner or folder, and without what a GGUF file adds."""
    return GGUF_OF.sub("", Path(name).name.lower())


def _same_name(trained_on: str, ours: str) -> bool:
    """google/gemma-2-2b and a folder gemma-2-2b, or a file gemma-2-2b.Q4_1.gguf or gemma-2-2b-f16.gguf made of it."""
    return _last_name(ours) in (wanted := Path(trained_on).name.lower(), _last_name(wanted))


def model_words(name: str) -> frozenset[str]:
    """Return the words that say which model it is: unsloth/Meta-Llama-3.1-8B-bnb-4bit is meta-llama/Llama-3.1-8B."""
    return frozenset(re.split(r"[-_ ]", _last_name(name))) - COPIES


def _same_weights(left: Path, right: Path) -> bool:
    return sources.digest(sources.weight_files(left.resolve())) == sources.digest(sources.weight_files(right.resolve()))


def _is_hub_id(name: str) -> bool:
    return sources.HUB_ID.match(name) is not None and not sources.exists(Path(name))
