"""`tessellm bench`: how fast a composition decodes, beside its base alone, and how near that is to the limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.table import Table

from .options import SpeakerOptions
from .shared import NARROW, JsonPath, ModelPath, err, out, readable_size, write_json

ROUNDS = 3  # turns of the composition and its base; medians are shown


@dataclass(frozen=True)
class SweepOptions:
    """What is measured"""

    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once; several: a sweep.  [default: 1]")] = None
    prompt: Annotated[
        list[int] | None, typer.Option(help="Tokens of context; several: a sweep.  [default: 128]")
    ] = None  # fmt: skip
    new_tokens: Annotated[int, typer.Option(min=2)] = 64
    speculate: Annotated[
        str | None, typer.Option(metavar="HOW", help="Also with drafts, in turns with the engine without: lookup.")
    ] = None
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE",
            help="Also another engine on the base, in turns: llama.cpp[=FILE.gguf], vllm[=PYTHON]. Several: all.",
        ),
    ] = None


def bench(model: ModelPath, *, swept: SweepOptions, speaker: SpeakerOptions, json_path: JsonPath = None) -> None:
    """Measure decoding. Example: tessellm bench out --batch 1 --batch 8"""
    import torch

    from ..bench.measure import sweep
    from ..engine.speculation import Speculation
    from ..provenance import environment

    speculation = Speculation(swept.speculate) if swept.speculate is not None else None
    device = speaker.device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = replace(speaker, device=device).load(model)
    result = sweep(
        loaded,
        swept.batch or (1,),
        swept.prompt or (128,),
        swept.new_tokens,
        ROUNDS,
        speculation,
        _progress,
        swept.against or (),
    )
    _show(result)
    write_json(json_path, {**result, **environment()})


def _progress(text: str) -> None:
    err.print(text, soft_wrap=True)


def _show(result: dict[str, Any]) -> None:
    rows, compared = result["rows"], {"times_base": "base\n×", "times_without_drafts": "drafts\n×"}
    compared = {key: head for key, head in compared.items() if any(key in row for row in rows)}
    table = Table("batch", "prompt", "ms a\nstep", "tokens/s", "of\nlimit", "memory", *compared.values(), **NARROW)
    for row in rows:
        table.add_row(
            str(row["batch"]),
            str(row["prompt"]),
            f"{row['ms_a_step']:.2f}",
            f"{row['tokens_a_second']:,.1f}",
            f"{row['share_of_limit']:.0%}",
            readable_size(row["peak_bytes"] or row["weight_bytes"] + row["cache_bytes"]),
            *(f"{row[key]:.2f}" for key in compared),
        )
    out.print(table)
    first, speed, spent = rows[0], result["bytes_a_second"] / 1e9, sum(row["compile_seconds"] for row in rows)
    out.print(f"limit of the first row: {first['limit_ms']:.2f} ms, all weights read once at {speed:,.1f} GB/s")
    out.print(f"compiling and capturing took {spent:.0f} s; base ×: its step alone over the composition's")
    if result["against"]:
        _show_others(result)


def _show_others(result: dict[str, Any]) -> None:
    """Print each engine's times on the base, and over the composition's."""
    table = Table("batch", "prompt", "engine", "first\nms", "over\nours", "ms a\nstep", "over\nours", **NARROW)
    for row in result["rows"]:
        table.add_row(
            str(row["batch"]), str(row["prompt"]), "ours", f"{row['first_token_ms']:.0f}", "", f"{row['ms_a_step']:.2f}"
        )
        for name in result["against"]:
            times = (f"{row[f'first_times_{name}']:.2f}", f"{row[f'{name}_ms']:.2f}", f"{row[f'times_{name}']:.2f}")
            table.add_row("", "", name, f"{row[f'first_{name}_ms']:.0f}", *times)
    out.print(table)
