"""`tessellm tune`: weights, and perhaps the rule, from development texts or problems."""

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
from .shared import (
    PLAIN,
    SEEDS,
    JsonPath,
    ModelPath,
    Placement,
    as_option,
    err,
    numbers,
    on_command_line,
    out,
    words,
    write_json,
)


@dataclass(frozen=True)
class ByScore:
    """To tune by score on problems instead of texts"""

    tasks: Annotated[str, typer.Option(help="Tasks that development problems are of; the rest goes with it.")] = ""
    rules: Annotated[str, typer.Option(help="Rules to choose among.")] = ""
    weights: Annotated[str, typer.Option(help="Weights to try.")] = "0.5,0.75,1,1.25,1.5"
    data: Annotated[Path | None, typer.Option(help="Local data, see docs/evaluate.md.")] = None
    develop: Annotated[int, typer.Option(min=1, help="Development problems per task.")] = 50
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A folder; a stopped run goes on there.")] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Problems that are decoded at once.")] = 8
    engine: Annotated[str, typer.Option(help="auto, or reference for the slow path.")] = "auto"
    seed: Annotated[int, typer.Option(**SEEDS, help="Which problems are for development.")] = 0


@dataclass(frozen=True)
class Saving:
    """To keep what was found"""

    save: Annotated[Path | None, typer.Option(help="Save the composition with what was found here.")] = None
    self_contained: Annotated[bool, typer.Option(help="With --save, store the members' weights inside.")] = False


def tune(
    given: typer.Context,
    model: ModelPath,
    development: Annotated[
        Path | None,
        typer.Argument(metavar="DEV", help="Texts: .jsonl with text and perhaps prompt, or lines of text."),
    ] = None,
    *,
    score: ByScore,
    saving: Saving,
    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share kept to judge by.")] = 0.25,
    placement: Placement,
    json_path: JsonPath = None,
) -> None:
    """Find the experts' weights, by likelihood or by task score.

    Examples: tessellm tune out dev.jsonl --save tuned; tessellm tune out --tasks gsm8k,mbpp --rules product,evidence
    """
    _check(given, development, score, saving)
    from ..checkpoint import check_target
    from ..provenance import environment

    if saving.save is not None:
        check_target(saving.save)
    if development is not None:
        composition, tuning, rule = by_likelihood(model, development, held_out, placement)
    else:
        composition, tuning, rule = by_score(model, score, held_out, placement)
    if saving.save is not None:
        own = composition.config.rule["name"] == rule
        composition.set_rule(None if own else rule, weights=list(tuning.weights.values()))
        composition.save_pretrained(saving.save, self_contained=saving.self_contained)
        out.print(f"saved with these weights → {escape(str(saving.save))}", soft_wrap=True)
    write_json(json_path, {**asdict(tuning), "seed": score.seed, **environment("lm_eval", "evalplus")})


def _check(given: typer.Context, development: Path | None, score: ByScore, saving: Saving) -> None:
    """Refuse options that do not go together."""
    if (development is None) == (not score.tasks):
        raise RecipeError(
            "expected either texts, to tune by likelihood (tessellm tune MODEL DEV), or tasks, to tune by score "
            "(tessellm tune MODEL --tasks gsm8k); got " + ("both" if score.tasks else "neither")
        )
    if saving.self_contained and saving.save is None:
        raise RecipeError("--self-contained goes with --save FOLDER: without it nothing is stored")
    if development is not None:
        for name in on_command_line(given, (field.name for field in fields(ByScore))):
            raise RecipeError(f"{as_option(name)} goes with --tasks: likelihood finds weights, under the model's rule")


def by_likelihood(model: str, development: Path, held_out: float, placement: Placement) -> tuple[Any, Any, str]:
    """The composition, what was found, and the rule that goes with it."""
    from ..text.inputs import read_examples
    from ..text.prompts import encode_examples
    from ..tune.likelihood import tune as find_weights

    examples = read_examples(development)
    composition = placement.load(model)
    texts = encode_examples(composition, examples)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("scoring", total=len(texts))
        tuning = find_weights(
            composition, texts, held_out, progress=lambda done, total: progress.update(task, completed=done)
        )
    show_weights(composition, tuning.weights)
    out.print(f"log-likelihood a token: {tuning.before:.4f} → {tuning.after:.4f} on {tuning.tokens} tokens")
    before, after = tuning.held_out_before, tuning.held_out_after
    if before is not None and after is not None:
        out.print(f"held out: {before:.4f} → {after:.4f} on {tuning.held_out_tokens} tokens")
        if after <= before:
            err.print(
                "note: the weights found do not help the texts held out. Give more texts, or leave them as they are"
            )
    elif held_out:
        err.print("note: there are too few texts to hold any out, so nothing judges the weights found")
    if tuning.texts_left_out:
        err.print(f"note: {tuning.texts_left_out} texts were left out: shorter than two tokens, or past the memory")
    return composition, tuning, composition.config.rule["name"]


def by_score(model: str, score: ByScore, held_out: float, placement: Placement) -> tuple[Any, Any, str]:
    """The same by score on problems."""
    from ..compose import rule_entry
    from ..errors import require
    from ..evaluate.runner import Runner
    from ..evaluate.splits import Part
    from ..files import going_on
    from ..rules import LARGEST_WEIGHT

    require("lm_eval", "eval")
    from ..evaluate.evaluation import check_folder, identity
    from ..tune.score import Trial, tune_by_score

    settings: dict[str, Any] = {
        "tasks": words(score.tasks),
        "rules": words(score.rules),
        "values": numbers(score.weights, "--weights"),
        "part": Part(score.develop, score.seed),
        "held_out": held_out,
    }
    running: dict[str, Any] = {"data": score.data, "batch_size": score.batch_size, "engine": score.engine}
    output = score.output
    for rule in settings["rules"]:
        rule_entry(rule)
    if not settings["values"]:
        raise RecipeError("--weights: expected at least one weight to try")
    if not all(abs(value) <= LARGEST_WEIGHT for value in settings["values"]):
        raise RecipeError(f"--weights: expected numbers within ±{LARGEST_WEIGHT:,.0f}; got {settings['values']}")
    composition = placement.load(model)

    def tried(trial: Trial) -> None:
        shown = ", ".join(f"{name} {weight:g}" for name, weight in trial.weights.items())
        err.print(f"{trial.rule}, {shown}: {100 * trial.score:.1f} %", markup=False)

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:

        def started(name: str, task: str) -> Callable[[int], None]:
            bar = progress.add_task(f"{name}, {task}", total=None)
            return lambda done: progress.advance(bar, done)

        runner = Runner(**running, progress=started, note=lambda text: err.print(f"note: {text}"))
        if output is not None:
            runner.check(settings["tasks"], settings["part"])
            told = {**settings, "part": asdict(settings["part"]), "data": str(running["data"])}
            check_folder(output, {"tune": told, "model": identity(composition)})
        journals = output / "journals" if output is not None else None
        with going_on(output):
            tuning = tune_by_score(composition, runner, journals=journals, tried=tried, **settings)
    show_weights(composition, tuning.weights)
    out.print(f"rule: {composition.config.rule['name']} → {tuning.rule}")
    out.print(f"score: {100 * tuning.before:.1f} % → {100 * tuning.after:.1f} % on {tuning.problems} problems")
    if tuning.held_out_before is not None and tuning.held_out_after is not None and tuning.difference is not None:
        judged = f"{100 * tuning.held_out_before:.1f} % → {100 * tuning.held_out_after:.1f} %"
        out.print(f"held out: {judged} on {tuning.held_out_problems} problems (p = {tuning.difference.p:.2g})")
    for task, found in tuning.development.items():
        out.print(f"{task}: {found}", markup=False)
    return composition, tuning, tuning.rule


def show_weights(composition: Any, weights: dict[str, float]) -> None:
    table = Table("expert", "weight before", "weight after", **PLAIN)
    for name, before in zip(weights, composition.config.weights, strict=True):
        table.add_row(name, f"{before:.3f}", f"{weights[name]:.3f}")
    out.print(table)
