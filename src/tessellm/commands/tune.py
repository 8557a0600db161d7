"""`tessellm tune`: weights of Eq. 2 from development texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .options import ChatOptions, SpeakerOptions
from .shared import (
    PLAIN,
    SEEDS,
    JsonPath,
    ModelPath,
    err,
    out,
    write_json,
)

ONE_MEMBER = "weights are of several experts"  # what a member alone has none of


@dataclass(frozen=True)
class Judging:
    """To judge what was found"""

    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of texts kept for that.")] = 0.25
    seed: Annotated[int, typer.Option(**SEEDS, help="Which ones.")] = 0


@dataclass(frozen=True)
class AskedOptions(SpeakerOptions, ChatOptions):
    """Who speaks, how prompts are put, and where"""


@dataclass(frozen=True)
class Saving:
    """To keep what was found"""

    save: Annotated[Path | None, typer.Option(help="Save the composition with what was found here.")] = None


def tune(
    model: ModelPath,
    development: Annotated[
        list[Path],
        typer.Argument(metavar="DEV…", help="Texts: .jsonl with text, perhaps prompt and skill, or lines of text."),
    ],
    *,
    judging: Judging,
    saving: Saving,
    asked: AskedOptions,
    json_path: JsonPath = None,
) -> None:
    """Find the experts' weights in Eq. 2 under which texts of yours are likeliest.

    Some texts are held out, and weights that lose there against equal ones are not kept. MODEL's rule is product, or
    becomes it by --rule product.

    Example: tessellm tune out dev.jsonl --rule product --save tuned
    """
    from ..checkpoint import check_target
    from ..provenance import environment

    if saving.save is not None:
        check_target(saving.save)
    composition, tuning = by_likelihood(model, development, judging, asked)
    if saving.save is not None:
        composition.set_rule(weights=list(tuning.weights.values()))
        composition.save_pretrained(saving.save)
        out.print(f"saved with these weights → {escape(str(saving.save))}", soft_wrap=True)
    write_json(json_path, {**asdict(tuning), "seed": judging.seed, **environment()})


def by_likelihood(model: str, development: list[Path], judging: Judging, asked: AskedOptions) -> tuple[Any, Any]:
    """Return the composition, and what was found."""
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
