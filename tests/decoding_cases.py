"""Compositions to decode, and how the reference decodes them: one sequence at a time, by model.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tessellm
from tessellm.decoding.requests import Request

from conftest import VOCAB, build_model, perturbed, save_lora, save_member

KINDS = ("llama", "gemma2", "gpt2", "qwen2", "mixed", "adapters", "both")


def composition(kind: str, folder: Path, experts: int = 2, **settings: Any) -> Any:
    """A small composition: full fine-tunes of one architecture, of several, LoRA adapters, or both."""
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


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def reference_rows(model: Any, request: Request) -> Tensor:
    """Log-probabilities by model.py at each token that the request wrote, along its own text: [T, V]."""
    text = torch.tensor([request.prompt + request.tokens])
    rows: Tensor = model(text, use_cache=False).logits[0]
    return rows[len(request.prompt) - 1 : -1]


def disagreements(model: Any, request: Request, margin: float = 1e-4) -> list[int]:
    """Where a greedy request chose another token than the reference's best, by more than a near-tie."""
    rows = reference_rows(model, request)
    best = rows.amax(-1)
    chosen = rows.gather(-1, torch.tensor(request.tokens)[:, None])[:, 0]
    return [t for t, gap in enumerate((best - chosen).tolist()) if gap > margin]


@torch.no_grad()
def fragile(model: Any, request: Request, margin: float = 1e-4, draws: int = 8) -> Tensor:
    """Where the reference's own best token changes if members' log-probabilities move by less than the margin: near
    ties, and thresholds of the rule: [T]."""
    text = torch.tensor([request.prompt + request.tokens])
    logp_MBTV = model(text, use_cache=False, output_member_logprobs=True).member_logprobs
    generator, mask = torch.Generator().manual_seed(0), torch.ones_like(text).bool()
    best = model.rule(logp_MBTV, text, mask, None)[0].argmax(-1)
    changed = torch.zeros_like(mask)
    for _ in range(draws):
        noise = margin * (2 * torch.rand(logp_MBTV.shape, generator=generator) - 1)
        changed |= model.rule((logp_MBTV + noise).log_softmax(-1), text, mask, None)[0].argmax(-1) != best
    return changed[0, len(request.prompt) - 1 : -1]


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


def alone(model: Any, prompt: list[int], sampling: Any = None, **settings: Any) -> Request:
    """The same request with nobody beside it."""
    from tessellm.decoding.engine import Engine

    return Engine(model, slots=1, **settings).generate([prompt], sampling)[0]
