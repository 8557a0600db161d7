"""Feature-space composition (Theorem 3): content × style under an arbitrary bijection of tokens.

One expert changes content, one changes style; both change every token. Composed by Eq. 2 they write the one's content
in the other's style, because the pairs' bijection keeps prefixes. Then the bijection is broken: the style expert learns
its style on a pairing of its own, as well as before, and no common feature space is left. Last, features that need the
future: Eq. 2 fails, particles do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.compose import compose
from tessellm.model import ComposedForCausalLM
from tessellm.rules import product

from .. import particles
from ..common.claims import Claim, Result
from ..common.panels import drawn
from ..common.stacked import Params, Shape, logits, select, to_llama
from .members import (
    LENGTH,
    START,
    SUM_LENGTH,
    SUM_VALUES,
    SUMS,
    WALK,
    Walk,
    make_walks,
    sum_features,
    sums,
    train_members,
)

BROKEN = (0.0, 0.25, 0.5, 1.0)
CLEAR = 0.1  # total variation from the base above which an expert acts


@dataclass(frozen=True)
class Effort:
    walk_steps: tuple[int, int]
    sum_steps: tuple[int, int]
    batch: int
    texts: int
    particles: int


SIZES = {
    "cpu": Effort((1200, 300), (300, 600), 64, 500, 10_000),
    "full": Effort((4000, 1000), (1000, 2000), 128, 2000, 20_000),
}


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> Result:
    """Claims, `styles.json` and `styles.png` in `out`."""
    from .figure import draw

    started = time.perf_counter()
    effort, generator = SIZES[size], torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    log("content and style: training")
    walks = make_walks(BROKEN, generator)
    writers = [lambda batch, walk=walk: walk.write(batch, LENGTH, generator) for walk in walks]
    members = train_members(WALK, writers, effort.walk_steps, effort.batch, generator, first=1)
    claims, example = whole_claims(members, walks, effort, generator)
    log("the bijection, broken bit by bit")
    broken_claims, broken = break_bijection(members, walks, effort, generator)
    log("features that need the future: training, enumerating, particles")
    future_claims, future = need_the_future(effort, generator, seed)
    figures = drawn(lambda: draw(out, walks[0], example, broken, future))
    tables = {"bijection broken": broken, "features that need the future": future}
    seconds = time.perf_counter() - started
    result = Result("styles", [*claims, *broken_claims, *future_claims], seed, size, seconds, figures, tables)
    result.write(out)
    return result


@torch.no_grad()
def whole_claims(
    members: Params, walks: Sequence[Walk], effort: Effort, generator: torch.Generator
) -> tuple[list[Claim], dict[str, Tensor]]:
    """The bijection is whole: greedy texts of every model, from the same two tokens."""
    base, content, style = (to_llama(members, WALK, member) for member in range(3))
    models = {
        "base": base,
        "content expert": content,
        "style expert": style,
        "composed": compose_two(base, content, style),
    }
    models["task arithmetic"] = to_llama(task_arithmetic(members), WALK, 0)
    start = walks[0].write(effort.texts, 2, generator)
    texts = {name: greedy(model, start) for name, model in models.items()}
    ideal = Walk(walks[1].content, walks[2].style, walks[0].token)
    right = {name: _whole_texts(text, ideal) for name, text in texts.items()}
    own = {name: _whole_texts(texts[name], walk) for name, walk in zip(list(texts)[:3], walks, strict=False)}
    acting, distance = on_own_texts(members, ideal, effort, generator)
    claims = [
        Claim(
            "members",
            "each member writes its own texts without error (share of texts, worst member)",
            min(own.values()),
            "≥ .99",
            min(own.values()) >= 0.99,
        ),
        Claim(
            "both-act",
            f"share of tokens at which both experts are more than {CLEAR} from the base (total variation)",
            acting,
            "≥ .99",
            acting >= 0.99,
        ),
        Claim(
            "composed",
            "composed texts with the content expert's content in the style expert's style, all of 14 tokens",
            right["composed"],
            "≥ .99",
            right["composed"] >= 0.99,
        ),
        Claim("composed-law", "mean total variation between composed and ideal next-token law", round(distance, 4)),
        Claim("alone", "the same for the experts alone", [right["content expert"], right["style expert"]]),
        Claim("task-arithmetic", "the same for merged weights (Eq. 5)", right["task arithmetic"]),
    ]
    return claims, {name: text[0] for name, text in texts.items()}


def compose_two(base: Any, content: Any, style: Any) -> ComposedForCausalLM:
    return compose(base, {"content": content, "style": style}, rule="product")


def greedy(model: Any, start_BT: Tensor) -> Tensor:
    mask = torch.ones_like(start_BT)
    new = LENGTH - start_BT.shape[1]
    return model.generate(start_BT, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0)


def task_arithmetic(members: Params) -> Params:
    """Eq. 5 of the base and the first two experts."""
    return {name: (p[1] + p[2] - p[0]).unsqueeze(0) for name, p in members.items()}


def _whole_texts(tokens_BT: Tensor, walk: Walk) -> float:
    """The share of texts in which every token is the walk's most likely one."""
    content, style = walk.wanted(tokens_BT[:, :-1])
    return float((walk.token[content, style] == tokens_BT[:, 2:]).all(1).float().mean())


@torch.no_grad()
def on_own_texts(members: Params, ideal: Walk, effort: Effort, generator: torch.Generator) -> tuple[float, float]:
    """Along sampled texts of the ideal: how often both experts act, and how far the composition is from the ideal."""
    tokens_BT = ideal.write(effort.texts, LENGTH, generator)
    logp_MBTV = rows(select(members, [0, 1, 2]), WALK, tokens_BT)[:, :, 1:]
    acts_KBT = 0.5 * (logp_MBTV[1:].exp() - logp_MBTV[0].exp()).abs().sum(-1) > CLEAR
    content, style = ideal.law(tokens_BT)
    content_V, style_V = ideal.features
    exact_BTV = content[..., content_V] * style[..., style_V]
    distance = 0.5 * (product(logp_MBTV).exp() - exact_BTV).abs().sum(-1).mean()
    return float(acts_KBT.all(0).float().mean()), float(distance)


def rows(members: Params, shape: Shape, tokens_BT: Tensor) -> Tensor:
    """logp_MBTV of stacked members."""
    count = len(members["norm"])
    return logits(members, shape, tokens_BT.expand(count, -1, -1)).log_softmax(-1)


@torch.no_grad()
def break_bijection(
    members: Params, walks: Sequence[Walk], effort: Effort, generator: torch.Generator
) -> tuple[list[Claim], list[dict[str, float]]]:
    """Style experts with pairings of their own: does the composed token keep both promises?"""
    table = []
    for number, share in enumerate(BROKEN):
        style_walk = walks[2 + number]
        tokens_BT = walks[1].write(effort.texts, LENGTH, generator)
        logp_MBTV = rows(select(members, [0, 1, 2 + number]), WALK, tokens_BT)[:, :, 1:]
        chosen = product(logp_MBTV).argmax(-1)
        content, style = walks[1].wanted(tokens_BT)[0], style_walk.wanted(tokens_BT)[1]
        right_content = walks[1].features[0][chosen] == content
        right_style = style_walk.features[1][chosen] == style
        alone = logp_MBTV[2].argmax(-1) == style_walk.token[style_walk.wanted(tokens_BT)]
        table.append(
            {
                "share": share,
                "both": float((right_content & right_style).float().mean()),
                "content": float(right_content.float().mean()),
                "style": float(right_style.float().mean()),
                "style expert alone": float(alone.float().mean()),
            }
        )
    statement = "bijection broken for all tokens: share of tokens with both the right content and the right style"
    return [Claim("broken", statement, table[-1]["both"], "≤ .5", table[-1]["both"] <= 0.5)], table


@torch.no_grad()
def need_the_future(effort: Effort, generator: torch.Generator, seed: int) -> tuple[list[Claim], list[dict[str, Any]]]:
    """Features that do not keep prefixes, by trained members: how often content and style follow their predecessors."""
    follows = ((False, False), (True, False), (False, True))
    writers = [lambda batch, follow=follow: sums(batch, follow, generator) for follow in follows]
    with torch.enable_grad():
        members = train_members(SUMS, writers, effort.sum_steps, 2 * effort.batch, generator)
    base, content, style = (to_llama(members, SUMS, member) for member in range(3))
    model = compose_two(base, content, style)
    table = [
        _kept("base", *_features(sampled(base, effort.particles))),
        _kept("content expert", *_features(sampled(content, effort.particles))),
        _kept("style expert", *_features(sampled(style, effort.particles))),
        _kept("Eq. 2", *_features(sampled(model, effort.particles))),
    ]
    found = particles.sample(
        model, torch.tensor([[START]]), particles=effort.particles, max_new_tokens=SUM_LENGTH, seed=seed
    )
    table.append(_kept("particles", *_features(found.continuations[0], found.log_weights[0].exp())))
    tokens, weights = enumerate_c(members)
    table.append(_kept("C, enumerated", *_features(tokens, weights)))
    by = {row["model"]: row for row in table}
    aims = (by["content expert"]["content"], by["style expert"]["style"])
    short = max(aims[0] - by["Eq. 2"]["content"], aims[1] - by["Eq. 2"]["style"])
    off = max(abs(by["particles"][f] - by["C, enumerated"][f]) for f in ("content", "style"))
    missed = max(abs(aims[0] - by["particles"]["content"]), abs(aims[1] - by["particles"]["style"]))
    return [
        Claim(
            "future-eq-2",
            "features that need the future: how much Eq. 2 falls short of the experts",
            short,
            "≥ .1",
            short >= 0.1,
        ),
        Claim(
            "future-particles",
            f"the same features by {effort.particles:,} particles: difference to the experts",
            missed,
            "≤ .05",
            missed <= 0.05,
        ),
        Claim("future-c", "and to C, enumerated over all sequences of the trained members", off, "≤ .03", off <= 0.03),
    ], table


def sampled(model: Any, count: int) -> Tensor:
    """Texts without the start token, sampled token by token."""
    start = torch.full((count, 1), START)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": SUM_LENGTH, "pad_token_id": START}
    return model.generate(start, attention_mask=torch.ones_like(start), **options)[:, 1:]


def enumerate_c(members: Params) -> tuple[Tensor, Tensor]:
    """All sequences and their probabilities under C of the trained members."""
    tokens_NT = torch.cartesian_prod(*[torch.arange(SUM_VALUES)] * SUM_LENGTH)
    score = []
    for chunk_BT in tokens_NT.split(2048):
        fed_BT = torch.cat([torch.full_like(chunk_BT[:, :1], START), chunk_BT[:, :-1]], dim=1)
        logp_MBT = rows(members, SUMS, fed_BT).gather(-1, chunk_BT.expand(3, -1, -1).unsqueeze(-1)).squeeze(-1)
        score.append((logp_MBT[1:].sum(0) - logp_MBT[0]).double().sum(-1))
    return tokens_NT, torch.cat(score).softmax(0)


def _features(tokens: Tensor, weights: Tensor | None = None) -> tuple[float, float]:
    weights = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64) if weights is None else weights
    content, style = (float((kept.double().mean(-1) * weights).sum()) for kept in sum_features(tokens))
    return content, style


def _kept(model: str, content: float, style: float) -> dict[str, Any]:
    return {"model": model, "content": content, "style": style}
