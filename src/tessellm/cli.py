"""The command line: parse, call, print. Exit codes: 0 done, 1 did not hold or failed, 2 bad usage."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .errors import TessellmError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out, err = Console(highlight=False, emoji=False), Console(stderr=True, highlight=False, emoji=False)

PLAIN: Any = {"box": SIMPLE_HEAD, "pad_edge": False, "show_edge": False}  # how tables look

JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help="A composition's folder or hub id, or a recipe.")]
Device = Annotated[str | None, typer.Option(help="Where members run: cpu, cuda, cuda:1, auto, …")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16; as stored if not given.")]


@app.callback()
def _options() -> None:
    """Compose language models that share a base, at decoding time, without training."""


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--out", "-o", help="Where to put what it makes.")] = Path("demo"),
    seed: int = 0,
    json_path: JsonPath = None,
) -> None:
    """Make small experts, compose them, show the result and a picture."""
    from .experiments.demo import run_demo

    _write_json(json_path, run_demo(directory, seed, out))


@app.command()
def compose(
    recipe: Annotated[Path, typer.Argument(help="A YAML or JSON recipe.")],
    directory: Annotated[Path, typer.Option("--out", "-o", help="The composition's folder.")],
    self_contained: Annotated[bool, typer.Option(help="Store the members' weights inside.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Make a checkpoint from a recipe."""
    from .checkpoint import check_target
    from .recipe import read_recipe

    check_target(directory)
    model = read_recipe(recipe).compose(recipe.parent)
    model.save_pretrained(directory, self_contained=self_contained)
    for note in model.notes:
        err.print(f"note: {escape(note)}", soft_wrap=True)
    experts = ", ".join(model.config.member_names[1:])
    out.print(f"composed {escape(experts)} on their base → {escape(str(directory))}", soft_wrap=True)
    _write_json(json_path, {"directory": str(directory), "members": model.config.members, "notes": model.notes})


@app.command()
def inspect(model: ModelPath, device: Device = None, json_path: JsonPath = None) -> None:
    """Show a composition's members, sizes, shared bytes, vocabulary agreement and rule."""
    from .inspection import inspect_model

    report = inspect_model(_load(model, device, None))
    table = Table("member", "kind", "weight", "model", "parameters", "memory", "dtype", "context", **PLAIN)
    for row in report["members"]:
        shown = {**row, "parameters": f"{row['parameters']:,}", "added_bytes": _size(row["added_bytes"])}
        table.add_row(*(escape(str(value)) for key, value in shown.items() if key != "source"))
    out.print(table)
    for row in report["members"]:
        out.print(f"{row['name']}: {row['source']}", soft_wrap=True, markup=False)
    rule = report["rule"]
    parameters = "".join(f", {key} = {value}" for key, value in rule["parameters"].items())
    out.print(
        f"rule: {rule['name']}{parameters} ({rule['summary']}; {rule['reference']})", soft_wrap=True, markup=False
    )
    out.print(f"termination: {report['termination']}")
    out.print(
        f"vocabulary: {report['vocab_size']} tokens; context: {report['context']} tokens; "
        f"ends with: {', '.join(report['end_tokens']) or 'nothing'}",
        soft_wrap=True,
        markup=False,
    )
    out.print(f"memory: {_size(report['bytes'])} for all members; sharing saves {_size(report['shared_bytes'])}")
    for note in report["notes"]:
        out.print(f"note: {escape(note)}", soft_wrap=True)
    _write_json(json_path, report)


@app.command()
def generate(
    model: ModelPath,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT…", help="Prompts; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Prompts from a file: .jsonl with a key prompt, or lines of text.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option(help="Put each prompt through the chat template.")] = False,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    device: Device = None,
    dtype: Dtype = None,
    json_path: JsonPath = None,
) -> None:
    """Generate text; one prompt is streamed, several are batched."""
    from .generation import Request, generate_texts, read_prompts

    asked = read_prompts(prompts or [], file)
    request = Request(max_new_tokens, temperature, top_p, seed, tuple(stop or ()), chat)
    composition = _load(model, device, dtype)
    results = []
    for result in generate_texts(
        composition, asked, request, batch_size, stream=sys.stdout if len(asked) == 1 else None
    ):
        results.append(result)
        if len(asked) > 1:
            out.print(f"[bold]{escape(result.prompt)}[/bold]{escape(result.text)}", soft_wrap=True)
    _write_json(json_path, [asdict(result) for result in results])


@app.command()
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
    from .checkpoint import check_target
    from .generation import encode_examples, read_examples
    from .tune import tune as find_weights

    if save is not None:
        check_target(save)
    examples = read_examples(development)
    composition = _load(model, device, dtype)
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
    _write_json(json_path, asdict(tuning))


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="An experiment; --list names them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every experiment and write one page.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the experiments.")] = False,
    seed: int = 0,
    directory: Annotated[Path, typer.Option("--out", "-o", help="Where results go.")] = Path("results"),
    size: Annotated[str, typer.Option(help="cpu: minutes on two cores; full: one GPU.")] = "cpu",
    json_path: JsonPath = None,
) -> None:
    """Run an experiment; exits with 1 if a claim does not hold."""
    from .experiments.page import write_page
    from .experiments.registry import EXPERIMENTS, chosen, run_experiment

    if listing:
        for known, experiment in EXPERIMENTS.items():
            out.print(f"{known:<16} {experiment.summary}", soft_wrap=True)
        return
    results = [_show_claims(run_experiment(each, seed, directory, size)) for each in chosen(name, everything)]
    if everything:
        out.print(f"every claim on one page: {escape(str(write_page(list(EXPERIMENTS), directory)))}", soft_wrap=True)
    _write_json(json_path, results[0] if name else results)
    if any(claim["holds"] is False for result in results for claim in result["claims"]):
        sys.exit(1)


def _show_claims(result: dict[str, Any]) -> dict[str, Any]:
    table = Table("claim", "value", "target", "", title=f"{result['name']} ({result['seconds']:.0f} s)")
    words = {True: "holds", False: "[red]does not hold[/red]", None: "measured"}
    for claim in result["claims"]:
        value = f"{claim['value']:.4g}" if isinstance(claim["value"], float) else str(claim["value"])
        table.add_row(escape(claim["statement"]), escape(value), escape(claim["target"] or ""), words[claim["holds"]])
    out.print(table)
    return result


def _load(model: str, device: str | None, dtype: str | None) -> Any:
    from .inspection import load_model

    return load_model(model, device, dtype)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _write_json(path: Path | None, content: Any) -> None:
    from .files import write_text

    if path is not None:
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def _be_quiet() -> None:
    """No progress bars of the libraries' where nobody watches, and none of their warnings: errors are ours to word."""
    import huggingface_hub.utils
    import transformers.utils.logging

    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()


def main() -> None:
    """The entry point: errors of ours become one message and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _be_quiet()
    try:
        app()
    except TessellmError as error:
        err.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
