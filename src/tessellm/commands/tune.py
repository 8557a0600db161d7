"""`tessellm tune`: weights of Eq. 2 from development texts or problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ..errors import RecipeError
from .options import ChatOptions, SpeakerOptions
from .shared import (
    PLAIN,
    SEEDS,
    JsonPath,
    ModelPath,
    as_option,
    err,
    numbers,
    on_command_line,
    out,
    words,
    write_json,
)

ONE_MEMBER = "weights are of several experts"  # what a member alone has none of


@dataclass(frozen=True)
class ByScore:
    """To tune by score on problems instead of texts"""

    tasks: Annotated[str, typer.Option(help="Tasks that development problems are of; the rest goes with it.")] = ""
    try_weights: Annotated[str, typer.Option(help="Weights to try for every expert.")] = "0.5,0.75,1,1.25,1.5"
    data: Annotated[Path | None, typer.Option(help="Local data, see docs/evaluate.md.")] = None
    develop: Annotated[int, typer.Option(min=1, help="Development problems per task.")] = 50
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A folder; a stopped run goes on there.")] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Problems that are decoded at once.")] = 8


@dataclass(frozen=True)
class Judging:
    """To judge what was found"""

    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of texts or problems kept for that.")] = 0.25
    seed: Annotated[int, typer.Option(**SEEDS, help="Which ones; with --tasks also which are for development.")] = 0


@dataclass(frozen=True)
class AskedOptions(SpeakerOptions, ChatOptions):
    """Who speaks, how prompts are put, and where"""


@dataclass(frozen=True)
class Saving:
    """To keep what was found"""

    save: Annotated[Path | None, typer.Option(help="Save the composition with what was found here.")] = None
    self_contained: Annotated[bool, typer.Option(help="With --save, store the members' weights inside.")] = False


def tune(
    given: typer.Context,
    model: ModelPath,
    development: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DEV…", help="Texts: .jsonl with text, perhaps prompt and skill, or lines of text."),
    ] = None,
    *,
    judging: Judging,
    score: ByScore,
    saving: Saving,
    asked: AskedOptions,
    json_path: JsonPath = None,
) -> None:
    """Find the experts' weights in Eq. 2, by likelihood or by task score.

    By likelihood (MODEL DEV…): the weights under which texts of yours are likeliest; minutes. Some texts are held out,
    and weights that lose there against equal ones are not kept. By score (MODEL --tasks): the weights that solve most
    problems; hours. MODEL's rule is product, or becomes it by --rule product.

    Examples: tessellm tune out dev.jsonl --rule product --save tuned; tessellm tune out --tasks gsm8k,mbpp
    """
    _check(given, development, score, saving)
    from ..checkpoint import check_target
    from ..provenance import environment

    if saving.save is not None:
        check_target(saving.save)
    if development:
        composition, tuning = by_likelihood(model, development, judging, asked)
    else:
        composition, tuning = by_score(model, score, judging, asked)
    if saving.save is not None:
        composition.set_rule(weights=list(tuning.weights.values()))
        composition.save_pretrained(saving.save, self_contained=saving.self_contained)
        out.print(f"saved with these weights → {escape(str(saving.save))}", soft_wrap=True)
    write_json(json_path, {**asdict(tuning), "seed": judging.seed, **environment("lm_eval", "evalplus")})


def _check(given: typer.Context, development: list[Path] | None, score: ByScore, saving: Saving) -> None:
    """Refuse options that do not go together."""
    if bool(development) == bool(score.tasks):
        raise RecipeError(
            "expected either texts, to tune by likelihood (tessellm tune MODEL DEV), or tasks, to tune by score "
            "(tessellm tune MODEL --tasks gsm8k); got " + ("both" if score.tasks else "neither")
        )
    if saving.self_contained and saving.save is None:
        raise RecipeError("--self-contained goes with --save FOLDER: without it nothing is stored")
    if development:
        for name in on_command_line(given, (field.name for field in fields(ByScore))):
            raise RecipeError(f"{as_option(name)} goes with --tasks: without it nothing is scored")


def by_likelihood(model: str, development: list[Path], judging: Judging, asked: AskedOptions) -> tuple[Any, Any]:
    """The composition, and what was found."""
    from ..text.inputs import read_examples
    from ..text.prompts import encode_examples
    from ..tune.likelihood import check_product
    from ..tune.likelihood import tune as find_weights
    from ..tune.texts import DevelopmentText

    examples = read_examples(development)
    composition = asked.load_composition(model, ONE_MEMBER)
    check_product(composition)
    encoded = encode_examples(composition, [(each.prompt, each.text) for each in examples], asked.as_chat())
    texts = [
        DevelopmentText(tuple(ids), prompt, each.skill) for (ids, prompt), each in zip(encoded, examples, strict=True)
    ]
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        tuning = find_weights(composition, texts, judging.held_out, judging.seed, told)
    show_likelihood(composition, tuning, judging)
    return composition, tuning


def by_score(model: str, score: ByScore, judging: Judging, asked: AskedOptions) -> tuple[Any, Any]:
    """The same by score on problems."""
    from ..errors import require
    from ..evaluate.runner import Runner
    from ..evaluate.splits import Part
    from ..files import going_on
    from ..rules import LARGEST_WEIGHT

    require("lm_eval", "eval")
    from ..evaluate.evaluation import check_folder, identity
    from ..tune.likelihood import check_product
    from ..tune.score import Search, Trial, tune_by_score

    values = numbers(score.try_weights, "--try-weights")
    settings: dict[str, Any] = {
        "tasks": words(score.tasks),
        "part": Part(score.develop, judging.seed),
        "held_out": judging.held_out,
    }
    running: dict[str, Any] = {"data": score.data, "batch_size": score.batch_size}
    chat = asked.as_chat()
    output = score.output
    if not values:
        raise RecipeError("--try-weights: expected at least one weight to try")
    if not all(abs(value) <= LARGEST_WEIGHT for value in values):
        raise RecipeError(f"--try-weights: expected numbers within ±{LARGEST_WEIGHT:,.0f}; got {values}")
    composition = asked.load_composition(model, ONE_MEMBER)
    check_product(composition)

    def tried(trial: Trial) -> None:
        shown = ", ".join(f"{name} {weight:g}" for name, weight in trial.weights.items())
        err.print(f"{shown}: {100 * trial.score:.1f} %", markup=False)

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:

        def started(name: str, task: str) -> Callable[[int], None]:
            bar = progress.add_task(f"{name}, {task}", total=None)
            return lambda done: progress.advance(bar, done)

        runner = Runner(**running, progress=started, note=lambda text: err.print(f"note: {text}"), chat=chat)
        if output is not None:
            runner.check(settings["tasks"], settings["part"])
            told = {
                **settings,
                "values": values,
                "part": asdict(settings["part"]),
                "data": str(running["data"]),
            }
            put = {"chat": asdict(chat)} if chat is not None else {}
            check_folder(output, {"tune": told, "model": identity(composition), **put})
        journals = output / "journals" if output is not None else None
        with going_on(output):
            search = Search(composition, runner, journals=journals, tried=tried, **settings)
            tuning = tune_by_score(search, values)
    show_weights(composition, tuning.weights)
    out.print(f"score: {100 * tuning.before:.1f} % → {100 * tuning.after:.1f} % on {tuning.problems} problems")
    if tuning.held_out_before is not None and tuning.held_out_after is not None and tuning.difference is not None:
        judged = f"{100 * tuning.held_out_before:.1f} % → {100 * tuning.held_out_after:.1f} %"
        out.print(f"held out: {judged} on {tuning.held_out_problems} problems (p = {tuning.difference.p:.2g})")
    for task, found in tuning.development.items():
        out.print(f"{task}: {found}", markup=False)
    return composition, tuning


def show_likelihood(composition: Any, tuning: Any, judging: Judging) -> None:
    """What was found, what the texts held out say of it, and what a user should know."""
    show_weights(composition, tuning.weights)
    on = f"on {tuning.tokens} tokens of {tuning.texts} texts"
    out.print(f"log-likelihood per token: {tuning.before:.4f} → {tuning.after:.4f} {on}")
    if (judged := tuning.judgement) is not None:
        on = f"on {tuning.held_out_tokens} tokens of {judged.texts} texts, drawn by seed {judging.seed}"
        out.print(f"held out: {tuning.held_out_before:.4f} → {tuning.held_out_after:.4f} {on}")
        others = ", ".join(f"{name} {judged.mean(name):.4f}" for name in tuning.candidates if "each" in name)
        out.print(f"equal weights there: {others}")
        if len(judged.tokens) > 1:
            show_skills(judged, tuning.kept)
        if tuning.kept != "found":
            found = ", ".join(f"{name} {weight:.3f}" for name, weight in tuning.candidates["found"].items())
            err.print(
                f"note: the weights found ({found}; {judged.mean('found'):.4f}) do not help the texts held out, so "
                f"they are not kept; kept: {tuning.kept}. Give more texts, or leave the weights as they are",
                markup=False, soft_wrap=True,
            )  # fmt: skip
    elif judging.held_out:
        err.print("note: there are too few texts to hold any out, so nothing judges the weights found")
    if tuning.texts_too_short:
        err.print(f"note: {tuning.texts_too_short} texts were left out: shorter than two tokens")
    if tuning.texts_not_drawn:
        drawn = f"{tuning.texts} of {tuning.texts + tuning.texts_not_drawn} texts, drawn from every skill alike"
        err.print(f"note: weights were sought on {drawn}: more do not fit into the memory set aside for it")


def show_skills(judged: Any, kept: str) -> None:
    """Who gains and who loses by the weights kept, on the texts held out."""
    table = Table("held out, per token", "tokens", "before", "after", **PLAIN)
    after = judged.by_skill(kept)
    for skill, before in judged.by_skill("before").items():
        table.add_row(escape(skill), str(judged.tokens[skill]), f"{before:.4f}", f"{after[skill]:.4f}")
    out.print(table)


def show_weights(composition: Any, weights: dict[str, float]) -> None:
    table = Table("expert", "weight before", "weight after", **PLAIN)
    for name, before in zip(weights, composition.config.weights, strict=True):
        table.add_row(name, f"{before:.3f}", f"{weights[name]:.3f}")
    out.print(table)
