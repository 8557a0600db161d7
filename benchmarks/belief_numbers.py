"""What the rule `belief` hears of real texts, stored once, so that its constants can be tried without the members.

For every usual prompt (those that habits come from) and every development text of the five domains and of capitals,
whose prompts concern none of them: the rule's numbers of each prompt row, and each law's log-probability of each token
of the reference answer. One file per training of the experts, in the folder given; what is there is not made again.

Run: python benchmarks/belief_numbers.py OUT TEXTS-PER-SKILL SEED=ADAPTERS [SEED=ADAPTERS …]
where ADAPTERS is a folder with an adapter per skill, or a form of their names such as trained/{}-2. The data are in
TESSELLM_REAL_DATA. On a GPU some 30 s per training, on a CPU (one thread) 4 s per text.

Shapes: K experts, L laws, B texts, T time, V vocabulary, A averaged numbers, N numbers of a last row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tessellm.experiments.real.members import Experts, Places, load_base
from tessellm.experiments.real.packing import Text
from tessellm.experiments.real.reading import _batches
from tessellm.experiments.real.skills import DOMAINS, read
from tessellm.experiments.real.tasks import encode
from tessellm.model import ComposedForCausalLM
from tessellm.model.chat_marks import in_chat
from tessellm.model.habits import _marked
from tessellm.rules import normalised
from tessellm.rules.belief import Belief
from tessellm.rules.laws import read_rows

USUAL, PLAIN = "usual", "plain"
AT_ONCE = {"cpu": 1, "cuda": 1 << 29}  # logits of texts that are read together


class Heard(NamedTuple):
    """What the rule hears of one text."""

    averaged_TKA: Tensor  # of the prompt's rows, the template's opening left out
    now_KN: Tensor  # of its last one
    said_TL: Tensor  # every law's log-probability of each token of the answer; [0, L] without one


@torch.inference_mode()
def hear(model: ComposedForCausalLM, texts: Sequence[Text], opening: int) -> Iterator[Heard]:
    """Run all members over some texts. Padding comes last, where it changes nothing before it."""
    rows = [[*prompt, *answer] for prompt, answer in texts]
    longest = max(map(len, rows))
    ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
    keep = longest - opening
    found = read_rows(normalised([model.member_logits(name, ids_BT, None, keep, {}) for name in model.members]))
    for number, (prompt, answer) in enumerate(texts):
        last = len(prompt) - opening - 1
        law_LTV = found.laws(number, slice(last, last + len(answer)))
        token_T = torch.tensor(answer, dtype=torch.long, device=model.device)
        said_LT = law_LTV.gather(-1, token_T[None, :, None].expand(len(law_LTV), -1, 1))[..., 0]
        averaged_TKA, now_KN = found.averaged_BTKA[number, : last + 1], found.now_BTKN[number, last]
        yield Heard(averaged_TKA.cpu().clone(), now_KN.cpu().clone(), said_LT.T.cpu().contiguous())


def texts_of(model: ComposedForCausalLM, data: Path, count: int) -> dict[str, list[Text]]:
    """Usual prompts, and development texts by skill; of capitals the prompts alone."""
    usual: list[Text] = [(ids, []) for ids in in_chat(model.tokenizer)]
    skills = {skill: encode(model.tokenizer, read(data, skill, "dev", count)) for skill in DOMAINS}
    plain: list[Text] = [(ids, []) for ids, _ in encode(model.tokenizer, read(data, "capitals", "dev", count))]
    return {USUAL: usual, **skills, PLAIN: plain}


def heard_of(model: ComposedForCausalLM, texts: Sequence[Text], opening: int) -> list[tuple[Tensor, ...]]:
    """What the rule hears of each text, in their order; texts of about one length are read together."""
    most = AT_ONCE[model.device.type] // (len(model.members) * model.config.vocab_size)
    found: dict[int, tuple[Tensor, ...]] = {}
    for batch in _batches(texts, most):
        heard = hear(model, [texts[number] for number in batch], opening)
        found |= {number: tuple(one) for number, one in zip(batch, heard, strict=True)}
    return [found[number] for number in range(len(texts))]


def store(places: Places, adapters: str, count: int, path: Path, device: str) -> None:
    folders = {skill: Path(adapters.format(skill) if "{}" in adapters else f"{adapters}/{skill}") for skill in DOMAINS}
    model = Experts(load_base(places, device), folders).composed
    marked = _marked(model, Belief())
    assert marked is not None, "the base has a chat template"
    opening, began = len(marked[0].opening), time.monotonic()
    found = torch.load(path) if path.exists() else {}
    for kind, texts in texts_of(model, places.data, count).items():
        if kind not in found:
            found[kind] = heard_of(model, texts, opening)
            torch.save(found, path)
        print(f"{path.name}: {kind}, {len(texts)} texts, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    out, count, runs = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    places, device = Places.found(), "cuda" if torch.cuda.is_available() else "cpu"
    out.mkdir(parents=True, exist_ok=True)
    for seed, adapters in (run.split("=", 1) for run in runs):
        store(places, adapters, count, out / f"{seed}.pt", device)


if __name__ == "__main__":
    main()
