"""`tessellm serve`: an OpenAI-compatible server and the playground."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import RecipeError
from .options import SpeakerOptions
from .shared import ModelPath, as_option, err, on_command_line, out

KEY = "TESSELLM_API_KEY"
UPDATES = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
OURS = {  # options of our own engine: what to give vLLM instead, after --
    "slots": "--max-num-seqs",
    "context": "--max-model-len",
    "dtype": "--dtype",
    "device": None,
    "queue": None,
    "timeout": None,
    "drain_timeout": None,
    "speculate": None,
    "allowed_host": None,
    "log_prompts": "--enable-log-requests",
    "runtime_updates": None,
    "rule": None,
    "weights": None,
}


@dataclass(frozen=True)
class AddressOptions:
    """Where it listens, and to whom"""

    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000
    api_key: Annotated[str | None, typer.Option(envvar=KEY, help="Let in only who has it.", show_default=False)] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="The same, from a file that holds nothing else.", show_default=False)
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that requests may be for, beside those of this machine, such as a proxy's; * is any. May be "
            "given several times.",
            show_default=False,
        ),
    ] = None

    runtime_updates: Annotated[
        bool, typer.Option(help=f"Let clients load and unload experts, as {UPDATES}=1 does.")
    ] = False

    def key(self) -> str | None:
        """Return the key; an empty variable is passed on as such, to be refused: typer takes it for none at all."""
        if self.api_key_file:
            return _key_in(self.api_key_file)
        return self.api_key if self.api_key is not None else os.environ.get(KEY)


@dataclass(frozen=True)
class CapacityOptions:
    """How much at once, and how long"""

    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that run at once; as many as a quarter of the free memory holds, up to 16."),
    ] = None
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens per slot; the members', up to 4096, as far as that holds them.")
    ] = None
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get status 429.")] = 256
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFTS",
            help="Where drafts come from: lookup (the text itself) or none. The text stays the same.",
            show_default="none",
        ),
    ] = None
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish what runs, when told to stop.")] = 60.0


def serve(
    given: typer.Context,
    model: ModelPath,
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTION…]", help="After --: options for vLLM itself.")
    ] = None,
    *,
    engine: Annotated[
        Literal["tessellm", "plain", "vllm"],
        typer.Option(
            help="tessellm: this machine, with a playground, by the fast path where it can run; plain: the same, "
            "never by the fast path; vllm: vLLM's server, one GPU to many nodes."
        ),
    ] = "tessellm",
    log_prompts: Annotated[bool, typer.Option(help="Write prompts to the log.")] = False,
    address: AddressOptions,
    capacity: CapacityOptions,
    speaker: SpeakerOptions,
) -> None:
    """Serve it with OpenAI's API, and a page at / to try it on.

    Example: tessellm serve out --port 8000
    """
    api_key = address.key()
    if engine == "vllm":
        from ..vllm.server import serve as serve_with_vllm

        refuse_ours(given)
        serve_with_vllm(model, address.host, address.port, extra or [], api_key)
        return
    if extra:
        raise RecipeError(f"options after -- are for --engine vllm; got {' '.join(extra)}")
    from ..serve.server import serve as serve_here
    from ..serve.settings import Settings

    settings = Settings(
        host=address.host, port=address.port, api_key=api_key, allowed_hosts=tuple(address.allowed_host or ()),
        slots=capacity.slots, context=capacity.context, queue=capacity.queue, seconds=capacity.timeout,
        drain_seconds=capacity.drain_timeout, log_prompts=log_prompts, plain=engine == "plain",
        speculate=capacity.speculate,
        folder=Path(model) if (Path(model) / "config.json").is_file() else None,
        updates=address.runtime_updates or os.environ.get(UPDATES, "").strip().lower() in ("1", "true"),
    )  # fmt: skip
    if not settings.local and not api_key:
        err.print(
            f"note: anyone who reaches {address.host} may use this server; --api-key lets in only who has the key"
        )
    name = Path(model).stem if Path(model).is_file() else Path(model).resolve().name
    purpose = "a server has every member beside the composition"
    serve_here(
        lambda: speaker.load_composition(model, purpose),
        name,
        settings,
        lambda url: out.print(f"{name} at {url}", soft_wrap=True),
    )


def _key_in(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(f"the API key cannot be read from {file}: {why}") from error


def refuse_ours(given: typer.Context) -> None:
    """Rather than drop what the user asked of the wrong engine."""
    for name in on_command_line(given, OURS):
        hint = f"Give vLLM's own after --: -- {OURS[name]}" if OURS[name] else "Leave it out"
        raise RecipeError(f"{as_option(name)} is an option of tessellm's own engine, not of --engine vllm. {hint}")
