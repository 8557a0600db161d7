"""Styles: experts that concern every prompt, such as answers in capitals. They are heard in every component
of a mixture. Which experts are styles is declared: log-probabilities cannot tell, since narrow experts act
on every prompt too."""

from __future__ import annotations

from collections.abc import Sequence


def checked_styles(styles: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the experts that are styles, in order."""
    if any(not isinstance(style, int) or isinstance(style, bool) or style < 1 for style in styles):
        raise ValueError(f"styles are numbers of experts, 1 for the first; got {styles!r}")
    if len(set(styles)) < len(styles):
        raise ValueError(f"styles are numbers of experts, each once; got {styles!r}")
    return tuple(sorted(styles))


def check_styles_known(styles: Sequence[int], experts: int) -> None:
    """Refuse styles of other members."""
    if any(style > experts for style in styles):
        raise ValueError(f"expected styles among {experts} experts; got {styles!r}")
