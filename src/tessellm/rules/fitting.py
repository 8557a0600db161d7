"""Whether habits, and tokens of a template, are those of the members that a rule is to combine: they may come from a
file that was edited, or from another composition. Knows numbers, no rule and no files."""

from __future__ import annotations

from collections.abc import Sequence

LARGEST_HABIT = 1e6  # nats and their logarithms; beyond, sums are no numbers
LONGEST_OPENING = 1 << 13  # tokens of a chat template before a prompt


def check_habits(habits: Sequence[Sequence[float]], experts: int) -> None:
    """Refuse habits of other experts."""
    if len(habits) not in (0, experts):
        raise ValueError(f"expected the habits of {experts} experts; got those of {len(habits)}")
    if any(abs(number) > LARGEST_HABIT for expert in habits for number in expert):
        raise ValueError(f"expected habits within ±{LARGEST_HABIT:g}")


def check_marks(span: int, turn: Sequence[int], user: Sequence[int], spaces: int) -> None:
    """Refuse marks that cannot be found among the last `span` tokens."""
    for key, mark in (("turn", turn), ("user", user)):
        if len(mark) > span:
            raise ValueError(f"{key} must fit into the span of {span}; it has {len(mark)} tokens")
    if not isinstance(spaces, int) or isinstance(spaces, bool) or not 0 <= spaces < max(1, len(user)):
        raise ValueError(f"spaces must be a number of tokens at the end of user, not all of them; got {spaces!r}")


def check_template(opening: Sequence[int], turn: Sequence[int], user: Sequence[int], vocab_size: int) -> None:
    """Refuse an opening without end, and tokens that are not in the vocabulary."""
    if len(opening) > LONGEST_OPENING:
        raise ValueError(f"expected an opening of at most {LONGEST_OPENING} tokens; got {len(opening)}")
    wrong = next((token for token in (*opening, *turn, *user) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"expected tokens from 0 to {vocab_size - 1} in its opening, turn and user; got {wrong}")
