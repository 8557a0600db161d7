"""Compositions that were made of a folder of adapters, kept by content, so that a second start is immediate.

They lie in TESSELLM_CACHE, else in the user's cache folder: linked, so that they are small. The key is of the adapters'
and cards' bytes, of where they are, of the base, and of how they were composed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import CheckpointError
from ..members import sources
from ..members.folders import AdapterFolder
from ..members.saved import quick, telling_files
from ..model import ComposedForCausalLM
from .reader import is_composition
from .save import save

FORMAT = 1
KEPT = 20  # compositions; the one that was used longest ago goes first


def cache_folder() -> Path:
    """Return the folder in which compositions are kept; it need not be there."""
    if own := os.environ.get("TESSELLM_CACHE"):
        return Path(own).expanduser() / "compositions"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessellm" / "compositions"


def cached_place(found: AdapterFolder, options: Mapping[str, Any]) -> Path:
    """Return where the composition of a folder under these options is kept; it need not be there."""
    base = sources.find(found.base, "the adapters' base")
    adapters = {
        name: [str(path), sources.digest([file for file in _told_by(path) if file.is_file()])]
        for name, path in found.adapters.items()
    }
    about = {
        "format": [FORMAT, __version__],
        "base": [base.name, base.revision, None if base.revision else quick(telling_files(base))],
        "adapters": adapters,
        "notes": found.notes,
        "options": {key: value for key, value in options.items() if value is not None},
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / f"{found.path.name[:40]}-{key}"


def _told_by(adapter: Path) -> list[Path]:
    """List the files that make an adapter what it is, and say what it does."""
    own = [*sources.weight_files(adapter), *(adapter / name for name in ("adapter_config.json", "README.md"))]
    return own + sorted(adapter.glob("tokenizer*")) + sorted(adapter.glob("chat_template*"))


def is_cached(place: Path) -> bool:
    """Whether a composition is kept there; it counts as used now."""
    if not is_composition(place):
        return False
    with suppress(OSError):  # another user's
        os.utime(place)
    return True


def keep(model: ComposedForCausalLM, place: Path) -> str | None:
    """Keep a composition, and drop those used longest ago; return why it could not be kept."""
    try:
        save(model, place)
        for old in sorted(place.parent.iterdir(), key=lambda each: each.stat().st_mtime)[:-KEPT]:
            if is_composition(old):
                shutil.rmtree(old, ignore_errors=True)
    except (CheckpointError, OSError) as error:
        return f"the composition is made anew at every start: {error}"
    return None
