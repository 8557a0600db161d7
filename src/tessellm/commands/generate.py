"""`tessellm generate`: text from a composition."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from .options import ChatOptions, SpeakerOptions
from .shared import JsonPath, Seed, Shown, SpeakerPath, as_option, err, on_command_line, out, write_json
from .streams import OnTerminal

if TYPE_CHECKING:
    from ..text.options import TextOptions


@dataclass(frozen=True)
class PromptOptions(ChatOptions):
    """What is asked"""

    file: Annotated[
        Path | None, typer.Option(help="Prompts from a file: .jsonl with a key prompt, or lines of text.")
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """What is written"""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="128 if not given (chat: 512), or what there is room for.", show_default=False),
    ] = None
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0
    seed: Seed = 0
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; may be given several times.")] = None
    schema: Annotated[Path | None, typer.Option(help="A file with a JSON schema, which texts are held to.")] = None


@dataclass(frozen=True)
class DecodingOptions:
    """How it is written"""

    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are written at once.")] = 8
    engine: Annotated[
        Literal["auto", "reference"], typer.Option(help="auto: the fast path where it can run; reference: never.")
    ] = "auto"

    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="WHO",
            help="Where drafts come from: lookup (the text itself) or none. The text stays the same.",
        ),
    ] = None
    trace: Annotated[bool, typer.Option(help="Show which member owns each token, when the text is written.")] = False


def generate(
    given: typer.Context,
    model: SpeakerPath,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT…", help="Prompts; - reads standard input.")
    ] = None,
    *,
    asking: PromptOptions,
    sampling: SamplingOptions,
    running: DecodingOptions,
    speaker: SpeakerOptions,
    json_path: JsonPath = None,
) -> None:
    """Generate text; one prompt is streamed, several are batched.

    Example: tessellm generate out "Write a function that" --trace
    """
    from ..text.chat import Chat
    from ..text.inputs import read_prompts, read_schema
    from ..text.options import TextOptions

    if sampling.temperature == 0 and (unused := on_command_line(given, ("top_p", "seed"))):
        names = " and ".join(map(as_option, unused))
        note(f"{names} do nothing without --temperature: greedy decoding draws nothing")
    asked = read_prompts(prompts or [], asking.file)
    options = TextOptions(
        sampling.max_new_tokens or TextOptions.max_new_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.seed,
        tuple(sampling.stop or ()),
        asking.as_chat(),
        schema=None if sampling.schema is None else read_schema(sampling.schema),
        fit=sampling.max_new_tokens is None,
    )
    if running.trace:
        composition = speaker.load_composition(model, "--trace shows which of several members owns each token")
    else:
        composition = speaker.load(model)
    if lacks_chat := asking.lacks_chat(composition, asked):
        options = replace(options, chat=Chat())
    write = _traced if running.trace else _written
    results = write(composition, asked, options, running)
    if lacks_chat:
        note("prompts went through the chat template, where the rule mixture routes; --no-chat leaves them as they are")
    elif options.chat is None and composition.tokenizer.chat_template and not all(each["text"] for each in results):
        note("nothing was written: this is a chat model, and --chat puts prompts into its template")
    write_json(json_path, results)


def _written(
    composition: Any, asked: list[str], options: TextOptions, running: DecodingOptions
) -> list[dict[str, Any]]:
    from ..text.generate import generate_texts

    results, behind = [], "\n" if options.chat else ""  # an answer, or what goes on behind the prompt
    shown: Any = OnTerminal(sys.stdout)
    progress = Shown("generating")
    for result in generate_texts(
        composition,
        asked,
        options,
        running.batch_size,
        stream=shown if len(asked) == 1 else None,
        engine=running.engine,
        speculate=running.speculate,
        note=note,
    ):
        results.append(asdict(result))
        if not out.is_terminal:
            progress(len(results), len(asked))
        if len(asked) > 1 and out.is_terminal:
            out.print(f"[bold]{escape(result.prompt)}[/bold]{behind}{escape(result.text)}", soft_wrap=True)
        elif len(asked) > 1:
            print(result.prompt + behind + result.text)  # as it is
    return results


def note(text: str) -> None:
    err.print(f"note: {escape(text)}", soft_wrap=True)


def _traced(composition: Any, asked: list[str], options: TextOptions, running: DecodingOptions) -> list[dict[str, Any]]:
    from ..diagnose.speaking import Terminal, generate_traced

    terminal = Terminal(sys.stdout, composition.config.member_names)
    terminal.legend()
    results = []
    for result, trace in generate_traced(
        composition, asked, options, running.batch_size, terminal, running.engine, note, running.speculate
    ):
        results.append(asdict(result) | {"trace": json.loads(trace.to_json())["tokens"]})
    return results
