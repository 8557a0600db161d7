"""Trigonometric proofs (Sec. 1 and 3.2): a base that does algebra, experts that each know one identity, composed.

Twice. With exact members: each is a symbolic prover read as a language model, its next word with probability 1 − ε and
the rest spread evenly; so Definition 4 can be tested at every prefix of every proof, and Theorem 2 applies as it
stands. And with trained transformers in their places (`members`, `trained`). What is written is judged by the checker
alone: every line must follow from the one before and the last must be the goal.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.rules import product, product_scores

from ..common.claims import Claim, Result
from ..common.panels import drawn
from . import trained
from .expressions import skeleton
from .members import KEPT, MEMBERS_FILE, Training, load, members_of, pool, save, train_members
from .problems import NAMES, VOCABULARY, Prover, random_problem
from .proofs import DOT, Proof, check

SLIP = 1e-3  # ε
LONGEST_PROOF = 200
KINDS = (
    *((frozenset([name]),) for name in NAMES),
    tuple(frozenset(NAMES) - {name} for name in NAMES),
    (frozenset(NAMES),),
)
EXACT_PROBLEMS = 30
PROBLEMS = {"cpu": 20, "full": 200}  # for trained members
TRAINING = {"full": Training(3, 300_000, 128, (20_000, 8_000), (2e-3, 1e-3), (200.0, 140.0))}


@dataclass(frozen=True)
class Written:
    """What a model wrote, and at each word which experts departed from the base and what log Z was."""

    words: list[str]
    active: list[frozenset[str]]
    log_z: list[float]


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> Result:
    """Claims, `trig.json` and pictures in `out`. Full size trains members (`trig-members.safetensors`), CPU size
    takes those that are kept with the package."""
    started, rng, count = time.perf_counter(), random.Random(seed), EXACT_PROBLEMS
    made = [*generator_claims(10 * count, rng), *expert_claims(count, rng)]
    composed, (problem, written) = composed_claims(count, rng)
    made += composed
    log(f"exact provers: {sum(claim.holds is not False for claim in made)} of {len(made)} claims hold")
    active = [sorted(names) for names in written.active]
    example = {"prompt": problem.prompt, "words": written.words, "active": active}
    tables: dict[str, Any] = {"example": example, "trained": []}

    def result(figures: Sequence[str] = ()) -> Result:
        found = tables["trained"]
        everything = [*made, *(trained.claims(found) if found else [])]
        return Result("trig", everything, seed, size, time.perf_counter() - started, figures, tables)

    for evaluation in evaluations(seed, out, size, log):
        tables["trained"].append(evaluation)
        result().write(out)  # what there is, should time run out
    last = result(draw_examples(tables, out))
    last.write(out)
    return last


def draw_examples(tables: Mapping[str, Any], out: Path) -> list[str]:
    """A proof with its stopping times, by the exact provers, and one by the trained ones if there are any."""
    from .figure import draw

    proofs = {"trig": tables["example"], "trig-trained": next((t["example"] for t in tables["trained"]), None)}
    return [name for kind, proof in proofs.items() if proof for name in drawn(partial(draw, out, kind, **proof))]


def evaluations(seed: int, out: Path, size: str, log: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """What the trained members prove, seed by seed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = trained.problems(PROBLEMS[size], seed)
    if size in TRAINING:
        training = TRAINING[size]
        log(f"making {training.texts:,} training texts")
        texts = pool(training.texts, seed)
        log(f"training on {device}: {asdict(training)}")
        members, steps = train_members(*texts, training, torch.Generator(device).manual_seed(seed), log)
        save(members_of(members, 0), out / MEMBERS_FILE, {"seed": seed, **asdict(training), "reached": steps})
        for number in range(training.seeds):
            log(f"seed {number + 1} of {training.seeds}")
            yield {**trained.evaluate(members_of(members, number), asked, device, log), "steps": steps}
    else:
        members, about = load(KEPT)
        log(f"trained members of seed {about['seed']}: each writes {sum(map(len, asked.values()))} proofs")
        yield {**trained.evaluate(members, asked, device, log), "steps": about.get("reached")}


def law(prover: Prover, words: Sequence[str]) -> Tensor:
    """log p(next word): 1 − ε on the prover's word, ε spread over all."""
    p_V = torch.full((len(VOCABULARY),), SLIP / len(VOCABULARY), dtype=torch.float64)
    p_V[VOCABULARY.index(prover.next_word(words))] += 1 - SLIP
    return p_V.log()


def write(base: Prover, experts: dict[str, Prover], prompt: Sequence[str]) -> Written:
    """Greedy, by Eq. 2 of the base and the experts."""
    words = list(prompt)
    active, log_z = [], []
    while len(words) < len(prompt) + LONGEST_PROOF and words[-1] != DOT:
        logp_MV = torch.stack([law(prover, words) for prover in (base, *experts.values())])
        departs = (logp_MV[1:] - logp_MV[0]).abs().amax(-1) > 0
        active.append(frozenset(name for name, yes in zip(experts, departs.tolist(), strict=True) if yes))
        log_z.append(float(product_scores(logp_MV).logsumexp(-1)))
        words.append(VOCABULARY[int(product(logp_MV).argmax())])
    return Written(words[len(prompt) :], active, log_z)


def prove_alone(prover: Prover, prompt: Sequence[str]) -> list[str]:
    words = list(prompt)
    while len(words) < len(prompt) + LONGEST_PROOF and words[-1] != DOT:
        words.append(prover.next_word(words))
    return words[len(prompt) :]


def generator_claims(count: int, rng: random.Random) -> list[Claim]:
    """The problems themselves: proofs that hold, wrong ones that are refused, and no skeleton in train and test."""
    kinds = [frozenset(), *(kind for group in KINDS for kind in group)]
    proofs = [random_problem(rng.choice(kinds), rng, test=bool(number % 2)) for number in range(count)]
    right = sum(check(p.left, p.right, p.continuation).proved for p in proofs) / count
    leaps = [p for p in proofs if len(p.lines) > 1]
    wrong = [check(p.left, p.right, corrupted(p, rng)).proved for p in proofs]
    leapt = [check(p.left, p.right, Proof(p.left, p.right, (p.right,)).continuation).proved for p in leaps]
    refused = 1 - (sum(wrong) + sum(leapt)) / (len(wrong) + len(leapt))
    train, test = ({skeleton(p.left) for p in proofs[side::2]} for side in (0, 1))
    shared = len(train & test)
    statement = f"proofs of the generator that the checker accepts, every line by numbers and sympy ({count})"
    return [
        Claim("generator", statement, right, "1.0", right == 1.0),
        Claim(
            "checker",
            "proofs with one word changed, and leaps to the goal, that it refuses",
            refused,
            "1.0",
            refused == 1.0,
        ),
        Claim(
            "skeletons", f"skeletons shared by train ({len(train)}) and test ({len(test)})", shared, "0", shared == 0
        ),
    ]


def corrupted(proof: Proof, rng: random.Random) -> list[str]:
    """The proof with one word exchanged for another."""
    words = proof.continuation
    place = rng.randrange(len(words))
    return [*words[:place], rng.choice([w for w in VOCABULARY if w != words[place]]), *words[place + 1 :]]


def expert_claims(count: int, rng: random.Random) -> list[Claim]:
    own: list[float] = []
    both: list[float] = []
    for name in NAMES:
        prover = Prover(frozenset([name]))
        for kinds, scores in (([frozenset([name])], own), ([k for k in KINDS[-2] if name in k], both)):
            problems = [random_problem(rng.choice(kinds), rng, test=True) for _ in range(count)]
            proved = [check(p.left, p.right, prove_alone(prover, p.prompt)).proved for p in problems]
            scores.append(sum(proved) / count)
    return [
        Claim(
            "own",
            "each expert alone, problems that need its identity (worst expert)",
            min(own),
            "≥ .95",
            min(own) >= 0.95,
        ),
        Claim(
            "alone",
            "each expert alone, problems that need a second one (best expert)",
            max(both),
            "≤ .1",
            max(both) <= 0.1,
        ),
    ]


def composed_claims(count: int, rng: random.Random) -> tuple[list[Claim], tuple[Proof, Written]]:
    """All three experts composed by Eq. 2, on problems that need one, two and three identities."""
    base, experts = Prover(frozenset()), {name: Prover(frozenset([name])) for name in NAMES}
    shares, overlap, log_z, example = [], 0, 0.0, None
    for group in (tuple(kind for kinds in KINDS[:-2] for kind in kinds), *KINDS[-2:]):
        proved = 0
        for _ in range(count):
            problem = random_problem(rng.choice(group), rng, test=True)
            written = write(base, experts, problem.prompt)
            proved += check(problem.left, problem.right, written.words).proved
            overlap = max(overlap, *(len(active) for active in written.active))
            log_z = max(log_z, *map(abs, written.log_z))
            if len(problem.needs) == len(NAMES) and (example is None or len(problem.lines) > len(example[0].lines)):
                example = (problem, written)
        shares.append(proved / count)
    assert example is not None
    return [
        Claim(
            "composed",
            "composed by Eq. 2: problems that need one, two, three identities",
            shares,
            "1, ≥ .9, ≥ .8",
            shares[0] == 1 and shares[1] >= 0.9 and shares[2] >= 0.8,
        ),
        Claim(
            "definition-4",
            "experts that depart from the base at once, the most at any word",
            overlap,
            "≤ 1",
            overlap <= 1,
        ),
        Claim("log-z", "largest |log Z| at any word (Theorem 2: none)", log_z, "≤ 1e-10", log_z <= 1e-10),
    ], example
