"""`tessellm bench`: how fast a composition decodes, and how near that is to the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from ..errors import EngineError
from .shared import (
    NARROW,
    Device,
    Dtype,
    JsonPath,
    err,
    load,
    on_command_line,
    out,
    readable_size,
    writable,
    write_json,
)


def bench(
    given: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A composition or a recipe.")] = None,
    shapes: Annotated[
        str | None, typer.Option(help="Random weights instead of a model: gemma-2-2b, llama-512, llama-tiny.")
    ] = None,
    kind: Annotated[
        Literal["full", "lora"], typer.Option(help="With --shapes: experts that are models, or LoRA of rank 16.")
    ] = "full",
    experts: Annotated[list[int] | None, typer.Option(help="How many experts; several: a sweep.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once; several: a sweep.  [default: 1]")] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(help="Tokens of context; several: a sweep.  [default: 128]")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of the engine and the loops; medians are shown.")] = 3,
    rule: Annotated[str, typer.Option(help="With --shapes: the rule.")] = "evidence",
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="On a GPU: torch.compile where it pays.")
    ] = True,
    loops: Annotated[bool, typer.Option("--loops/--no-loops", help="Compare with the notebook's loop.")] = True,
    speculate: Annotated[
        str | None,
        typer.Option(metavar="WHO", help="Also with drafts: lookup or member:NAME, in turns with the engine without."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    json_path: JsonPath = None,
    figure: Annotated[Path | None, typer.Option(callback=writable, help="Also draw the sweep into this file.")] = None,
) -> None:
    """Measure decoding. Example: tessellm bench --shapes llama-512 --experts 2 --batch 1 --batch 8"""
    if (model is None) == (shapes is None):
        raise EngineError("expected either a composition or --shapes")
    if model is not None and on_command_line(given, ("kind", "rule")):
        raise EngineError("--kind and --rule go with --shapes: a composition has experts and a rule of its own")
    import torch

    from ..bench.figure import check_format, draw
    from ..bench.plan import run
    from ..members import dtype_of
    from ..provenance import environment

    if figure is not None:
        check_format(figure)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    result = run(
        None if model is None else load(model, device, dtype),
        shapes,
        kind,
        experts or (),
        batch or (1,),
        prompt or (128,),
        new_tokens,
        rounds,
        rule,
        device,
        dtype_of(dtype or ("bfloat16" if device.startswith("cuda") else "float32")),
        compiled,
        loops,
        speculate,
        progress=lambda text: err.print(text, soft_wrap=True),
    )
    _show(result)
    write_json(json_path, {**result, **environment()})
    if figure is not None:
        draw(result, figure)


def _show(result: dict) -> None:
    heads = ["experts", "batch", "prompt", "ms a\nstep", "tokens/s", "of\nlimit", "memory", "×\nnotebook", "×\nloop"]
    drafts = any("times_without_drafts" in row for row in result["rows"])
    table = Table(*heads, *(["drafts\n×"] if drafts else []), **NARROW)
    compared = ["times_notebook", "times_on_device", *(["times_without_drafts"] if drafts else [])]
    for row in result["rows"]:
        memory = row["peak_bytes"] or row["weight_bytes"] + row["cache_bytes"]
        loops = [f"{row[key]:.2f}" if key in row else "" for key in compared]
        table.add_row(
            *(str(row[key]) for key in ("experts", "batch", "prompt")),
            f"{row['ms_a_step']:.2f}",
            f"{row['tokens_a_second']:,.1f}",
            f"{row['share_of_limit']:.0%}",
            readable_size(memory),
            *loops,
        )
    out.print(table)
    first = result["rows"][0]
    speed, spent = result["bytes_a_second"] / 1e9, sum(row["compile_seconds"] for row in result["rows"])
    out.print(f"limit of the first row: {first['limit_ms']:.2f} ms, all weights read once at {speed:,.1f} GB/s")
    out.print(f"compiling and capturing took {spent:.0f} s; × loop: against the notebook's loop kept on the device")
