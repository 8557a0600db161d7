"""`tessellm serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import RecipeError, nearest
from .shared import ModelPath

ENGINES = ("vllm",)


def serve(
    model: ModelPath,
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTION…]", help="After --: options for the engine itself.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="vllm: vLLM's own server, for one GPU to many nodes.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Serve a composition with the OpenAI API.

    Example: tessellm serve --engine vllm out --port 8000 -- --tensor-parallel-size 2
    """
    if engine not in ENGINES:
        hint = nearest(engine, ENGINES) if engine else "give --engine vllm"
        raise RecipeError(f"{f'unknown engine {engine!r}' if engine else 'only the engine vllm serves so far'}; {hint}")
    from ..vllm.server import serve as serve_with_vllm

    serve_with_vllm(model, host, port, extra or [])
