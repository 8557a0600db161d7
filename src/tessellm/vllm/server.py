"""vLLM's own OpenAI server on a composition: what `tessellm serve --engine vllm` starts."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from ..errors import EngineError, MemberError, require
from ..recipe import find_recipe
from ..serve.server import bound
from ..serve.settings import Settings

REQUESTS = 128  # at once, unless the user says otherwise: a mixture keeps rows of log-probabilities for each


def arguments(folder: Path, host: str, port: int, extra: Sequence[str], eager: bool = False) -> list[str]:
    """vLLM's command line; what the user gave comes last, and so counts."""
    own = ["--model", str(folder), "--served-model-name", folder.name, "--host", host, "--port", str(port)]
    given = {argument.split("=")[0].replace("_", "-") for argument in extra}
    if not given & {"--max-num-seqs"}:
        own += ["--max-num-seqs", str(REQUESTS)]
    if eager and not given & {"--enforce-eager", "--no-enforce-eager"}:
        own += ["--enforce-eager"]
    return [*own, *extra]


def serve(model: str, host: str, port: int, extra: Sequence[str], api_key: str | None = None) -> None:
    """Check the composition, then become vLLM's server."""
    if found := find_recipe(model):
        what = "a folder of adapters" if found.adapters else "a recipe"
        raise MemberError(
            f"vLLM serves a composition's folder, and {model} is {what}. Make one first: tessellm compose {model} "
            "-o FOLDER"
        )
    check_block_size(extra)
    settings = Settings(host=host, port=port, api_key=api_key)
    with bound(settings) as listening:  # if the port is taken, that is said at once
        port = listening.getsockname()[1]
    require("vllm", "vllm")
    if settings.api_key is not None:
        os.environ["VLLM_API_KEY"] = settings.api_key.strip()  # arguments can be read by everyone on the machine
    from ..checkpoint import read_config
    from . import register
    from .config import composition_folder, has_router, set_sizes

    folder = composition_folder(model)
    config = read_config(folder)
    set_sizes(config, folder)
    register()
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["tessellm serve --engine vllm", *arguments(folder, host, port, extra, has_router(config, folder))]
    try:
        main()
    except ValueError as error:  # what its options are checked with, pydantic's too; later errors have other types
        raise EngineError(f"vLLM cannot start: {_reason(error)}. Its options are those after --") from error


def check_block_size(extra: Sequence[str]) -> None:
    """Refuse a block size that no attention kernel takes: vLLM itself says so late, and in a process of its own."""
    words = [word for argument in extra for word in argument.split("=", 1)]
    for name, size in itertools.pairwise(words):
        if name.replace("_", "-") == "--block-size" and not (size.isdigit() and int(size) and int(size) % 16 == 0):
            raise EngineError(f"--block-size: expected tokens per block in multiples of 16; got {size}")


def _reason(error: ValueError) -> str:
    """In one line, without pydantic's copy of all that was given."""
    if isinstance(error, ValidationError):
        return "; ".join(": ".join([*map(str, each["loc"]), each["msg"].rstrip(".")]) for each in error.errors())
    return " ".join(str(error).split()).rstrip(".")
