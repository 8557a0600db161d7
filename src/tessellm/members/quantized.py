"""4- and 8-bit members: bitsandbytes and torchao do the work; they come with the extra `quantized`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import MemberError, require

QUANTIZATIONS = ("bnb-4bit", "bnb-8bit", "torchao-int8", "torchao-int4")


def quantization_config(kind: str | None) -> Any:
    """Make the config by which transformers quantizes a model while loading it."""
    if kind is None:
        return None
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind.startswith("bnb"):
        require("bitsandbytes", "quantized")
        return BitsAndBytesConfig(load_in_4bit=kind == "bnb-4bit", load_in_8bit=kind == "bnb-8bit")
    ao: Any = require("torchao.quantization", "quantized")
    if kind == "torchao-int8":
        return TorchAoConfig(ao.Int8WeightOnlyConfig())
    if not torch.cuda.is_available():
        raise MemberError("torchao-int4 needs a CUDA device, and there is none. On a CPU, use bnb-4bit")
    return TorchAoConfig(ao.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"))


def shared_state(model: nn.Module) -> list[Any]:
    """Return what bitsandbytes' 8-bit layers keep beside their parameters; copies of a layer have to share it."""
    states = [getattr(module, "state", None) for module in model.modules()]
    return [state for state in states if type(state).__name__ == "MatmulLtState"]


def check_dora(base: nn.Module, name: str) -> None:
    """Refuse DoRA on 8-bit weights of bitsandbytes': PEFT loses their scales in the first pass (as of 0.21.2)."""
    if any(type(parameter).__name__ == "Int8Params" for parameter in base.parameters()):
        raise MemberError(
            f"member {name!r} is a DoRA adapter, which PEFT cannot run on weights in 8 bits more than once. Quantize "
            "the base with bnb-4bit, or load it whole"
        )


def check_readable(model: nn.Module, name: str) -> None:
    """Refuse 4-bit weights that ran on a CPU with AVX-512: bitsandbytes packs them anew when they first run, and
    damages them when they are read back (as of 0.50.2)."""
    for parameter in model.parameters():
        if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False):
            raise MemberError(
                f"member {name!r} holds 4-bit weights that have run on the CPU, and bitsandbytes cannot read these "
                "back. Compose or save before it runs, or save linked"
            )
