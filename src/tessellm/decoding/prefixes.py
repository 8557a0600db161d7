"""Which tokens each slot's cache holds, so that a prompt which begins like another is not fed twice. A slot's tokens
are kept here once their pass was seen to be finite, never before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .requests import Request

WORTH = 16  # a shared beginning of fewer tokens is fed again


class Prefixes:
    """Tokens in each slot's cache, in use or not. The last `fresh` tokens of a prompt are always fed: the rule needs
    its members' log-probabilities there."""

    def __init__(self, slots: int, fresh: int):
        self.written: list[list[int]] = [[] for _ in range(slots)]
        self.fresh = fresh
        self.reused_tokens = 0

    def wrote(self, slot: int, tokens: Sequence[int]) -> None:
        self.written[slot] = list(tokens)

    def forget(self) -> None:
        """Feed every prompt anew. All slots must be free."""
        self.written = [[] for _ in self.written]

    def moved(self, source: int, target: int) -> None:
        self.written[target] = self.written[source]

    def shared(self, prompt: Sequence[int], held: Sequence[int]) -> int:
        """Count the tokens with which a prompt begins as `held` does, where a cache that holds these saves feeding."""
        pairs = enumerate(zip(prompt, held, strict=False))
        common = next((place for place, (one, other) in pairs if one != other), min(len(prompt), len(held)))
        usable = min(common, len(prompt) - self.fresh)
        return usable if usable >= WORTH else 0

    def reuse(self, prompt: Sequence[int], slot: int, copy: Callable[[int, int, int], None]) -> int:
        """Bring a shared beginning into a prompt's slot; count the tokens that this saves."""
        saved, _, source = max((self.shared(prompt, held), n == slot, n) for n, held in enumerate(self.written))
        if saved and source != slot:
            copy(source, slot, saved)
        self.written[slot] = list(prompt[:saved])
        self.reused_tokens += saved
        return saved

    def waits(self, request: Request, in_slot: Sequence[Request | None]) -> bool:
        """Whether another request is feeding what this one begins with: then it is better to wait for it."""
        for slot, other in enumerate(in_slot):
            if other is None or other is request or other.tokens or request.fed:
                continue
            ahead = (other.fed, -other.number) > (request.fed, -request.number)
            confirmed = min(other.fed, len(self.written[slot]))
            if ahead and self.shared(request.prompt, other.prompt) > confirmed:
                return True
        return False
