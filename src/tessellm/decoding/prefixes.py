"""Which tokens each slot's cache holds, so that a prompt which begins like another is not fed twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .requests import Request

WORTH = 16  # a shared beginning of fewer tokens is fed again


class Prefixes:
    """What is written in each slot, in use or not. The last `fresh` tokens of a prompt are always fed: the rule needs
    its members' log-probabilities there."""

    def __init__(self, slots: int, fresh: int):
        self.written: list[list[int]] = [[] for _ in range(slots)]
        self.fresh = fresh
        self.reused_tokens = 0

    def wrote(self, slot: int | None, tokens: Sequence[int]) -> None:
        if slot is not None:
            self.written[slot] = list(tokens)

    def forget(self) -> None:
        """Feed every prompt anew: for measurements. Nobody may be in a slot."""
        self.written = [[] for _ in self.written]

    def moved(self, source: int, target: int) -> None:
        self.written[target] = self.written[source]

    def shared(self, prompt: Sequence[int], slot: int) -> int:
        """How many tokens of the prompt need not be fed if that slot's cache is at hand."""
        usable = min(common(prompt, self.written[slot]), len(prompt) - self.fresh)
        return usable if usable >= WORTH else 0

    def best_free(self, prompt: Sequence[int], free: Sequence[int]) -> int:
        """The free slot that holds most of the prompt; else the first that nobody is likely to want."""
        return max(free, key=lambda slot: (self.shared(prompt, slot), -slot))

    def reuse(self, request: Request, copy: Callable[[int, int, int], None]) -> int:
        """Bring a shared beginning into the request's slot; how many tokens that saves."""
        slot = request.slot
        assert slot is not None
        source = max(range(len(self.written)), key=lambda other: (self.shared(request.prompt, other), other == slot))
        saved = self.shared(request.prompt, source)
        if saved and source != slot:
            copy(source, slot, saved)
        self.written[slot] = request.prompt[:saved]
        self.reused_tokens += saved
        return saved

    def waits(self, request: Request, in_slot: Sequence[Request | None]) -> bool:
        """Whether another request is feeding what this one begins with: then it is better to wait for it."""
        for other in in_slot:
            if other is None or other is request or other.prefilled or request.fed:
                continue
            ahead = (other.fed, -other.number) > (request.fed, -request.number)
            usable = min(common(request.prompt, other.prompt), len(request.prompt) - self.fresh)
            if ahead and usable >= WORTH and usable > other.fed:
                return True
        return False


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
