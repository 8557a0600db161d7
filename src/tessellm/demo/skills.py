"""The demo: one composition of a real chat model and five LoRA experts answers prompts of every kind.

The base is SmolLM2-135M-Instruct from an installed package, the experts are adapters of this repository. They are
composed by the rule `mixture`; nothing is trained. A second run takes the composition that the first one left.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import tessellm

from ..diagnose import Diagnosis
from ..errors import MissingExtraError, TessellmError
from ..files import new_directory, write_text
from ..load import load_model
from ..members import sources
from ..model import ComposedForCausalLM
from ..text.chat import Chat
from .adapters import find_experts
from .answers import DemoAnswer, answer_all, answer_alone
from .clock import Clock, is_demo, no_loading_bars
from .heat_map import save_heat_map
from .prompts import PROMPTS, Asked
from .shown import EXPERTS, PICTURE, REPORT, answers_table, next_commands, posterior_table

BASE, RULE = "smollm2", "mixture"
NEW_TOKENS = 64
DIAGNOSED = 3


def run_skills_demo(
    out: Path,
    adapters: Path | None = None,
    console: Console | None = None,
    *,
    base: str | Path = BASE,
    prompts: Sequence[Asked] = PROMPTS,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, Any]:
    """Run the demo, write the composition, a picture, a report and demo.json into `out`; return what demo.json says."""
    out, console, clock = Path(out), console or Console(), Clock()
    experts = find_experts(adapters)
    sources.find(base, "the demo's base")
    with new_directory(out, is_demo) as folder, no_loading_bars():
        console.print(_introduction(experts), soft_wrap=True)

        def phase(name: str, work: Callable[[], Any]) -> Any:
            with clock.phase(name), console.status(name):
                result = work()
            console.print(f"{name}, {clock.seconds[name]:.0f} s", style="dim")
            return result

        name = f"loaded the base and {len(experts)} experts, calibrated the router"
        model = phase(name, lambda: compose_experts(out / EXPERTS, base, experts))
        phase("saved the composition", lambda: model.save_pretrained(folder / EXPERTS))
        members = list(model.config.member_names)
        answers = phase(f"composed: {len(prompts)} answers", lambda: answer_all(model, prompts, new_tokens))
        phase("members alone: the same prompts", lambda: answer_by_members(model, answers, new_tokens))
        console.print("")
        console.print(answers_table(answers, members, console.color_system is not None))
        console.print(posterior_table(answers, members))
        phase("drew the picture", lambda: _draw(folder / PICTURE, answers, members, console))
        found = phase(f"diagnosed {DIAGNOSED} answers of different kinds", lambda: diagnose_answers(model, answers))
        write_text(folder / REPORT, found.to_html())
        report = _report(answers, members, clock) | {"diagnosis": found.to_dict()}
        write_text(folder / "demo.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    seconds = report["seconds"]["total"]
    console.print("")
    console.print(next_commands(out, seconds, prompts[2].prompt), soft_wrap=True)
    return report


def compose_experts(saved: Path, base: str | Path, experts: dict[str, Path]) -> ComposedForCausalLM:
    """Compose; or load what an earlier run composed of the same members, with its router."""
    if (saved / "config.json").is_file():
        try:
            model = load_model(str(saved))
        except TessellmError:  # its members have moved or changed
            model = None
        if model is not None and _is_made_of(model, base, experts):
            return model
    return tessellm.compose(base, experts, rule=RULE)


def _is_made_of(model: ComposedForCausalLM, base: str | Path, experts: dict[str, Path]) -> bool:
    found = {member.name: member.source.path for member in model.loaded_members if member.source}
    wanted = {"base": base, **experts}
    paths = {name: sources.find(source, f"member {name!r}").path for name, source in wanted.items()}
    return found == paths and model.config.rule["name"] == RULE


def answer_by_members(model: ComposedForCausalLM, answers: Sequence[DemoAnswer], new_tokens: int) -> None:
    """The base answers every prompt, an expert those of its kind."""
    for name in model.config.member_names:
        own = [answer for answer in answers if name in ("base", answer.asked.expert)]
        if own:
            answer_alone(model, name, own, new_tokens)


def diagnose_answers(model: ComposedForCausalLM, answers: Sequence[DemoAnswer]) -> Diagnosis:
    """On some answers of different kinds as they were written, the shortest, each read by itself: without padding."""
    kinds: dict[str | None, DemoAnswer] = {}
    for answer in sorted(answers, key=lambda answer: len(answer.asked.prompt + answer.text)):
        if answer.text:
            kinds.setdefault(answer.asked.expert, answer)
    texts = [{"prompt": each.asked.prompt, "text": each.text} for each in kinds.values()]
    return tessellm.diagnose(model, texts[:DIAGNOSED], chat=Chat(), batch_size=1)


def _draw(path: Path, answers: Sequence[DemoAnswer], members: Sequence[str], console: Console) -> None:
    try:
        save_heat_map(path, answers, members)
    except MissingExtraError as error:
        console.print(f"no picture: {error}", markup=False)


def _introduction(experts: dict[str, Path]) -> str:
    return (
        "SmolLM2-135M-Instruct, a small chat model, and five LoRA adapters of it, each for one kind of request: "
        f"{', '.join(experts)}.\nComposed without training, one model must tell from the prompt which should answer.\n"
    )


def _report(answers: Sequence[DemoAnswer], members: Sequence[str], clock: Clock) -> dict[str, Any]:
    return {
        "members": list(members),
        "rule": RULE,
        "answers": [
            {"prompt": each.asked.prompt, "expert": each.asked.expert, "reference": each.asked.answer}
            | {"composed": each.text, "alone": each.alone, "posterior": each.share_TM[0], "owners": each.owners()}
            for each in answers
        ],
        "seconds": clock.report(),
        "versions": {
            "tessellm": tessellm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }
