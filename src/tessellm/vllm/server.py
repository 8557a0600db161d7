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


def arguments(folder: Path, host: str, port: int, extra: Sequence[str], adapted: Sequence[str] | None) -> list[str]:
    """vLLM's command line; what the user gave comes last, and so counts. `adapted`: options for one adapter a request;
    None: the composed model."""
    own = ["--model", str(folder), "--served-model-name", folder.name] if adapted is None else [*adapted]
    own += ["--host", host, "--port", str(port)]
    given = {argument.split("=")[0].replace("_", "-") for argument in extra}
    if adapted is None and not given & {"--max-num-seqs"}:
        own += ["--max-num-seqs", str(REQUESTS)]
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
    from .adapters import obstacle, server_arguments
    from .config import composition_folder, logger, member_sources, set_sizes
    from .versions import server

    folder = composition_folder(model)
    config = read_config(folder)
    set_sizes(config, folder)
    register()
    places = member_sources(config, folder)
    reason = obstacle(config, folder, places)
    adapted = server_arguments(config, folder, places) if reason is None else None
    if reason is not None:
        logger.warning("%s: %s, so all of its members run for each request, as one composed model", folder, reason)
    if adapted is not None:
        check_options(extra)
    main, command = server()
    words = arguments(folder, host, port, extra, adapted)
    sys.argv = ["tessellm serve --engine vllm", *command, *(words[1:] if command else words)]  # vllm serve MODEL
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


def check_options(extra: Sequence[str]) -> None:
    """Refuse what routing cannot go along with: layers on several stages, and several rows of logits for a request."""
    for argument in extra:
        name = argument.split("=")[0].replace("_", "-")
        if name in ("--pipeline-parallel-size", "-pp", "--speculative-config", "-sc"):
            raise EngineError(f"{name} cannot be used where requests are routed. Leave it out")


def _reason(error: ValueError) -> str:
    """In one line, without pydantic's copy of all that was given."""
    if isinstance(error, ValidationError):
        return "; ".join(": ".join([*map(str, each["loc"]), each["msg"].rstrip(".")]) for each in error.errors())
    return " ".join(str(error).split()).rstrip(".")
