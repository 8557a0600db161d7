"""The router inside vLLM: read from the composition's folder, and told what the base's layers are given.

vLLM keeps layers of one input as one (q, k and v; gate and up), under another name; a router's paths lead there. The
base's rows come first where its adapters are rows of its batch, and a layer that is cut over devices by its inputs has
them gathered. Layers must run as Python, so a composition with a router needs `enforce_eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from ..errors import MemberError
from ..members.sources import Source, weight_files
from ..routing import Router
from ..routing.stored import read_router
from .lora import place
from .members import InnerMember


def stored_router(file: Path, base: Source, config: PreTrainedConfig, tokenizer: Any) -> Router:
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
    """Collects the energies of every forward pass of the base."""

    def __init__(self, router: Router, base: InnerMember):
        self._base, self._wanted, self._heard = base, set[str](), set[str]()
        self._open = ExitStack()  # as long as the model lives
        self._tap = self._open.enter_context(router.tap(cast(Any, self)))
        self.experts = self._tap.take().shape[-1]

    def get_submodule(self, path: str) -> _TappedLayer:
        """The layer that transformers has at that path."""
        model = self._base.model
        layer = dict(model.named_modules()).get(place(model, path)[0])
        if not isinstance(layer, LinearBase):
            raise MemberError(
                f"the router reads what {path} of the base is given, and vLLM's {type(model).__name__} has no such "
                "layer. Leave out --engine vllm, or compose with rule: product"
            )
        self._wanted.add(path)
        return _TappedLayer(layer, len(self._base.names), lambda: self._heard.add(path))

    def take(self) -> Tensor:
        """The energies of the last forward pass, [T, K]."""
        if missing := sorted(self._wanted - self._heard):
            raise MemberError(
                f"the router reads what {missing[0]} of the base is given, and vLLM did not run that layer as Python. "
                "Leave out --engine vllm, or compose with rule: product"
            )
        self._heard.clear()
        return self._tap.take()[0]


class _TappedLayer:
    """A layer whose hooks are given what transformers would give it."""

    def __init__(self, layer: LinearBase, members: int, heard: Callable[[], None]):
        self.layer, self.members, self.heard = layer, members, heard

    def register_forward_pre_hook(self, hook: Any, *, with_kwargs: bool) -> Any:
        def read(module: nn.Module, arguments: tuple, keywords: dict) -> None:
            x = arguments[0] if arguments else next(iter(keywords.values()))
            if isinstance(module, RowParallelLinear) and module.input_is_parallel and module.tp_size > 1:
                x = tensor_model_parallel_all_gather(x)
            hook(module, (x.chunk(self.members)[0],), {})
            self.heard()

        return self.layer.register_forward_pre_hook(read, with_kwargs=with_kwargs)
