"""Trained provers: small transformers that learn what the symbolic provers of `problems` say.

Every member reads the same texts: proofs that need no identity or a single one, of training skeletons. At each word it
learns what *its* prover would write next there, also after a line that another's identity made. So all members agree
with the base where they are not asked, and none has seen a problem that needs two identities. In some texts a pair of
another identity stands by from the left side to the goal; whoever knows that one, the model of all included, does not
learn from such a text. One target in a hundred is any word (label smoothing), so that members agree about what nobody
means, too.

    S seeds   E members, all seeds'   B texts   T words   V vocabulary
"""

from __future__ import annotations

import json
import os
import random
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessellm.errors import CheckpointError
from tessellm.files import new_file, stored

from ..common.stacked import Params, Shape, initialise, select, train
from ..common.steps import Steps
from ..common.workers import by_processes
from .problems import NAMES, VOCABULARY, Prover, bystander_problem, random_problem
from .proofs import DOT, EQUALS, Proof

PROVERS = (Prover(frozenset()), *(Prover(frozenset([name])) for name in NAMES), Prover(frozenset(NAMES)))
MEMBERS = ("base", *NAMES, "one model of all")
SINGLE_KINDS = (frozenset(), *(frozenset([name]) for name in NAMES))
PADDING, NOTHING = len(VOCABULARY), -1
LENGTH = 160
SHAPE = Shape(vocabulary=len(VOCABULARY) + 1, width=160, layers=4, heads=5, context=320)
SMOOTHING = 0.01
BYSTANDERS = 0.35  # the share of texts with one
NUMBER = {word: number for number, word in enumerate(VOCABULARY)}
KEPT = Path(__file__).with_name("members.safetensors")
MEMBERS_FILE = "trig-members.safetensors"  # of a run at full size, in its folder
REINSTALL = "Install tessellm-lab again"
CHUNK = 2000  # texts that one process makes at a time


@dataclass(frozen=True)
class Training:
    """How members are made: the base from scratch, then the others from it, each within its limit of seconds."""

    seeds: int
    texts: int
    batch: int
    steps: tuple[int, int]
    rates: tuple[float, float]
    seconds: tuple[float, float]


def encode(words: Sequence[str]) -> list[int]:
    return [NUMBER[word] for word in words]


def said(prover: Prover, proof: Proof) -> list[str]:
    """What the prover would write at every word of the proof; `Prover.next_word` at all places, line by line."""
    words: list[str] = [EQUALS]
    before = proof.left
    for number, line in enumerate(proof.continuation_lines):
        candidates = prover.candidates(before)
        for at in range(len(line)):
            fitting = (c for c in candidates if len(c) > at and c[:at] == line[:at])
            words.append(next(fitting)[at])
        before = proof.lines[number]
        words.append(DOT if before == proof.right else EQUALS)
    return words


def texts_of(count: int, seed: str) -> tuple[Tensor, Tensor]:
    """Texts [N, T], and what each prover says at each word of the proof, NOTHING elsewhere: [provers, N, T]."""
    rng = random.Random(seed)
    texts = torch.full((count, LENGTH), PADDING, dtype=torch.int8)
    labels = torch.full((len(PROVERS), count, LENGTH), NOTHING, dtype=torch.int8)
    made = 0
    while made < count:
        standing = None
        if rng.random() < BYSTANDERS:
            needed, standing = rng.sample(NAMES, 2)
            proof = bystander_problem(needed, standing, rng)
        else:
            proof = random_problem(rng.choice(SINGLE_KINDS), rng, test=False)
        words, start = [*proof.prompt, *proof.continuation], len(proof.prompt) - 1
        if len(words) > LENGTH:
            continue
        texts[made, : len(words)] = torch.tensor(encode(words))
        for member, prover in enumerate(PROVERS):
            if standing in prover.known:
                continue
            labels[member, made, start : len(words) - 1] = torch.tensor(encode(said(prover, proof)))
        made += 1
    return texts, labels


def pool(count: int, seed: int, processes: int | None = None) -> tuple[Tensor, Tensor]:
    """`texts_of` in several processes, the shortest texts first; the same texts however many processes make them."""
    processes = processes or max(1, (os.cpu_count() or 2) - 1)
    sizes = [min(CHUNK, count - first) for first in range(0, count, CHUNK)]
    parts = list(by_processes(texts_of, [(size, f"{seed}/{number}") for number, size in enumerate(sizes)], processes))
    texts, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], dim=1)
    order = (texts != PADDING).sum(1).argsort(stable=True)
    return texts[order], labels[:, order]


def train_members(
    texts_NT: Tensor, labels_PNT: Tensor, training: Training, generator: torch.Generator, log: Callable[[str], None]
) -> tuple[Params, dict[str, Any]]:
    """E = 5 S members, seed by seed: the base, the experts, the one model of all; and the steps that their training
    reached. Runs where the generator is."""
    device = generator.device
    texts_NT, labels_PNT = texts_NT.to(device), labels_PNT.to(device)
    length_N = (texts_NT != PADDING).sum(1).tolist()
    window = min(len(texts_NT), 16 * training.batch)  # a batch holds texts of about one length
    places = random.Random(generator.initial_seed())  # on the CPU: a number from the device would make it wait

    def draw(member_E1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = places.randrange(len(texts_NT) - window + 1)
        size, steps = (len(member_E1), training.batch), length_N[first + window - 1]
        rows_EB = first + torch.randint(window, size, generator=generator, device=device)
        targets = labels_PNT[member_E1, rows_EB, :steps].long()
        return texts_NT[rows_EB, :steps].long(), targets.clamp_min(0), (targets != NOTHING).float()

    steps = {what: Steps(what, most, log) for what, most in zip(("base", "experts"), training.steps, strict=True)}

    def stage(start: Params, members: list[int], number: int, what: str) -> Params:
        member_E1 = torch.tensor(members, device=device).unsqueeze(1)

        return train(
            start,
            SHAPE,
            lambda: draw(member_E1),
            training.steps[number],
            training.rates[number],
            steps[what],
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            smoothing=SMOOTHING,
            seconds=training.seconds[number],
        )

    others, seeds = list(range(1, len(PROVERS))), training.seeds
    base = stage(initialise(SHAPE, seeds, generator), [0] * seeds, 0, "base")
    experts = stage(select(base, [s for s in range(seeds) for _ in others]), others * seeds, 1, "experts")
    both = {name: torch.cat([base[name], experts[name]]) for name in base}
    rows = [[s, *range(seeds + s * len(others), seeds + (s + 1) * len(others))] for s in range(seeds)]
    made = {name: p.bfloat16().float() for name, p in select(both, [m for row in rows for m in row]).items()}
    return made, {what: each.kept() for what, each in steps.items()}


def members_of(everything: Params, seed: int) -> Params:
    """The members of one seed, counted from 0."""
    return select(everything, list(range(seed * len(MEMBERS), (seed + 1) * len(MEMBERS))))


def save(members: Params, path: Path, about: dict[str, Any]) -> None:
    """One seed's members in half precision, which `train_members` has rounded them to, and how they were made."""
    from safetensors.torch import save_file

    metadata = {"shape": json.dumps(asdict(SHAPE)), "about": json.dumps(about)}
    with new_file(path) as file:
        save_file({name: p.bfloat16().cpu().contiguous() for name, p in members.items()}, file, metadata)


def missing(path: Path) -> str:
    """What to say where there are no members, and how to get some."""
    return (
        f"expected trained members of trig at {path}, where they come with the package; there is no such file. "
        f"{REINSTALL}, or train them on a GPU and put them there: tessellm reproduce trig --size full -o OUT && "
        f"cp OUT/{MEMBERS_FILE} {shlex.quote(str(path))}"
    )


def load(path: Path) -> tuple[Params, dict[str, Any]]:
    """Members that come with the package, and how they were made."""
    from safetensors import safe_open

    if not path.is_file():
        raise CheckpointError(missing(path))
    with stored(path, REINSTALL), safe_open(path, "pt") as file:
        metadata = file.metadata()
        if json.loads(metadata["shape"]) != asdict(SHAPE):
            raise ValueError("members of another shape")
        return {name: file.get_tensor(name).float() for name in file.keys()}, json.loads(metadata["about"])
