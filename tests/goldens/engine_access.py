"""Reach what is not public: the engine, text in and out, and the launches of the fused kernels.

The goldens import from inside the library here and nowhere else. When a folder or a function is renamed, change this
file; the recorded data stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from draft_distribution import draft_always
from random_models import with_deltas
from tessellm.engine.cuda import slot_executor
from tessellm.engine.engine import Engine
from tessellm.engine.members import groups
from tessellm.engine.sampling import Sampling, uniform
from tessellm.engine.speculation import Speculation
from tessellm.model.variants import alone
from tessellm.text.generate import generate_rows
from tessellm.text.options import TextOptions

from captured_steps import captured
from decoding_cases import stacking

__all__ = ["Launch", "Written", "alone", "fused_engine", "noise", "recorded", "with_deltas", "write", "write_texts"]
DRAFTED = 3  # tokens per draft, where there are drafts


class Written(NamedTuple):
    """What the engine wrote for one prompt."""

    tokens: list[int]  # the end token included
    logprobs: list[float]  # of the tokens, under the composition, at temperature 1
    finish: str


def write(
    model: Any,
    prompts: Sequence[Sequence[int]],
    asked: Sequence[Mapping[str, Any]],
    slots: int,
    chunk: int | None = None,
    lookup: bool = False,
    cancel: tuple[int, int] | None = None,
) -> list[Written]:
    """Run prompts through an engine; `asked` holds the sampling parameters of each. `chunk`: tokens per prefill chunk;
    `lookup`: draft from the text itself; `cancel`: a request, and after how many of its tokens."""
    engine = Engine(model, slots=slots, speculation=Speculation("lookup") if lookup else None)
    return _written(draft_always(engine, DRAFTED) if lookup else engine, prompts, asked, chunk, cancel)


def _written(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    asked: Sequence[Mapping[str, Any]],
    chunk: int | None = None,
    cancel: tuple[int, int] | None = None,
) -> list[Written]:
    if chunk is not None:
        engine.controller.chunk = chunk
    requests = [engine.submit(prompt, Sampling(**each)) for prompt, each in zip(prompts, asked, strict=True)]
    while engine.busy:
        engine.step()
        if cancel is not None and len(requests[cancel[0]].tokens) >= cancel[1]:
            engine.cancel(requests[cancel[0]])
    return [Written(r.tokens, r.logprobs, r.finish_reason or "") for r in requests]


def noise(seed: int, position: int) -> float:
    """Return the number in [0, 1) with which the engine samples the token at a position of the text."""
    return uniform(torch.tensor([seed]), torch.tensor([position])).item()


def write_texts(model: Any, prompts: Sequence[str], engine: str, **options: Any) -> list[dict[str, Any]]:
    """Continue texts; `engine` is auto or reference. Options: max_new_tokens, temperature, seed, stop."""
    rows = generate_rows(model, prompts, TextOptions(**options), engine=engine)
    return [
        {"ids": row.new_ids, "text": row.result.text, "tokens": row.result.tokens, "finish": row.result.finish_reason}
        for row in rows
    ]


@contextmanager
def fused_engine(model: Any, slots: int, context: int, lookup: bool, graphs: bool, checked: bool) -> Iterator[Any]:
    """Yield a function as `write` whose forwards all run the fused kernels, as on a GPU. `graphs`: by captured steps,
    whose batch sizes and KV lengths come in buckets; `checked`: the engine compares itself with its members first."""
    from tessellm.engine.cuda.fused.decoder import fuse

    def run(prompts: Any, asked: Any, chunk: int) -> list[Written]:
        speculation = Speculation("lookup") if lookup else None
        with stacking():
            engine = Engine(model, slots=slots, context=context, speculation=speculation)
        if graphs:
            engine = captured(engine)
        _written(engine, [[4, 5, 6]], [{"max_new_tokens": 1}])  # the first forward, by the modules, makes the caches
        return _written(draft_always(engine, DRAFTED) if lookup else engine, prompts, asked, chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_fused", fuse)
        if not checked:
            patch.setattr(slot_executor, "check_slots", lambda *given: None)
        yield run


Launch = str  # kernel, grid, arguments and constants, one behind the other


@contextmanager
def recorded(execute: bool) -> Iterator[list[Launch]]:
    """Record every launch of a Triton kernel while the interpreter stands in for the compiler. Without `execute` no
    kernel runs and no product of the library, which is recorded too, and what they would have filled holds zeros: so
    members of any size take no time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("launches are recorded in Triton's interpreter: set TRITON_INTERPRET=1")
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[Launch] = []
    run = InterpretedFunction.run

    def recording(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        launches.append(_launch(self.__name__, grid, dict(zip(self.arg_names, given, strict=False)) | named))
        return run(self, *given, grid=grid, warmup=warmup, **named) if execute else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", recording)
        if not execute:
            zeros = torch.zeros  # not on a device that is named: to name the CPU is refused in a capture
            patch.setattr(torch, "empty", lambda *size, device=None, **given: zeros(*size, **given))
            patch.setattr(torch, "empty_like", torch.zeros_like)
            for name in ("mm", "addmm", "bmm"):
                patch.setattr(torch, name, partial(_product, launches, name))
            _as_on_hopper(patch)
        yield launches


def _as_on_hopper(patch: pytest.MonkeyPatch) -> None:
    """Let launches ask to overlap, as they do on an H200: the interpreter cannot run those."""
    from tessellm.engine.cuda.fused import decoder, layers, library, overlap, prompts

    own = overlap.overlapping
    patch.setattr(overlap, "_is_able", lambda device: True)
    for module in (decoder, layers, library, prompts):
        patch.setattr(module, "overlapping", lambda device, early=True: own(torch.device("cuda"), early))


def _product(launches: list[Launch], name: str, *given: torch.Tensor, out: Any = None, out_dtype: Any = None) -> Any:
    *_, a, b = given
    launches.append(_launch(f"torch.{name}", (1,), {"a": a, "b": b, "out_dtype": out_dtype}))
    return a.new_zeros(*a.shape[:-1], b.shape[-1], dtype=out_dtype) if out is None else out


def _launch(name: str, grid: Any, arguments: Mapping[str, Any]) -> Launch:
    """Describe a launch: tensors by type, shape and strides, and by the earlier argument that begins where they do."""
    first: dict[int, str] = {}
    words = []
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor):
            shape, stride = ("x".join(map(str, each)) for each in (value.shape, value.stride()))
            like = first.setdefault(value.data_ptr(), argument)
            words.append(
                f"{argument}={str(value.dtype)[6:]}[{shape}:{stride}]" + (f"={like}" if like != argument else "")
            )
        else:
            words.append(f"{argument}={value!r}" if isinstance(value, float) else f"{argument}={value}")
    return f"{name} grid={'x'.join(map(str, grid))} {' '.join(words)}"
