"""The exceptions that users meet. Each says what was expected, what came, and how to fix it.

TessellmError            anything that the user gave wrong; the command line exits with 2
├── RecipeError          a recipe that cannot be read: unknown keys, wrong types, NaN weights
├── MemberError          a member that cannot be loaded or does not fit the others
├── VocabularyError      members that do not speak the same tokens
├── CheckpointError      a composition's folder that is cut off, changed or cannot be written
├── PromptError          a prompt that is empty or longer than the shortest context
│   └── RoomError        one that leaves no room in the context for what should follow
├── GenerationError      options of `generate` that cannot be honoured together; a ValueError too
├── EngineError          what the fast path cannot run: a size, a memory
│   └── FastPathError    members that the fast path does not know
└── MissingExtraError    an optional package that is not installed
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

LONGEST_QUOTED = 200  # characters


class TessellmError(Exception):
    """Something that the user gave is wrong."""


class RecipeError(TessellmError):
    pass


class MemberError(TessellmError):
    pass


class VocabularyError(TessellmError):
    pass


class CheckpointError(TessellmError):
    pass


class PromptError(TessellmError):
    pass


class RoomError(PromptError):
    pass


class GenerationError(TessellmError, ValueError):
    pass


class EngineError(TessellmError):
    pass


class FastPathError(EngineError):
    pass


class MissingExtraError(TessellmError):
    pass


def first_line(error: Exception) -> str:
    """Tell an error of somebody else's in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def quoted(text: str) -> str:
    """What a user wrote, in quotes, and not more of it than a message can hold."""
    return repr(text) if len(text) <= LONGEST_QUOTED else f"{text[:LONGEST_QUOTED]!r}… ({len(text):,} characters)"


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known word and lists the rest: `did you mean 'base'? Known: base, rule`."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5) if len(word) <= LONGEST_QUOTED else []
    return (f"did you mean {close[0]!r}? " if close else "") + "Known: " + ", ".join(known)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"This needs the package {module.split('.')[0]!r}, which is not installed. "
            f'Fix: pip install "tessellm[{extra}]"'
        ) from error
