"""Which vLLM this plugin is written for: it builds on parts of vLLM that are not promised to stay."""

from __future__ import annotations

import re

TESTED = "0.32"


def check_version(found: str) -> str | None:
    """A sentence for the user if this is another version than the tested one; None if it is not."""
    if re.match(rf"{re.escape(TESTED)}(\.|$)", found):
        return None
    return (
        f"tessellm's vLLM plugin is tested with vLLM {TESTED}; this is {found}. If compositions fail to load, "
        f'install that version: pip install "vllm=={TESTED}.*"'
    )
