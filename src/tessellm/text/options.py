"""What a user asks of a text: how many new tokens, drawn how, ended by which texts. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engine.sampling import Sampling
from .chat import Chat

SEED_BITS = 24  # of a request's seed: which of the texts that share the user's seed it is


@dataclass(frozen=True)
class TextOptions:
    """How to generate."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    chat: Chat | None = None  # prompts are turns of a chat
    schema: dict[str, Any] | None = None  # the JSON schema that texts are held to
    fit: bool = False  # as many new tokens as the context has room for, if that is fewer; one at the least

    def __post_init__(self) -> None:
        Sampling(self.max_new_tokens, self.temperature, self.top_p, self.seed)  # which says what cannot be asked for

    def sampling(self, number: int) -> Sampling:
        """Make the engine's sampling settings for the text with that number."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, seed_of(self.seed, number))


def seed_of(seed: int, number: int) -> int:
    """Derive the seed of one text from the user's seed, which several texts share, and the text's number."""
    return ((seed << SEED_BITS) + number) % 2**63
