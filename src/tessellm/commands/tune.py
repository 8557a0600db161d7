"""`tessellm tune`: weights from a development set."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .shared import PLAIN, Device, Dtype, JsonPath, ModelPath, err, load, out, write_json


def tune(
    model: ModelPath,
    development: Annotated[
        Path,
        typer.Argument(metavar="DEV", help="Texts: .jsonl with text and perhaps prompt, or lines of text."),
    ],
    save: Annotated[Path | None, typer.Option(help="Save the composition with the new weights here.")] = None,
    self_contained: Annotated[bool, typer.Option(help="With --save, store the members' weights inside.")] = False,
    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the texts kept to judge by.")] = 0.25,
    device: Device = None,
    dtype: Dtype = None,
    json_path: JsonPath = None,
) -> None:
    """Find the experts' weights from a development set, by likelihood."""
    from ..checkpoint import check_target
    from ..generation import encode_examples, read_examples
    from ..tune import tune as find_weights

    if save is not None:
        check_target(save)
    examples = read_examples(development)
    composition = load(model, device, dtype)
    texts = encode_examples(composition, examples)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("scoring", total=len(texts))
        tuning = find_weights(
            composition, texts, held_out, progress=lambda done, total: progress.update(task, completed=done)
        )
    table = Table("expert", "weight before", "weight after", **PLAIN)
    for name, before in zip(tuning.weights, composition.config.weights, strict=True):
        table.add_row(name, f"{before:.3f}", f"{tuning.weights[name]:.3f}")
    out.print(table)
    out.print(f"log-likelihood a token: {tuning.before:.4f} → {tuning.after:.4f} on {tuning.tokens} tokens")
    if tuning.held_out_before is not None:
        out.print(
            f"held out: {tuning.held_out_before:.4f} → {tuning.held_out_after:.4f} on {tuning.held_out_tokens} tokens"
        )
    if tuning.texts_left_out:
        err.print(f"note: {tuning.texts_left_out} texts were left out: shorter than two tokens, or past the memory")
    if save is not None:
        composition.set_rule(weights=list(tuning.weights.values()))
        composition.save_pretrained(save, self_contained=self_contained)
        out.print(f"saved with these weights → {escape(str(save))}", soft_wrap=True)
    write_json(json_path, asdict(tuning))
