"""Room: whether a prompt, and what should follow it, fit into a context. One check for all who read and write."""

from __future__ import annotations

from ..errors import RoomError

MEMBERS, SLOT = "the shortest context among the members", "what a slot holds"


def check_room(
    length: int,
    new: int,
    context: int,
    what: str = "the prompt",
    option: str = "max_new_tokens",
    whose: str = MEMBERS,
    about: str = "",
) -> None:
    """Refuse a prompt of `length` tokens (`about`: "at least " where they were not counted) that leaves no room for
    `new` ones, before any is written. A context of 0 has room for all."""
    if context and length + new > context:
        more = lower = beside = ""
        if new and length < context:
            more, lower = f" and up to {new} more were asked for", f", or lower {option}"
        elif new:  # it is too long however little follows
            beside = " with what follows"
        size = f"{about}{length} tokens"
        raise RoomError(
            f"{what} has {size}{more}, but there is room for {context}{beside} ({whose}). Shorten it{lower}"
        )
