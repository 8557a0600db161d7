"""What the rule `belief` writes in conversations: answers behind another turn, of the same skill or of another, behind
small talk and a system prompt, judged as in docs/experiments-real.md, against the right expert given the same messages.

    python benchmarks/conversations_written.py [--prompts 4]     # 2 minutes, and 5 per prompt of each skill, one core

Greedy, float32, the repository's adapters of SmolLM2. Development prompts of TESSELLM_REAL_DATA (else the repository's
sample), for code the problems of HumanEval, whose answers can be judged. The first six prompts of each skill were
looked at while the rule was made. Writes results/conversations-written.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tessellm
from conversations import Messages, conversations
from reference_overhead import RESULTS
from tessellm.evaluate.writer import Ask, BlockWriter
from tessellm.experiments.lab.claims import Claim, Result, at_least
from tessellm.experiments.real.measure import Task
from tessellm.experiments.real.skills import DOMAINS, SKILLS, Example, adapters_folder, data_folder, read
from tessellm.experiments.real.tasks import function_prompt
from tessellm.model import ComposedForCausalLM
from tessellm.model.variants import alone
from tessellm.text.options import TextOptions

KEPT = 0.95  # of the right expert's score
COMPOSED, EXPERT = "belief", "the right expert"
ALONE = "nothing"  # before a prompt: no conversation


class Asked(NamedTuple):
    """A prompt, and what stands before it."""

    skill: str
    behind: str
    example: Example
    messages: Messages


def asked_for(texts: dict[str, list[Example]], numbers: Sequence[int]) -> Iterator[Asked]:
    for skill in DOMAINS:
        for number in numbers:
            place = number % len(texts[skill])
            for behind, messages in conversations(skill, place, texts):
                yield Asked(skill, behind, texts[skill][place], messages)


def written(model: ComposedForCausalLM, asked: Sequence[Asked], batch: int) -> list[str]:
    """Greedy answers."""
    asks = [
        Ask(tuple(_ids(model.tokenizer, each.messages)), TextOptions(SKILLS[each.skill].new_tokens)) for each in asked
    ]
    found = dict(BlockWriter(model, batch, note=print).write(asks))
    failed = [each.error for each in found.values() if each.error]
    if failed:
        raise RuntimeError(f"{len(failed)} prompts failed, the first since {failed[0]}")
    return [found[place].text for place in range(len(asks))]


def _ids(tokenizer: Any, messages: Messages) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def scores(asked: Sequence[Asked], texts: Sequence[str]) -> list[float]:
    """How right each text is, judged as in the real experiment."""
    found = [0.0] * len(asked)
    for skill in DOMAINS:
        own = [place for place, each in enumerate(asked) if each.skill == skill]
        task = Task(skill, (), [asked[place].example for place in own])
        for place, score in zip(own, task.scores([texts[place] for place in own])["right"], strict=True):
            found[place] = score
    return found


def claims_of(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Of all conversations together, and behind each kind of earlier turn."""
    groups = {"in conversations": [row for row in rows if row["behind"] != ALONE]}
    for row in rows:
        groups.setdefault(f"behind {row['behind']}", []).append(row)
    found = []
    for name, own in groups.items():
        right = {who: sum(row["right"][who] for row in own) for who in (COMPOSED, EXPERT)}
        kept = f"{name}: answers right, over those of the right expert"
        share = right[COMPOSED] / right[EXPERT] if right[EXPERT] else float("nan")
        found += [
            at_least(name, kept, share, KEPT) if name == "in conversations" else Claim(name, kept, share),
            Claim(f"{name}, right", f"{name}: answers right, of {len(own)}", right),
            Claim(
                f"{name}, same",
                f"{name}: share of answers that are the expert's, letter for letter",
                sum(row["same"] for row in own) / len(own),
            ),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options, began = parser.parse_args(), time.monotonic()
    torch.set_num_threads(1)
    data, folder = data_folder(None), adapters_folder()
    texts = {skill: read(data, skill, "dev", None) for skill in DOMAINS if skill != "code"}
    texts["code"] = [function_prompt(problem) for problem in read(data, "humaneval", "test", None)]
    model = tessellm.compose("smollm2", {skill: str(folder / skill) for skill in DOMAINS}, dtype="float32")
    asked = list(asked_for(texts, range(options.first, options.first + options.prompts)))
    answers: dict[str, list[str]] = {EXPERT: []}
    for skill in DOMAINS:
        own = [each for each in asked if each.skill == skill]
        answers[EXPERT] += written(alone(model, skill), own, options.batch)
        print(f"{skill} alone: {time.monotonic() - began:.0f} s", flush=True)
    answers[COMPOSED] = written(model, asked, options.batch)
    right = {who: scores(asked, own) for who, own in answers.items()}
    rows = [
        {
            "skill": each.skill,
            "behind": each.behind,
            "right": {who: right[who][place] for who in right},
            "same": answers[COMPOSED][place] == answers[EXPERT][place],
            "texts": {who: own[place] for who, own in answers.items()},
        }
        for place, each in enumerate(asked)
    ]
    claims = claims_of(rows)
    for claim in claims:
        print(f"{claim.statement}: {claim.value}")
    Result("conversations-written", claims, 0, "cpu", time.monotonic() - began, tables={"answers": rows}).write(
        options.out
    )


if __name__ == "__main__":
    main()
