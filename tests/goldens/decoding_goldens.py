"""Compositions by `product`, what is asked of them, and what they write: to be recorded, and to be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tessellm

from conftest import build_model, character_tokenizer, perturbed, save_lora, save_member
from decoding_cases import prompts
from engine_access import Written, noise

KINDS = ("llama", "gemma2", "mixed", "lora")  # gemma2 has windows of 16 tokens; mixed: GPT-2 beside Llama
WEIGHTS: dict[str, dict[str, float] | None] = {
    "plain": None,
    "weighted": {"a": 0.7, "b": 1.3},
    "negative": {"a": 1.0, "b": -0.5},
    "one member": {"a": 1.0, "b": 0.0},
}
NEW, LONG, CHUNK = 16, 90, 16  # new tokens; tokens of the long prompt, and of a prefill chunk
LOGIT_ROWS = 4  # of the reference's logits, kept in full
GREEDY = {"max_new_tokens": NEW}
SAMPLED = [
    {"max_new_tokens": NEW, "temperature": 0.8 + 0.1 * n, "seed": 11 + n, "top_p": 0.8 if n % 4 == 1 else 1.0,
     "top_k": 9 if n % 4 == 2 else 0}
    for n in range(8)
]  # fmt: skip


@cache
def members(kind: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return a base and two experts, made on the fly."""
    base = build_model("llama" if kind in ("mixed", "lora") else kind)
    if kind == "mixed":
        return base, {"a": build_model("gpt2", 3), "b": perturbed(base, 1)}
    if kind == "lora":
        home = save_member(base, folder / "base")
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        save_lora(home, folder / "a", 1, target_modules=targets)
        save_lora(home, folder / "b", 2, r=2)
        return str(home), {name: str(folder / name) for name in "ab"}
    return base, {"a": perturbed(base, 1), "b": perturbed(base, 2)}


def composition(kind: str, folder: Path, weighting: str = "plain") -> Any:
    base, experts = members(kind, folder)
    return tessellm.compose(base, experts, rule="product", weights=WEIGHTS[weighting], tokenizer=character_tokenizer())


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield every composition with its name."""
    for kind in KINDS:
        for weighting in WEIGHTS:
            yield f"{kind}, {weighting}", composition(kind, folder, weighting)


@torch.no_grad()
def fingerprint(model: Any) -> list[float]:
    """Return numbers that change with the weights of any member: were members made as they were when recorded?"""
    return [
        sum(float((p.double() * torch.arange(p.numel()).view(p.shape).cos()).sum()) for p in each.parameters())
        for each in model.members.values()
    ]


def given() -> list[list[int]]:
    return prompts(8, 40, seed=5)


def long_prompts() -> list[list[int]]:
    """Return one prompt of several prefill chunks, and two short ones."""
    long = torch.randint(4, 60, (LONG,), generator=torch.Generator().manual_seed(9)).tolist()
    return [long, *prompts(2, 20, seed=10)]


@torch.no_grad()
def reference_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the reference model's logits along a text: [T, V]."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def logit_rows(model: Any, tokens: Sequence[int]) -> list[list[float]]:
    """Return the last rows of the reference's logits, each number so that it is read as the same float32."""
    return [[float(f"{x:.9g}") for x in row] for row in reference_logits(model, tokens)[-LOGIT_ROWS:].tolist()]


def reference_written(model: Any, prompts: Sequence[Sequence[int]]) -> list[Written]:
    """Write greedily by `model.generate`, in one batch padded on the left; log-probabilities are those of `forward`."""
    longest, ends = max(map(len, prompts)), set(model.config.eos_token_id)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    found = []
    for prompt, row in zip(prompts, made[:, longest:].tolist(), strict=True):
        end = next((t for t, token in enumerate(row) if token in ends), None)
        tokens = row if end is None else row[: end + 1]
        logp_TV = along(model, prompt, tokens)
        logprobs = logp_TV.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        found.append(Written(tokens, logprobs, "length" if end is None else "stop"))
    return found


def along(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return the reference's log-probabilities at each token that was written: [T, V]."""
    return reference_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)


def sampled_by_generate(model: Any, prompt: Sequence[int]) -> list[int]:
    torch.manual_seed(7)
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.2, "top_k": 0, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def margins(model: Any, prompt: Sequence[int], tokens: Sequence[int], asked: Mapping[str, Any]) -> list[float]:
    """Return how far each choice was from another one: of a greedy token, the log-probability between the two best;
    of a sampled one, how far the noise was from the ends of the token's share, or a cut from the sum it cuts at."""
    logp_TV = along(model, prompt, tokens).double()
    if not asked.get("temperature"):
        best = logp_TV.topk(2).values
        return [float(f"{gap:.3g}") for gap in (best[:, 0] - best[:, 1]).tolist()]
    found = []
    for t, (token, logp_V) in enumerate(zip(tokens, logp_TV, strict=True)):
        p_V, apart = (logp_V / asked["temperature"]).softmax(-1), 1.0
        if asked["top_k"]:
            ordered = p_V.sort(descending=True).values
            apart = float(ordered[asked["top_k"] - 1] - ordered[asked["top_k"]])
            p_V = p_V * (p_V >= ordered[asked["top_k"] - 1])
        if asked["top_p"] < 1:
            ordered, order = p_V.sort(descending=True)
            before = ordered.cumsum(-1) - ordered
            apart = min(apart, float((before - asked["top_p"]).abs().min()))
            p_V = torch.zeros_like(p_V).index_copy(0, order, ordered * (before < asked["top_p"]))
        share_V = p_V.cumsum(-1) / p_V.sum()
        drawn, low = noise(asked["seed"], len(prompt) + t), float(share_V[token - 1]) if token else 0.0
        if not low <= drawn <= float(share_V[token]):
            raise AssertionError(f"token {t} is not the one that its noise chooses")
        found.append(float(f"{min(apart, drawn - low, float(share_V[token]) - drawn):.3g}"))
    return found
