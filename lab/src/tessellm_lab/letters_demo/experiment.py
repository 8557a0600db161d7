"""The letters demo: train small letter experts, compose them, show who wrote what.

It does the library's whole job on members that it makes in seconds: members are saved as checkpoints, composed from
their folders, saved as one checkpoint, and loaded back with `AutoModelForCausalLM` before anything is measured.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import tessellm
from tessellm.demo.clock import Clock, is_demo, no_loading_bars
from tessellm.diagnose import Diagnosis
from tessellm.files import new_directory, write_text
from tessellm.rules import DEFAULT

from ..common.threads import one_thread
from .figure import EXPERT_COLOURS, save_figure
from .letters import (
    END_OF_PROMPT,
    EOS,
    LetterSettings,
    accuracy,
    build_tokenizer,
    complete,
    fine_tune,
    sample_strings,
    train_base,
    transform,
)

EXPERTS: dict[str, dict[str, str]] = {"a_to_k": {"A": "K"}, "m_to_b": {"M": "B"}, "t_to_x": {"T": "X"}}
MEMBERS: dict[str, dict[str, str]] = {"base": {}, **EXPERTS}
JOINT = {letter: other for replacements in EXPERTS.values() for letter, other in replacements.items()}
LABELS = {"base": "base"} | {
    name: ", ".join(f"{letter}→{other}" for letter, other in replacements.items())
    for name, replacements in EXPERTS.items()
}
COMPOSED, BY_DEFAULT = "composed", "composed, default rule"
EXAMPLES = ("HELLO MATH", "TOMATO JAM", "MARMALADE", "TEAM MATE", "I AM HERE", "QUICK FOX")
FIGURE_EXAMPLE = "THAT MAMMOTH"
REPORT = "report.html"
DIAGNOSED = 26  # unseen strings, beside the examples
TEST_SEED = 1 << 20  # far from the seeds of training


def run_letters_demo(
    out: Path,
    seed: int = 0,
    console: Console | None = None,
    *,
    settings: LetterSettings | None = None,
    test_strings: int = 2000,
) -> dict[str, Any]:
    """Runs the demo, writes checkpoints, a picture, a report and demo.json into `out`; returns what demo.json holds."""
    out, console, settings = Path(out), console or Console(), settings or LetterSettings()
    clock = Clock()
    with new_directory(out, is_demo) as folder, one_thread(), no_loading_bars():
        console.print(_introduction())
        with clock.phase("train"):
            train_members(folder / "members", seed, settings, console)
        with clock.phase("compose, save and load"):
            composed, tokenizer = compose_members(folder)
        models = {name: _load(folder / "members" / name) for name in MEMBERS} | {COMPOSED: composed}
        console.print(_examples_table(models, tokenizer, settings.max_length))
        with clock.phase("evaluate"), console.status(f"{test_strings:,} unseen strings through every model"):
            accuracies = evaluate(models, tokenizer, seed, settings, test_strings)
            composed.set_rule(DEFAULT)
            accuracies |= evaluate({BY_DEFAULT: composed}, tokenizer, seed, settings, test_strings)
            composed.set_rule("product")
        console.print(_accuracy_table(accuracies, test_strings))
        with clock.phase("draw"):
            draw(folder / "demo.png", models, tokenizer, FIGURE_EXAMPLE[: settings.max_length])
        with clock.phase("diagnose"), console.status("diagnosing the composition"):
            found = diagnose_composition(composed, seed, settings)
            write_text(folder / REPORT, found.to_html())
        console.print(Text.assemble("Diagnosis: ", found.advice[0].text, "\n"), soft_wrap=True)
        report = _report(seed, settings, test_strings, accuracies, clock) | {"diagnosis": found.to_dict()}
        write_text(folder / "demo.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    console.print(_next_commands(out, report["seconds"]["total"]), soft_wrap=True)
    return report


def train_members(folder: Path, seed: int, settings: LetterSettings, console: Console) -> None:
    """Trains the base and its experts, and saves each as a checkpoint with its tokenizer."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:

        def train(name: str, steps: int, job: Any, *arguments: Any) -> Any:
            task = bars.add_task(f"training {LABELS[name]:<4}", total=steps, loss=float("nan"))
            model = job(*arguments, settings, lambda done, loss: bars.update(task, completed=done, loss=loss))
            model.save_pretrained(folder / name)
            build_tokenizer().save_pretrained(folder / name)
            return model

        base = train("base", settings.base_steps, train_base, seed)
        for number, (name, replacements) in enumerate(EXPERTS.items(), 1):
            train(name, settings.expert_steps, fine_tune, base, replacements, seed + number)


def compose_members(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """From the members' folders to one checkpoint, and back from it."""
    members = folder / "members"
    model = tessellm.compose(base=members / "base", experts={name: members / name for name in EXPERTS}, rule="product")
    model.save_pretrained(folder / "letters", self_contained=True)
    return _load(folder / "letters"), AutoTokenizer.from_pretrained(folder / "letters")


def evaluate(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    settings: LetterSettings,
    test_strings: int,
) -> dict[str, dict[str, float]]:
    """Exact match of every model at its own task and at the joint one; about a third of the letters need an expert."""
    strings = unseen_strings(test_strings, seed, settings)
    accuracies = {}
    for name, model in models.items():
        answers = complete(model, tokenizer, strings)
        own = MEMBERS.get(name, JOINT)
        accuracies[name] = {"own": accuracy(answers, strings, own), "joint": accuracy(answers, strings, JOINT)}
    return accuracies


def unseen_strings(count: int, seed: int, settings: LetterSettings) -> list[str]:
    return sample_strings(
        count,
        TEST_SEED + seed,
        min_length=(settings.max_length + 1) // 2,
        max_length=settings.max_length,
        favoured="".join(JOINT),
        share=0.3,
    )


def diagnose_composition(composed: Any, seed: int, settings: LetterSettings) -> Diagnosis:
    """On the printed examples and some unseen strings, without their answers."""
    strings = [*(each[: settings.max_length] for each in EXAMPLES), *unseen_strings(DIAGNOSED, seed, settings)]
    prompts = [string + END_OF_PROMPT for string in strings]
    return tessellm.diagnose(composed, prompts, max_new_tokens=settings.max_length + 1, seed=seed)


def draw(path: Path, models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, string: str) -> None:
    """The picture of one generation."""
    answers = {name: complete(model, tokenizer, [string])[0] for name, model in models.items()}
    kl_KT = divergences(models[COMPOSED], tokenizer, string, answers[COMPOSED])
    experts = {LABELS[name]: answers[name] for name in EXPERTS}
    save_figure(path, string, answers["base"], experts, answers[COMPOSED], kl_KT.tolist())


def divergences(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, string: str, answer: str) -> Tensor:
    """KL(p_i‖p_b) in nats of every expert at every token of the answer, its end included."""
    prompt: Any = tokenizer(string + END_OF_PROMPT, return_tensors="pt")
    line: Any = tokenizer(string + END_OF_PROMPT + answer + EOS, return_tensors="pt")
    with torch.no_grad():
        logp_MBTV = model(line.input_ids, output_member_logprobs=True).member_logprobs
    logp_MTV = logp_MBTV[:, 0, prompt.input_ids.shape[1] - 1 : -1]  # row t predicts token t + 1
    experts_KTV, base_TV = logp_MTV[1:], logp_MTV[0]
    return (experts_KTV.exp() * (experts_KTV - base_TV)).sum(-1)


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def _report(
    seed: int, settings: LetterSettings, test_strings: int, accuracies: dict[str, Any], clock: Clock
) -> dict[str, Any]:
    return {
        "seed": seed,
        "test_strings": test_strings,
        "accuracy": accuracies,
        "seconds": clock.report(),
        "settings": vars(settings),
        "versions": {
            "tessellm": tessellm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": 1},
    }


def _introduction() -> str:
    experts = ", ".join(LABELS[name] for name in EXPERTS)
    return (
        "A base learns to copy a string. From it come three experts that copy, too, but each replaces one letter: "
        f"{experts}.\nComposed without training, they must do all three at once.\n"
    )


def _examples_table(
    models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Table:
    table = Table("input", *LABELS.values(), COMPOSED, box=box.SIMPLE_HEAD, pad_edge=False)
    strings = [string[:max_length] for string in EXAMPLES]
    answers = [complete(model, tokenizer, strings) for model in models.values()]
    for string, *row in zip(strings, *answers, strict=True):
        table.add_row(string, *(_highlighted(string, answer) for answer in row))
    return table


def _highlighted(string: str, answer: str) -> Text:
    """Letters that were changed, in the colour of the expert whose task that is."""
    colours = {
        letter: EXPERT_COLOURS[number]
        for number, replacements in enumerate(EXPERTS.values())
        for letter in replacements
    }
    text = Text(answer)
    for t, (letter, written) in enumerate(zip(string, answer, strict=False)):
        if written != letter:
            text.stylize(f"bold white on {colours.get(letter, '#AA0000')}", t, t + 1)
    return text


def _accuracy_table(accuracies: Mapping[str, Mapping[str, float]], test_strings: int) -> Table:
    title = f"{test_strings:,} unseen strings, whole answer right"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model")
    table.add_column("its own task", justify="right")
    table.add_column("all three at once", justify="right")
    for name, scores in accuracies.items():
        style = "" if name in MEMBERS else "bold"
        own = f"{scores['own']:.2%}" if name in MEMBERS else ""
        table.add_row(LABELS.get(name, name), own, f"{scores['joint']:.2%}", style=style)
    return table


def _next_commands(out: Path, seconds: float) -> Text:
    expected = transform("HELLO MATH", JOINT)
    return Text.assemble(
        f"Done in {seconds:.0f} s. The picture is {out / 'demo.png'}. "
        f"Who wrote which letter, and what interferes, is in {out / REPORT}. "
        f"The composition is a checkpoint, {out / 'letters'}:\n\n",
        (f'  tessellm generate {out / "letters"} "HELLO MATH>"', "bold"),
        (f"    # {expected}\n", "dim"),
        (f"  tessellm inspect {out / 'letters'}\n\n", "bold"),
        "or, in Python:\n\n",
        (
            "  import tessellm\n"
            "  from transformers import pipeline\n"
            f'  composed = pipeline("text-generation", model="{out / "letters"}")\n'
            '  composed("HELLO MATH>", max_new_tokens=16, do_sample=False)\n',
            "bold",
        ),
    )
