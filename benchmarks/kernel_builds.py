"""What Triton's compiler makes of every launch of a fused pass for an H200, in the shapes of google/gemma-2-2b: shared
memory, registers, spills. Needs Triton but no GPU, so kernels that do not build are found before one is at hand.

    python benchmarks/kernel_builds.py full bfloat16 1x1 4x9      # three members: sequences × new tokens of each
    python benchmarks/kernel_builds.py lora float32 1x1 1x5       # a base and three LoRA experts
    python benchmarks/kernel_builds.py lora bfloat16 prompt:1x128 # a prompt of 128 tokens
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from transformers import AutoModelForCausalLM, Gemma2Config
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from random_models import with_deltas
from tessellm.engine.cuda.fused import decoder, layers, library, prompts
from tessellm.engine.members.attention import SlotCache

KERNELS = (
    "attention_kernel", "combine_kernel", "embed_kernel", "residual_kernel", "linear_kernel", "thin_kernel",
    "place_kernel", "prompt_attention_kernel", "gate_kernel", "add_deltas_kernel",
)  # fmt: skip
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
SHOWN = ("BLOCK_R", "BLOCK_Q", "BLOCK_C", "ROW_BLOCKS", "SPLITS", "GLU", "MEMBERS", "TOKENS", "QUERIES", "WINDOW")
SHARED_LIMIT = 227 * 1024  # bytes of a program on an H200
CELLS = 1024
ALIGNED = [["tt.divisibility", 16]]


class Builder:
    """In the place of a kernel: builds each of its launches once instead of running it."""

    def __init__(self, kernel: Any):
        self.kernel, self.built = kernel, set[str]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            options = {key: named.pop(key) for key in ("num_warps", "num_stages", "launch_pdl") if key in named}
            values = {**dict(zip(self.kernel.arg_names, given, strict=False)), **named}
            signature, constants, attributes = self._types(values)
            if (key := f"{signature} {constants} {attributes} {options}") not in self.built:
                self.built.add(key)
                source = ASTSource(self.kernel, signature, constants, attributes)
                print(
                    self._line(triton.compile(source, GPUTarget("cuda", 90, 32), options), constants, grid), flush=True
                )

        return launch

    def _types(self, values: dict[str, Any]) -> tuple[dict, dict, dict]:
        """As a launch on a GPU would see its arguments: which are constants, and which multiples of 16."""
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if isinstance(value, torch.Tensor):
                signature[parameter.name], attributes[(place,)] = POINTERS[value.dtype], ALIGNED
            elif parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0:
                    attributes[(place,)] = ALIGNED
        return signature, constants, attributes

    def _line(self, built: Any, constants: dict[str, Any], grid: tuple[int, ...]) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(built.asm["ptx"])
            file.flush()
            assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
            command = [assembler, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        registers, spilled = (re.search(pattern, said) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
        sizes = ", ".join(f"{key} {constants[key]}" for key in SHOWN if key in constants)
        shared = built.metadata.shared
        text = f"{self.kernel.__name__} {grid} [{sizes}]: {shared / 1024:.0f} KiB shared, {registers and registers[1]} "
        text += f"registers, {spilled and spilled[1]} bytes spilled"
        return text + (" TOO MUCH SHARED MEMORY" if shared > SHARED_LIMIT else "")


def members(kind: str, dtype: torch.dtype) -> list[Any]:
    """One layer of each, and a small vocabulary: neither changes a kernel."""
    config = Gemma2Config(num_hidden_layers=1, vocab_size=4096, layer_types=["sliding_attention"])
    base = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if kind == "lora":
        return [base, *(with_deltas(base) for _ in range(3))]
    return [base, copy.deepcopy(base), copy.deepcopy(base)]


@torch.no_grad()
def main() -> None:
    kind, dtype, *passes = sys.argv[1:]
    shapes = [tuple(map(int, each.removeprefix("prompt:").split("x"))) for each in passes]
    for module in (decoder, layers, library, prompts):
        module.overlapping = lambda device, early=True: {"OVERLAP": True}  # type: ignore[assignment]
        for name in KERNELS:
            if hasattr(module, name):
                setattr(module, name, Builder(getattr(module, name)))
    own = members(kind, getattr(torch, dtype))
    cache = SlotCache(max(slots for slots, _ in shapes), len(own), CELLS)
    rows, size = cache.slots * cache.members, own[0].config
    cells = torch.zeros(rows, size.num_key_value_heads, CELLS + 1, size.head_dim, dtype=own[0].dtype)
    cache.key_RHCD, cache.value_RHCD = {0: cells}, {0: cells}
    fused = decoder.fuse(own, cache)
    assert fused is not None
    for each, (slots, tokens) in zip(passes, shapes, strict=True):
        print(f"{slots} sequences, {tokens} tokens of each", flush=True)
        token_MBT = torch.zeros(len(own), slots, tokens, dtype=torch.long)
        if each.startswith("prompt:"):
            fused.read(token_MBT, token_MBT[0], token_MBT[0, :, 0], min(tokens, 129))
            continue
        assert fused.takes(slots, tokens), "the modules take this one"
        fused(token_MBT, token_MBT[0], 256)


if __name__ == "__main__":
    main()
