"""`tessellm bench`: how fast a composition decodes, and how near that is to the limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from ..errors import EngineError
from .options import SpeakerOptions
from .shared import NARROW, JsonPath, as_option, err, on_command_line, out, readable_size, writable, write_json

NOT_SERVED = (
    "shapes", "kind", "experts", "batch", "rounds", "compiled", "loops", "speculate", "rule", "weights", "device",
    "dtype", "figure",
)  # fmt: skip


@dataclass(frozen=True)
class ShapeOptions:
    """Random weights instead of a model"""

    shapes: Annotated[str | None, typer.Option(help="gemma-2-2b, llama-512, llama-tiny.")] = None
    kind: Annotated[
        Literal["full", "lora"], typer.Option(help="With --shapes: experts that are models, or LoRA of rank 16.")
    ] = "full"


@dataclass(frozen=True)
class LatencyOptions:
    """What users of a server feel"""

    latency: Annotated[
        bool,
        typer.Option(
            "--latency",
            help="Serve it, and its base alone, in processes of their own: time to first token and between tokens, "
            "from process start and under load. Takes --prompt (a mix), --new-tokens, --json and these.",
        ),
    ] = False
    requests: Annotated[int, typer.Option(min=1, help="Requests per load.")] = 40
    load: Annotated[
        list[float] | None,
        typer.Option(help="Arrivals over the throughput that was measured; several: each.  [default: 0.5, 0.8]"),
    ] = None
    slots: Annotated[int, typer.Option(min=1, help="Requests that the server runs at once.")] = 4
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0
    vllm: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="Also by vLLM, in the environment of this interpreter.")
    ] = None


@dataclass(frozen=True)
class SweepOptions:
    """What is measured"""

    experts: Annotated[list[int] | None, typer.Option(help="How many experts; several: a sweep.")] = None
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once; several: a sweep.  [default: 1]")] = None
    prompt: Annotated[list[int] | None, typer.Option(help="Tokens of context; several: a sweep.  [default: 128]")] = (
        None
    )
    new_tokens: Annotated[int, typer.Option(min=2)] = 64
    rounds: Annotated[int, typer.Option(min=1, help="Turns of the engine and the loops; medians are shown.")] = 3
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="On a GPU: torch.compile where it pays.")] = (
        True
    )
    loops: Annotated[bool, typer.Option("--loops/--no-loops", help="Compare with the notebook's loop.")] = True
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="WHO", help="Also with drafts: lookup, member:NAME or belief, in turns with the engine without."
        ),
    ] = None


def bench(
    given: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A composition or a recipe; MODEL:MEMBER: one member.")
    ] = None,
    *,
    shaped: ShapeOptions,
    swept: SweepOptions,
    felt: LatencyOptions,
    speaker: SpeakerOptions,
    json_path: JsonPath = None,
    figure: Annotated[Path | None, typer.Option(callback=writable, help="Also draw the sweep into this file.")] = None,
) -> None:
    """Measure decoding. Example: tessellm bench --shapes llama-512 --experts 2 --batch 1 --batch 8"""
    if (model is None) == (shaped.shapes is None):
        raise EngineError("expected either a composition or --shapes")
    if model is not None and on_command_line(given, ("kind",)):
        raise EngineError("--kind goes with --shapes: a composition has experts of its own")
    if shaped.shapes is not None and speaker.weights is not None:
        raise EngineError("--weights goes with a composition: experts with random weights all have the weight 1")
    if felt.latency:
        _latency(given, model, swept, felt, json_path)
        return
    if alone := on_command_line(given, ("requests", "load", "slots", "seed", "vllm")):
        raise EngineError(f"{as_option(alone[0])} goes with --latency")
    from ..bench.figure import check_format, draw
    from ..provenance import environment

    if figure is not None:
        check_format(figure)
    result = _measured(model, shaped, swept, speaker)
    _show(result)
    write_json(json_path, {**result, **environment()})
    if figure is not None:
        draw(result, figure)


def _latency(
    given: typer.Context, model: str | None, swept: SweepOptions, felt: LatencyOptions, json_path: Path | None
) -> None:
    """Measure servers and show what their users feel."""
    if other := on_command_line(given, NOT_SERVED):
        raise EngineError(f"--latency measures a model as `tessellm serve` serves it: leave out {as_option(other[0])}")
    assert model is not None, "shapes are not served"
    from ..bench.compared import compare_latency
    from ..bench.latency import LatencyPlan
    from ..provenance import environment

    usual = LatencyPlan()
    plan = LatencyPlan(
        felt.requests, swept.new_tokens, tuple(swept.prompt or usual.prompts), tuple(felt.load or usual.loads),
        felt.slots, felt.seed,
    )  # fmt: skip
    result = compare_latency(model, plan, felt.vllm, _progress)
    out.print(latency_table(result))
    write_json(json_path, {**result, **environment()})


def latency_table(result: dict) -> Table:
    """Lay out milliseconds per server and load."""
    table = Table("", "load", "first\ntoken", "99 %", "gap", "99 %", "largest", "99 % over\nmedian", **NARROW)
    for name, server in result["servers"].items():
        rows = {"first request": "first_request", "all slots": "all_slots"}
        rows |= {f"{load:.0%}": f"load_{load:g}" for load in result["plan"]["loads"]}
        for load, key in rows.items():
            first, gaps, over = (server[key].get(part) for part in ("first_token_ms", "gap_ms", "p99_over_median"))
            numbers = [*(first.get(n) for n in ("median", "p99")), *(gaps.get(n) for n in ("median", "p99", "largest"))]
            cells = [f"{number:,.0f}" if number is not None else "" for number in numbers]
            table.add_row(name, load, *cells, f"{over:.1f}" if over else "")
    return table


def _measured(model: str | None, shaped: ShapeOptions, swept: SweepOptions, speaker: SpeakerOptions) -> dict[str, Any]:
    import torch

    from ..bench.plan import RandomWeights, SweepPlan, run, run_random
    from ..members import dtype_of

    plan = SweepPlan(
        swept.experts or (), swept.batch or (1,), swept.prompt or (128,), swept.new_tokens, swept.rounds,
        swept.compiled, swept.loops, swept.speculate,
    )  # fmt: skip
    device = speaker.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if model is not None:
        return run(replace(speaker, device=device).load(model), plan, _progress)
    assert shaped.shapes is not None, "checked above"
    dtype = dtype_of(speaker.dtype or ("bfloat16" if device.startswith("cuda") else "float32"))
    weights = RandomWeights(shaped.shapes, shaped.kind, speaker.rule or "evidence", device, dtype)
    return run_random(weights, plan, _progress)


def _progress(text: str) -> None:
    err.print(text, soft_wrap=True)


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
