"""What a user asks for: how many new tokens, drawn how, ended by which texts."""

from __future__ import annotations

from dataclasses import dataclass

from ..decoding.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """How to generate."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    chat: bool = False
    fit: bool = False  # as many new tokens as the context has room for, if that is fewer; one at the least

    def __post_init__(self) -> None:
        Sampling(self.max_new_tokens, self.temperature, self.top_p, self.seed)  # which says what cannot be asked for
