"""`reproduce full-tunes`: three small full fine-tunes, trained here, routed as adapters are.

Every parameter is trained, briefly: some dozens of steps of a few texts, so that two cores need minutes. A training
that is done is kept in OUT/full-tunes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.members import Loading, MemberSpec, load_member
from tessellm.routing.profiles import ExpertToRoute
from tessellm.routing.route import RoutedPrompt
from tessellm.routing.router import DeltaRouter
from tessellm.vocabulary.chats import encode_chat

from ..common.claims import Claim, Result, at_least
from ..real.tasks import end_of_answer
from .decisions import Decision, cells
from .ours import decision_of
from .skills import Asked, Places, ordinary_prompts, skill_prompts

Log = Callable[[str], None]
IGNORED = -100  # labels of prompt tokens


@dataclass(frozen=True)
class Plan:
    """Which skills, how long, and on how many prompts they are judged."""

    names: tuple[str, ...] = ("clinc", "isodate", "regex")
    steps: int = 48
    texts: int = 6  # per step
    rate: float = 1e-4
    prompts: int = 20
    calibration: Sequence[str] | None = None  # None: the library's


PLANS = {
    "cpu": Plan(),
    "full": Plan(("clinc", "isodate", "regex", "bash", "sql", "ner", "define", "cogs"), 300, 32, 3e-5, 60),
}


def run(seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Return claims and tables."""
    return measure(Places.found(), PLANS[size], seed, out, size, log)


def measure(places: Places, plan: Plan, seed: int, out: Path, size: str, log: Log = print) -> Result:
    """Return the same with places and a plan of the caller's."""
    since = time.monotonic()
    base = load_member("base", MemberSpec(places.base), None, Loading(dtype="float32"))
    losses: dict[str, Any] = {}
    folders = {name: out / "full-tunes" / f"{name}-{seed}-{plan.steps}" for name in plan.names}
    for name, folder in folders.items():
        if not (folder / "config.json").is_file():
            losses[name] = train(places, name, plan, seed, folder, log)
    experts = {
        name: load_member(name, MemberSpec(folder), base, Loading(dtype="float32")).model
        for name, folder in folders.items()
    }
    asked = [*skill_prompts(places, plan.names, plan.prompts), *ordinary_prompts(places)]
    router = DeltaRouter.calibrate(
        base.model, base.tokenizer, {name: ExpertToRoute(model) for name, model in experts.items()},
        prompts=plan.calibration,
    )  # fmt: skip
    found = list(_decisions(base.model, base.tokenizer, router, asked))
    table = {"nothing given": cells(found, asked, seed), "losses": losses, "steps": plan.steps, "texts": plan.texts}
    return Result("full-tunes", _claims(table), seed, size, time.monotonic() - since, (), table)


def train(places: Places, name: str, plan: Plan, seed: int, folder: Path, log: Log) -> dict[str, float]:
    """Fine-tune all parameters of the base on a skill's training texts, answers alone, and save it."""
    member = load_member("base", MemberSpec(places.base), None, Loading(dtype="float32"))
    model: Any = member.model
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)
    losses: list[float] = []
    for ids_BT, labels_BT in _batches(places, name, plan, seed, member.tokenizer):
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        log(f"{name}: step {len(losses)} of {plan.steps}, loss {losses[-1]:.3f}")
    model.eval().save_pretrained(folder)
    few = max(1, len(losses) // 8)
    return {"first": sum(losses[:few]) / few, "last": sum(losses[-few:]) / few}


def _batches(places: Places, name: str, plan: Plan, seed: int, tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield texts as token ids, padded on the right, with labels at the answers."""
    examples, draw, end = places.examples(name, "train"), random.Random(seed), end_of_answer(tokenizer)
    for _ in range(plan.steps):
        rows = []
        for example in draw.sample(examples, plan.texts):
            prompt = encode_chat(tokenizer, [{"role": "user", "content": example.prompt}])
            answer = [*tokenizer(example.answer, add_special_tokens=False).input_ids, end]
            rows.append((prompt + answer, [IGNORED] * len(prompt) + answer))
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [end] * (longest - len(ids)) for ids, _ in rows])
        yield ids, torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows])


@torch.inference_mode()
def _decisions(base: Any, tokenizer: Any, router: DeltaRouter, asked: Sequence[Asked]) -> Iterator[Decision]:
    with router.tap(base) as tap:
        for each in asked:
            ids = encode_chat(tokenizer, [{"role": role, "content": text} for role, text in each.messages])
            base.base_model(input_ids=torch.tensor([ids]), use_cache=False)
            (route,) = router.route([RoutedPrompt(ids, router.marks.read(ids).user, tap.take()[0])])
            yield decision_of(route)


def _claims(table: dict[str, Any]) -> list[Claim]:
    found = table["nothing given"]["cells"]
    told = "full fine-tunes, nothing given, 95 % of ordinary prompts kept"
    return [
        at_least("seen", f"{told}: wordings of training", found["seen"]["share"], 0.99),
        at_least("unseen", f"{told}: other wordings", found["unseen"]["share"], 0.88),
        Claim("near", f"{told}: near prompts kept", found["near"]["share"]),
        Claim("shipped", "full fine-tunes: ordinary prompts kept as shipped", found["plain"]["shipped"]),
    ]
