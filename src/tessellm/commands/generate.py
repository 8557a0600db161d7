"""`tessellm generate`: text from a composition."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from .shared import (
    Device,
    Dtype,
    JsonPath,
    ModelPath,
    Seed,
    as_option,
    err,
    load,
    on_command_line,
    out,
    write_json,
)
from .streams import OnTerminal

if TYPE_CHECKING:
    from ..text.options import TextOptions


def generate(
    given: typer.Context,
    model: ModelPath,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT…", help="Prompts; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Prompts from a file: .jsonl with a key prompt, or lines of text.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="128 if not given, or what the context has room for.", show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option(help="Put each prompt through the chat template.")] = False,
    trace: Annotated[bool, typer.Option(help="Show which member owns each token, when the text is written.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run at once.")] = 8,
    engine: Annotated[
        Literal["auto", "reference"], typer.Option(help="auto: the fast path where it can run; reference: never.")
    ] = "auto",
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="WHO", help="Who drafts: lookup (the text itself) or member:NAME. The text stays the same."
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    json_path: JsonPath = None,
) -> None:
    """Generate text; one prompt is streamed, several are batched.

    Example: tessellm generate out "Write a function that" --trace
    """
    from ..text.generate import generate_texts
    from ..text.inputs import read_prompts
    from ..text.options import TextOptions

    if temperature == 0 and (unused := on_command_line(given, ("top_p", "seed"))):
        names = " and ".join(map(as_option, unused))
        note(f"{names} do nothing without --temperature: greedy decoding draws nothing")
    asked = read_prompts(prompts or [], file)
    settings = (temperature, top_p, seed, tuple(stop or ()), chat, max_new_tokens is None)
    options = TextOptions(max_new_tokens or TextOptions.max_new_tokens, *settings)
    composition = load(model, device, dtype)
    if trace:
        write_json(json_path, _traced(composition, asked, options, batch_size, engine, speculate))
        return
    results = []
    shown: Any = OnTerminal(sys.stdout)
    for result in generate_texts(
        composition,
        asked,
        options,
        batch_size,
        stream=shown if len(asked) == 1 else None,
        engine=engine,
        speculate=speculate,
        note=note,
    ):
        results.append(result)
        if len(asked) > 1 and out.is_terminal:
            out.print(f"[bold]{escape(result.prompt)}[/bold]{escape(result.text)}", soft_wrap=True)
        elif len(asked) > 1:
            print(result.prompt + result.text)  # as it is
    write_json(json_path, [asdict(result) for result in results])


def note(text: str) -> None:
    err.print(f"note: {escape(text)}", soft_wrap=True)


def _traced(
    composition: Any, asked: list[str], options: TextOptions, batch_size: int, engine: str, speculate: str | None
) -> list[dict[str, Any]]:
    from ..diagnose.speaking import Terminal, generate_traced

    terminal = Terminal(sys.stdout, composition.config.member_names)
    terminal.legend()
    results = []
    for result, trace in generate_traced(composition, asked, options, batch_size, terminal, engine, note, speculate):
        results.append(asdict(result) | {"trace": json.loads(trace.to_json())["tokens"]})
    return results
