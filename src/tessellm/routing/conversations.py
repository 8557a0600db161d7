"""The last message of a conversation, read as if it came first.

What was said before moves the energies at the last token, whatever the message asks. So the base reads the message
once more, alone. Knows token ids; the caller runs the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from .route import RoutedPrompt
from .template import ChatMarks

Read = Callable[[list[int]], Tensor]  # token ids → energy_TK


class MessageAlone(NamedTuple):
    ids: list[int]
    user: slice


def last_message(prompt: RoutedPrompt, marks: ChatMarks) -> MessageAlone | None:
    """Return a prompt's last message in the template; None where nothing was said before it."""
    start, prefix = prompt.user.start, marks.prefix
    if not start or not prefix or tuple(prompt.ids[:start]) in (prefix, marks.first.always):
        return None
    spoken = prompt.user.stop - start
    return MessageAlone([*prefix, *prompt.ids[start:]], slice(len(prefix), len(prefix) + spoken))


def read_alone(prompts: Sequence[RoutedPrompt], marks: ChatMarks, read: Read) -> list[RoutedPrompt]:
    """Return prompts with their last messages alone. Messages that begin like a longer one share its reading."""
    found, known = list(prompts), list[tuple[list[int], Tensor]]()
    for place in sorted(range(len(prompts)), key=lambda place: -len(prompts[place].ids)):
        message = last_message(prompts[place], marks)
        if message is None:
            continue
        ids = message.ids
        energy_TK = next((energies[: len(ids)] for longer, energies in known if longer[: len(ids)] == ids), None)
        if energy_TK is None:
            energy_TK = read(ids)
            known.append((ids, energy_TK))
        found[place] = RoutedPrompt(ids, message.user, energy_TK)
    return found
