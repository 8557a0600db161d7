"""Compositions to decode, and how the reference decodes them: one sequence at a time, by the reference model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tessellm
from equality import disagreements, fragile, reference_rows
from tessellm.engine import assembly
from tessellm.engine.requests import Request

from conftest import VOCAB, build_model, character_tokenizer, perturbed, save_lora, save_member

__all__ = [
    "KINDS",
    "alone",
    "bloom",
    "composition",
    "disagreements",
    "fragile",
    "prompts",
    "reference_rows",
    "stacked_engine",
    "stacking",
    "unexcused",
]
KINDS = ("llama", "gemma2", "gpt2", "qwen2", "mixed", "adapters", "both")


def composition(kind: str, folder: Path, experts: int = 2, **settings: Any) -> Any:
    """A small composition: full fine-tunes of one architecture, of several, LoRA adapters, or both; by `product` unless
    settings say otherwise."""
    settings = {"rule": "product", **settings}
    if kind == "mixed":
        base = build_model("llama")
        return tessellm.compose(base, {"a": build_model("gpt2", 3), "b": perturbed(base, 1)}, **settings)
    if kind in ("adapters", "both"):
        base = build_model("llama")
        home = save_member(base, folder / "base")
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        ranks = [4, 2, 8, 4]
        members: dict[str, Any] = {
            f"e{i}": str(save_lora(home, folder / f"e{i}", i, r=ranks[i % 4], target_modules=targets))
            for i in range(experts)
        }
        if kind == "both":
            members["full"] = perturbed(base, 7)
        return tessellm.compose(str(home), members, **settings)
    base = build_model(kind)
    return tessellm.compose(base, {f"e{i}": perturbed(base, i) for i in range(experts)}, **settings)


def bloom() -> Any:
    """A composition that the fast path refuses: its attention has a bias by position, which it does not know."""
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    torch.manual_seed(0)
    settings = transformers.BloomConfig(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    base = transformers.BloomForCausalLM(settings).eval()
    model = tessellm.compose(base, {"math": perturbed(base, 1), "coding": perturbed(base, 2)}, rule="product")
    model.tokenizer = character_tokenizer()
    return model


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def unexcused(model: Any, requests: list[Request]) -> list[tuple[int, int]]:
    """Greedy tokens other than the reference's where that one is no near tie; those that are must be under 1 %."""
    wrong, excused, total = [], 0, 0
    for request in requests:
        excuse = fragile(model, request)
        places = disagreements(model, request)
        wrong += [(request.number, t) for t in places if not excuse[t]]
        excused += sum(bool(excuse[t]) for t in places)
        total += len(request.tokens)
    assert excused < 0.01 * total or not excused, f"{excused} of {total} tokens differ where the reference is fragile"
    return wrong


@contextmanager
def stacking(stacked: bool = True) -> Iterator[None]:
    """Run full fine-tunes as one computation, as on a GPU, or apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "stacks_fine_tunes", lambda model: stacked)
        yield


def stacked_engine(model: Any, stacked: bool, **settings: Any) -> Any:
    from tessellm.engine.engine import Engine

    with stacking(stacked):
        return Engine(model, **settings)


def alone(model: Any, prompt: list[int], sampling: Any = None, **settings: Any) -> Request:
    """The same request with nobody beside it."""
    from tessellm.engine.engine import Engine

    return Engine(model, slots=1, **settings).generate([prompt], sampling)[0]
