"""In which precision members run where nobody says.

    weights as stored    but in float32 on a CPU without fast bfloat16: it emulates half precision, slowly and rounded
    a GGUF file          on a CPU in the bits that it has (packed.py), where packed products are faster there

The second is measured once per machine and remembered: what a text is must not depend on what else a machine does.
Knows models, no files but its own.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files import write_text
from .packed import PackedLinear

FAST = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")  # instructions for products of bfloat16, as torch calls them
MEASURED, TURNS, GAIN = 2048, 15, 1.2  # width of the layer, turns, and how much faster a packed product has to be


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


@cache
def packs_pay(precision: str) -> bool:
    """Whether a product of one row is faster packed than in float32 and bfloat16 on this machine."""
    if not fast_bfloat16():  # which prefill needs
        return False
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessellm" / "packs.json"
    name = torch.cpu.get_capabilities().get("cpu_name", platform.machine())
    key = f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {precision}"
    known: dict[str, float] = {}
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(place.read_text()))
    if not isinstance(known.get(key), float):
        known[key] = _gain(precision)
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, json.dumps(known, indent=2))
    return known[key] > GAIN


@torch.inference_mode()
def _gain(precision: str) -> float:
    """Return the time of a product of one row in the faster of float32 and bfloat16 over its packed one: in turns."""
    with torch.random.fork_rng(devices=()):
        plain = nn.Linear(MEASURED, MEASURED, bias=False)
        half = nn.Linear(MEASURED, MEASURED, bias=False, dtype=torch.bfloat16)
    x_1I = torch.ones(1, MEASURED)
    runs = [(plain, x_1I), (half, x_1I.bfloat16()), (PackedLinear(plain, precision), x_1I.bfloat16())]
    seconds: list[list[float]] = [[], [], []]
    for _ in range(TURNS):
        for (layer, input_1I), found in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            layer(input_1I)
            found.append(time.perf_counter() - start)
    wide, narrow, packed = map(statistics.median, seconds)
    return min(wide, narrow) / packed
