"""Skills that act on the same token in different features must blend: which rules still compose content and style?

The members of `styles`: one expert changes the content of every token, the other its style, under a bijection of the
tokens. Every rule composes the same members; a text is right if it has the one's content in the other's style. A rule
that lets a single owner speak fails by construction, unless it notices that the members do not interfere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessellm.compose import compose

from ..common.claims import Claim, Result
from ..common.intervals import share
from ..common.stacked import logits, to_llama
from ..evidence import Evidence
from .experiment import BROKEN, SIZES, _whole_texts, greedy
from .members import LENGTH, WALK, Walk, make_walks, train_members


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, compose by every rule, write `blending.json`."""
    began = time.monotonic()
    effort, generator = SIZES[size], torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    walks = make_walks(BROKEN, generator)
    writers = [lambda batch, walk=walk: walk.write(batch, LENGTH, generator) for walk in walks]
    members = train_members(WALK, writers, effort.walk_steps, effort.batch, generator, first=1)
    base, content, style = (to_llama(members, WALK, member) for member in range(3))
    ideal = Walk(walks[1].content, walks[2].style, walks[0].token)
    start = walks[0].write(effort.texts, 2, generator)
    table = {}
    for rule in ("mixture", "evidence", "product"):
        text = greedy(compose(base, {"content": content, "style": style}, rule=rule), start)
        right = round(_whole_texts(text, ideal) * effort.texts)
        table[rule] = share(right, effort.texts)
        log(f"{rule}: {right} of {effort.texts}")
    with torch.no_grad():
        text = ideal.write(effort.texts, LENGTH, generator)
        rows = logits(members, WALK, text.expand(len(walks), -1, -1)).log_softmax(-1)[:3]
        why = Evidence().explain(rows, text, torch.ones_like(text, dtype=torch.bool), None)[2]
    best, blended = table["evidence"]["share"], why.more["blended_BT"].float().mean().item()
    interference = why.log_z_BT.abs()
    claims = [
        Claim("evidence", "default rule: share of texts with both content and style", best, "≥ 0.99", best >= 0.99),
        Claim("blended", "default rule: share of steps at which Eq. 2 speaks", blended, "≥ 0.99", blended >= 0.99),
        Claim(
            "log-z", "mean and largest |log Z| of those steps", [interference.mean().item(), interference.max().item()]
        ),
        *(Claim(rule, f"{rule}: share of texts", cell["share"]) for rule, cell in table.items() if rule != "evidence"),
    ]
    return Result("blending", claims, seed, size, time.monotonic() - began, (), {"blending": table}).write(out)
