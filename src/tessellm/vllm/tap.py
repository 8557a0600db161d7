"""The router's energies inside vLLM: what the base's layers are given, read where vLLM applies their weights.

vLLM keeps layers of one input as one (q, k and v; gate and up), under another name; a router's paths lead there. All
layers add to one tensor that never moves, by an operation that compiled graphs keep and CUDA graphs replay. Layers that
adapters wrap are read as well: the wrapper applies the same weights to the same input.

Shapes: T tokens, K experts of the router.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..errors import MemberError
from ..members.sources import Source, weight_files
from ..routing.energy import StackedDirections
from ..routing.router import DeltaRouter
from ..routing.stored import read_router
from .lora import place
from .versions import LinearBase, LinearMethodBase, RowParallelLinear, tensor_model_parallel_all_gather

BUFFER = "tessellm_energy_TK"
_readers: dict[str, InputReader] = {}  # by their name in the operation


def _read_input(x: Tensor, energy_TK: Tensor, reader: str) -> None:
    _readers[reader](x, energy_TK)


_library = torch.library.Library("tessellm", "FRAGMENT")
_library.define("read_input(Tensor x, Tensor(a!) energy_TK, str reader) -> ()")
_library.impl("read_input", _read_input, "CompositeExplicitAutograd")
torch.library.register_fake("tessellm::read_input", lambda x, energy_TK, reader: None, lib=_library)


def stored_router(file: Path, base: Source, config: PreTrainedConfig, tokenizer: Any) -> DeltaRouter:
    """Read a composition's router; the base's token vectors stay in their file until they are looked at."""
    weight = SimpleNamespace(weight=token_vectors(base, config))
    return read_router(file, SimpleNamespace(get_input_embeddings=lambda: weight), tokenizer)


def token_vectors(base: Source, config: PreTrainedConfig) -> Tensor:
    """Return the base's token vectors, [V, D], mapped from the file that holds them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    table = model.get_input_embeddings().weight
    name = next(name for name, parameter in model.named_parameters() if parameter is table)
    for path in weight_files(base.directory):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                if name == key or name.endswith(f".{key}"):  # some checkpoints leave out the outermost name
                    return cast(Tensor, file.get_tensor(key))
    raise MemberError(f"member 'base': {base.directory} holds no tensor {name}, which the router needs")


class Tap:
    """Collects the energies of a forward pass of the base while `wanted`: `reset` before it, `take` after it."""

    def __init__(self, router: DeltaRouter):
        self.router, self.wanted = router, True
        self.experts = len(router.experts)
        self.unread: set[str] = set()  # layers that have not run yet
        self.energy_TK = torch.tensor([])

    def attach(self, model: Any, tokens: int, device: torch.device, rows: int = 1) -> None:
        """Read the layers of a loaded base in every later forward of up to `tokens` tokens. `rows`: how many members
        share its batch; the base's tokens come first."""
        modules = dict(model.named_modules())
        self.energy_TK = torch.zeros(tokens, self.experts, device=device)
        for path, stacked in self.router.stacked.items():
            found = modules.get(place(model, path)[0])
            layer: Any = getattr(found, "base_layer", found)  # of an adapter's wrapper
            if not isinstance(layer, LinearBase):
                raise MemberError(
                    f"the router reads what {path} of the base is given, and vLLM's {type(model).__name__} has no such "
                    "layer. Leave out --engine vllm, or compose with rule: product"
                )
            self.unread.add(path)
            layer.register_buffer(BUFFER, self.energy_TK, persistent=False)
            layer.quant_method = TappedLinear(layer.quant_method, path)
            sharded = isinstance(layer, RowParallelLinear) and layer.input_is_parallel and layer.tp_size > 1
            _readers[path] = InputReader(self, path, stacked, rows, sharded)

    def reset(self) -> None:
        self.energy_TK.zero_()

    def take(self, tokens: int) -> Tensor:
        """Return the energies of the forward pass, [T, K], on the CPU."""
        if self.unread:
            raise MemberError(
                f"the router reads what {min(self.unread)} of the base is given, and vLLM did not run that layer. "
                "Leave out --engine vllm, or compose with rule: product"
            )
        return self.energy_TK[:tokens].cpu().clone()


class InputReader:
    """Adds the energies of one layer's input."""

    def __init__(self, tap: Tap, path: str, stacked: StackedDirections, rows: int, sharded: bool):
        self.tap, self.path, self.stacked, self.rows, self.sharded = tap, path, stacked, rows, sharded

    def __call__(self, x: Tensor, energy_TK: Tensor) -> None:
        if not self.tap.wanted:
            return
        self.tap.unread.discard(self.path)
        x = x.flatten(0, -2).chunk(self.rows)[0]
        if self.sharded:
            x = tensor_model_parallel_all_gather(x)
        if self.stacked.rows_RI.dtype != x.dtype or self.stacked.rows_RI.device != x.device:
            self.stacked = self.stacked.to(x)
        energy_TK[: len(x)] += self.stacked.energies(x)


class TappedLinear(LinearMethodBase):
    """A layer's own way to apply its weights, after its input was read."""

    def __init__(self, inner: Any, reader: str):
        self.inner, self.reader = inner, reader

    def create_weights(self, *arguments: Any, **options: Any) -> None:
        self.inner.create_weights(*arguments, **options)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.inner.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        torch.ops.tessellm.read_input(x, getattr(layer, BUFFER), self.reader)
        out: Tensor = self.inner.apply(layer, x, bias)
        return out
