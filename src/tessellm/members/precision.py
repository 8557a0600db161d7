"""In which precision members run where nobody says: as they are stored, but in float32 on a CPU without fast bfloat16.

Such a CPU emulates half precision, slower than float32 and rounded. Knows models, no files.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

FAST = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")  # instructions for products of bfloat16, as torch calls them


@cache
def fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 by instructions of its own."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in FAST)


def widen(model: Any) -> str | None:
    """Make a model float32 that is in half precision on a CPU without fast bfloat16; say so, or None. Quantized and
    offloaded models stay as they are."""
    places = {str(place) for place in getattr(model, "hf_device_map", {"": "cpu"}).values()}
    if model.device.type != "cpu" or places != {"cpu"} or getattr(model, "is_quantized", False):
        return None
    stored = model.dtype
    if stored.itemsize != 2 or fast_bfloat16():
        return None
    model.float()
    model.config.dtype = torch.float32
    name = str(stored).removeprefix("torch.")
    return f"stored in {name}, runs in float32: this processor has no fast bfloat16 (dtype {name} keeps it)"
