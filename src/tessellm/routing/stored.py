"""Routers on disk: a file of tensors with the settings in its metadata, and a cache of what was calibrated."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CheckpointError
from ..files import new_file
from .router import DeltaRouter, OutdatedRouterError

SUFFIX = ".safetensors"
KEPT = 64  # routers in the cache; the oldest go


def write_router(router: DeltaRouter, path: Path) -> None:
    """Write a router in one step."""
    tensors, about = router.state()
    with new_file(path) as file:
        save_file(tensors, file, metadata={"router": json.dumps(about)})


def read_router(path: Path, base: Any, tokenizer: Any) -> DeltaRouter:
    """Read a router that was written for this base."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["router"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        return DeltaRouter.from_state(tensors, about, base, tokenizer)
    except OutdatedRouterError as error:
        raise OutdatedRouterError(f"{path}: {error}") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{path} is cut off or damaged. Remove it: the router is calibrated anew then") from error


def cache_folder() -> Path:
    """Return the folder of calibrated routers: in $TESSELLM_CACHE, or tessellm in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("TESSELLM_CACHE")
    return (
        Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessellm"
    ) / "routers"


def cached_router(key: str, base: Any, tokenizer: Any) -> DeltaRouter | None:
    """Return the router with that key, if an earlier start calibrated it; a file that cannot be read is none."""
    path = cache_folder() / f"{key}{SUFFIX}"
    with suppress(OSError, CheckpointError):
        if path.is_file():
            router = read_router(path, base, tokenizer)
            os.utime(path)
            return router
    return None


def keep_router(key: str, router: DeltaRouter) -> None:
    """Put a router into the cache, where that can be written; remove the oldest beyond KEPT."""
    with suppress(OSError, CheckpointError):
        write_router(router, cache_folder() / f"{key}{SUFFIX}")
        files = sorted(cache_folder().glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for file in files[:-KEPT]:
            file.unlink(missing_ok=True)
