"""Who has which colour: a palette that the colour-blind can tell apart, with other line styles once the colours are
used up."""

from __future__ import annotations

from ..text.visible import visible

PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#56b4e9",
    "#8c6d31",
    "#7f7f7f",
)  # after Okabe and Ito
TERMINAL = (33, 214, 36, 175, 166, 80, 137, 245)  # the nearest of the 256 colours
LINES = ("solid", "dashed", "dotted", "double")


def colour(owner: int) -> str:
    """Of a member, by its number; the base has none."""
    return PALETTE[(owner - 1) % len(PALETTE)] if owner else "currentColor"


def line_style(owner: int) -> str:
    return LINES[(owner - 1) // len(PALETTE) % len(LINES)] if owner else "none"


def in_terminal(text: str, owner: int) -> str:
    """A token's text in its owner's colour, for a terminal."""
    safe = visible(text)
    if not owner:
        return safe
    style = f"\x1b[{'4;' if owner > len(PALETTE) else ''}38;5;{TERMINAL[(owner - 1) % len(TERMINAL)]}m"
    return "\n".join(f"{style}{part}\x1b[0m" if part else "" for part in safe.split("\n"))
