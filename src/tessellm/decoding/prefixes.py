"""Which tokens each slot's cache holds, so that a prompt which begins like another is not fed twice. A slot's tokens
are kept here once their pass was seen to be finite, never before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .requests import Request

WORTH = 16  # a shared beginning of fewer tokens is fed again


class Prefixes:
    """Tokens in each slot's cache, in use or not. Those that the rule reads of a prompt are always fed: it needs its
    members' log-probabilities there."""

    def __init__(self, slots: int, on: bool = True):
        """`on`: whether caches can be copied; else every prompt is fed from its beginning."""
        self.written: list[list[int]] = [[] for _ in range(slots)]
        self.on, self.reused_tokens = on, 0

    def wrote(self, slot: int, tokens: Sequence[int]) -> None:
        self.written[slot] = list(tokens)

    def forget(self) -> None:
        """Feed every prompt anew. All slots must be free."""
        self.written = [[] for _ in self.written]

    def moved(self, source: int, target: int) -> None:
        self.written[target] = self.written[source]

    def shared(self, request: Request, held: Sequence[int]) -> int:
        """Count the tokens with which a prompt begins as `held` does, where a cache that holds these saves feeding."""
        if not self.on or request.read_from < WORTH:
            return 0
        pairs, prompt = enumerate(zip(request.prompt, held, strict=False)), request.prompt
        common = next((place for place, (one, other) in pairs if one != other), min(len(prompt), len(held)))
        usable = min(common, request.read_from)
        return usable if usable >= WORTH else 0

    def reuse(self, request: Request, slot: int, copy: Callable[[int, int, int], None]) -> int:
        """Bring a shared beginning into a prompt's slot; count the tokens that this saves."""
        saved, _, source = max((self.shared(request, held), n == slot, n) for n, held in enumerate(self.written))
        if saved and source != slot:
            copy(source, slot, saved)
        self.written[slot] = request.prompt[:saved]
        self.reused_tokens += saved
        return saved

    def waits(self, request: Request, in_slot: Sequence[Request | None]) -> bool:
        """Whether another request is feeding what this one begins with: then it is better to wait for it."""
        for slot, other in enumerate(in_slot):
            if other is None or other is request or other.tokens or request.fed:
                continue
            ahead = (other.fed, -other.number) > (request.fed, -request.number)
            confirmed = min(other.fed, len(self.written[slot]))
            if ahead and self.shared(request, other.prompt) > confirmed:
                return True
        return False
