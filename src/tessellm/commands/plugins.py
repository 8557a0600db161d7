"""Commands and demos of other distributions, by entry points: the lab's are loaded when they are asked for.

A distribution registers a function with typer's annotations in the group `tessellm.commands`, or, for
`tessellm demo NAME`, a function (out, console=) that returns what --json writes in `tessellm.demos`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from ..errors import TessellmError

COMMANDS, DEMOS = "tessellm.commands", "tessellm.demos"
LAB = ("merges", "probe", "reproduce")


def plugin_names(group: str = COMMANDS) -> list[str]:
    """What is installed in that group, sorted."""
    return sorted(entry_points(group=group).names)


def load_plugin(name: str, group: str = COMMANDS) -> Callable[..., Any]:
    """The function registered by that name."""
    found = entry_points(group=group, name=name)
    if not found:
        raise TessellmError(not_installed(f"demo {name}" if group == DEMOS else name))
    return next(iter(found)).load()


def not_installed(command: str) -> str:
    return f"`tessellm {command}` belongs to the lab, which is not installed. In a clone: pip install ./lab"
