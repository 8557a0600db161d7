"""Final answers: found in a solution, and compared as mathematics by math-verify.

`boxed` reads the last \\boxed{…} with balanced braces. `equal_as_published` is the paper's own comparison of strings,
kept so that both can be reported: its pattern ends at the first closing brace.
"""

from __future__ import annotations

import re
from typing import Any

from ..errors import require

DIGITS = 12  # to which values are compared: 0.333333 is not a third
SECONDS = 2  # for reading an answer, and for comparing two


def boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{…} or \\fbox{…}."""
    for start in reversed([found.end() for found in re.finditer(r"\\f?box(?:ed)?\s*(?=\{)", text)]):
        end = _closing(text, start)
        if end is not None:
            return text[start + 1 : end].strip()
    bare = re.findall(r"\\boxed\s+([^\s{}$]+)", text)
    return bare[-1] if bare else None


def _closing(text: str, start: int) -> int | None:
    """Where the group that opens at `start` ends; escaped braces are no braces."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] in "{}" and (at == 0 or text[at - 1] != "\\"):
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at
    return None


def equal_as_published(text: str, solution: str) -> bool:
    """The strings up to the first closing brace are the same."""
    found, wanted = (re.findall(r"\\boxed\{([^}]*)\}", each) for each in (text, solution))
    return bool(found and wanted) and found[-1].strip() == wanted[-1].strip()


def equal(answer: str | None, gold: str | None) -> bool:
    """Whether an answer means what the dataset's does. What takes longer than SECONDS is not equal."""
    if answer is None or gold is None:
        return False
    verify = require("math_verify", "eval").verify
    return verify(_parsed(gold), _parsed(answer), float_rounding=DIGITS, timeout_seconds=SECONDS)


def _parsed(answer: str) -> list[Any]:
    """As LaTeX alone: math-verify would read other texts with Python's `eval`."""
    from math_verify import LatexExtractionConfig, parse

    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    text = rf"\boxed{{{answer.strip().removesuffix('.')}}}"
    return parse(text, latex, fallback_mode="no_fallback", parsing_timeout=SECONDS)
