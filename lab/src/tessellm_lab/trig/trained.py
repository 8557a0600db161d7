"""What trained provers prove, alone and composed, by the same problems and the same checker as the symbolic ones.

Everything is greedy. Beside the shares proved it measures Definition 3 along the composed proofs: where each expert
departs from the base (total variation above ½), against where the symbolic prover of that identity does.

    M members   K experts   B texts   T words
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tessellm.compose import compose
from tessellm.model import ComposedForCausalLM

from ..common.claims import Claim, at_least, at_most
from ..common.stacked import Params, to_llama
from ..theory import sampled
from .members import MEMBERS, NUMBER, PADDING, PROVERS, SHAPE, encode, said
from .problems import NAMES, VOCABULARY, random_problem
from .proofs import DOT, Proof, check

EQ2, DEFAULT = "composed by Eq. 2", "composed by the default rule"
GROUPS = {
    **{name: [frozenset([name])] for name in NAMES},
    "two": [frozenset(NAMES) - {name} for name in NAMES],
    "three": [frozenset(NAMES)],
}
SLACK = 30  # words beyond the longest proof known
DEPARTS = 0.5
SHOWN = 8  # failures of a model that a result keeps

Table = dict[str, dict[str, float]]


def problems(count: int, seed: int) -> dict[str, list[Proof]]:
    """Test problems: `count` for each identity, as many that need two, as many that need all three."""
    rng = random.Random(f"trained/{seed}")
    return {
        name: [random_problem(rng.choice(kinds), rng, test=True) for _ in range(count)]
        for name, kinds in GROUPS.items()
    }


def models(members: Params, device: str = "cpu") -> dict[str, Any]:
    """Every member of one seed as a language model, and the base and the experts composed, by Eq. 2 and by default."""
    alone = {name: to_llama(members, SHAPE, number).to(device) for number, name in enumerate(MEMBERS)}
    experts = {f"expert_{number}": alone[name] for number, name in enumerate(NAMES, 1)}
    composed = {EQ2: compose(alone["base"], experts, rule="product"), DEFAULT: compose(alone["base"], experts)}
    return {**alone, **composed}


@torch.no_grad()
def write(model: Any, asked: Sequence[Proof]) -> list[list[str]]:
    """What the model writes after each prompt, all in one batch."""
    ids, longest = padded(asked, model.device)
    options = {"do_sample": False, "eos_token_id": NUMBER[DOT], "pad_token_id": PADDING, "max_new_tokens": longest}
    made = model.generate(ids, attention_mask=(ids != PADDING).long(), **options)
    return [words(row) for row in made[:, ids.shape[1] :].tolist()]


def padded(asked: Sequence[Proof], device: Any) -> tuple[Tensor, int]:
    """The prompts, padded before, and how much may be written after them."""
    prompts = [encode(problem.prompt) for problem in asked]
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    return ids, min(SLACK + max(len(problem.continuation) for problem in asked), SHAPE.context - width)


def words(numbers: Sequence[int]) -> list[str]:
    """Up to the end of the proof; padding is no word of any proof."""
    made = [VOCABULARY[number] if number < PADDING else "" for number in numbers]
    return made[: made.index(DOT) + 1] if DOT in made else made


def shares(
    model: Any, asked: Mapping[str, Sequence[Proof]]
) -> tuple[dict[str, float], list[Proof], list[dict[str, str]]]:
    """The share of each group that the model proves, by the checker; what it proved; some that it did not, and why."""
    everything = [problem for group in asked.values() for problem in group]
    written = write(model, everything)
    verdicts = [check(p.left, p.right, w) for p, w in zip(everything, written, strict=True)]
    triples = list(zip(everything, written, verdicts, strict=True))
    right = [problem for problem, words, verdict in triples if verdict.proved and words == problem.continuation]
    failed = [
        {"prompt": " ".join(problem.prompt), "written": " ".join(words), "line": str(verdict.line), "why": verdict.why}
        for problem, words, verdict in reversed(triples)  # the hardest first
        if not verdict.proved
    ]
    proved = iter(verdict.proved for verdict in verdicts)
    return {name: sum(next(proved) for _ in group) / len(group) for name, group in asked.items()}, right, failed[:SHOWN]


def stopping_times(model: ComposedForCausalLM, proofs: Sequence[Proof]) -> dict[str, Any]:
    """Where experts depart from the base along these proofs, against where the symbolic provers do."""
    lines = [[*proof.prompt, *proof.continuation] for proof in proofs]
    length, start = max(map(len, lines)), min(len(proof.prompt) for proof in proofs)
    ids = torch.full((len(lines), length), PADDING)
    counted = torch.zeros(len(lines), length, dtype=torch.bool)
    exact = torch.zeros(len(NAMES), len(lines), length, dtype=torch.bool)
    for row, (proof, line) in enumerate(zip(proofs, lines, strict=True)):
        ids[row, : len(line)] = torch.tensor(encode(line))
        counted[row, len(proof.prompt) : len(line)] = True
        base, *experts = (said(prover, proof) for prover in PROVERS[: 1 + len(NAMES)])
        for expert, theirs in enumerate(experts):
            differs = torch.tensor([a != b for a, b in zip(base, theirs, strict=True)])
            exact[expert, row, len(proof.prompt) : len(line)] = differs
    texts = sampled.Texts(ids.to(model.device), (ids != PADDING).long().to(model.device), start)
    value_KBT = sampled.divergences(model, texts, "total variation")[0].cpu()
    exact, counted = exact[:, :, start:], counted[:, start:]
    measured = (value_KBT > DEPARTS) & counted
    return {
        "agree": float((measured == exact).all(0)[counted].float().mean()),
        "at once": int(measured.sum(0).max()),
        "idle": float(value_KBT.masked_fill(exact | ~counted, 0.0).max()),
        "idle, mean": float(value_KBT.masked_fill(exact, 0.0)[:, counted].mean()),
        "active": [
            _named(measured[:, row, len(p.prompt) - start :][:, : len(p.continuation)]) for row, p in enumerate(proofs)
        ],
        "elsewhere": elsewhere(model, texts, measured, exact),
    }


@torch.no_grad()
def elsewhere(
    model: ComposedForCausalLM, texts: sampled.Texts, measured_KBT: Tensor, exact_KBT: Tensor
) -> list[dict[str, Any]]:
    """The words at which other experts depart than should, and what the base, from which they do, would write there."""
    found = []
    for row, at in (measured_KBT != exact_KBT).any(0).nonzero().tolist():
        ids_T = texts.input_ids[row, : texts.start + at + 1]
        output = model(ids_T[None, :-1], use_cache=False, output_member_logprobs=True)
        *before, word = words(ids_T.tolist())
        (base,) = words([int(output.member_logprobs[0, 0, -1].argmax())])
        departs, should = (_named(each[:, row, at : at + 1])[0] for each in (measured_KBT, exact_KBT))
        found.append({"before": " ".join(before), "word": word, "base": base, "departs": departs, "should": should})
    return found


def _named(active_KT: Tensor) -> list[list[str]]:
    """The names of the experts that are active at each word."""
    return [[name for name, yes in zip(NAMES, column, strict=True) if yes] for column in active_KT.T.tolist()]


def evaluate(
    members: Params, asked: Mapping[str, Sequence[Proof]], device: str, log: Callable[[str], None]
) -> dict[str, Any]:
    """One seed: the shares proved, model by model, and the stopping times along the proofs that Eq. 2 got right."""
    made = models(members, device)
    table: Table = {}
    failures: dict[str, list[dict[str, str]]] = {}
    right: list[Proof] = []
    for name, model in made.items():
        table[name], proved, failures[name] = shares(model, asked)
        log(f"{name}: " + ", ".join(f"{group} {share:.3f}" for group, share in table[name].items()))
        right = proved if name == EQ2 else right
    times = stopping_times(made[EQ2], right) if right else None
    example, odd = None, []
    if times is not None:
        row = max(range(len(right)), key=lambda row: (len(right[row].needs), len(right[row].lines)))
        active, odd = times.pop("active")[row], times.pop("elsewhere")
        example = {"prompt": right[row].prompt, "words": right[row].continuation, "active": active}
        log("stopping times: " + ", ".join(f"{key} {value:.4g}" for key, value in times.items()))
    shown = {name: failures[name] for name in (EQ2, DEFAULT, MEMBERS[-1])}
    return {"proved": table, "stopping times": times, "elsewhere": odd, "example": example, "failures": shown}


def claims(found: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """The worst seed counts."""
    where = f" (worst of {len(found)} seeds)" if len(found) > 1 else ""
    tables = [each["proved"] for each in found]
    own = min(table[name][name] for table in tables for name in NAMES)
    alone = max(table[name][group] for table in tables for name in NAMES for group in ("two", "three"))
    made = [
        at_least("trained-own", f"trained experts alone, problems of their identity, the worst{where}", own, 0.95),
        at_most("trained-alone", f"trained experts alone, problems that need more, the best{where}", alone, 0.1),
    ]
    for short, rule in (("eq2", EQ2), ("default", DEFAULT)):
        for group, bound in (("two", 0.9), ("three", 0.8)):
            share = min(table[rule][group] for table in tables)
            made.append(at_least(f"trained-{group}-{short}", f"trained, {rule}: need {group}{where}", share, bound))
    union = [min(table[MEMBERS[-1]][group] for table in tables) for group in ("two", "three")]
    made.append(Claim("trained-union", f"one model of all identities, no mixed problems{where}: two, three", union))
    times = [each["stopping times"] for each in found if each["stopping times"]]
    return made + (_times_claims(times) if times else [])


def _times_claims(times: Sequence[Mapping[str, float]]) -> list[Claim]:
    agree, at_once = min(t["agree"] for t in times), max(t["at once"] for t in times)
    idle = [max(t[key] for t in times) for key in ("idle, mean", "idle")]
    exactly = "Def. 3: words at which trained experts depart from the base exactly where the symbolic ones do"
    return [
        Claim("trained-agree", exactly, agree),
        Claim("trained-at-once", "Def. 4: trained experts that depart at once (TV > ½), the most at any word", at_once),
        Claim("trained-idle", "total variation of idle trained experts from the base: mean, largest", idle),
    ]
