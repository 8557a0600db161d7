"""ComposedCache: one cache per member, and the rule's state, behind one Hugging Face `Cache`.

Whatever generation does to a cache (reorder, crop, select, repeat) is done to every member's cache and to the rule's
state, so that beams, batches and rollbacks stay right. It knows the rule only as something with a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..rules import Explanation, Rule

Observer = Callable[[Tensor, Tensor, Tensor, Explanation], Mapping[str, Tensor] | None]
"""Called with every row that is composed: logp_MBTV, tokens_BT, the composed logp_BTV, and why. The tokens are those
fed where a model composes, and those chosen from the rows where an engine decodes; the engine keeps what is returned,
[B, …] by name, with the request's tokens."""


class ComposedCache(Cache):
    """The caches of all members, in the members' order, and what the rule remembers."""

    def __init__(self, caches: Sequence[Cache], rule: Rule):
        self.caches = list(caches)
        self.rule = rule
        self.state: Any = None
        self._recording = False
        self._state_before: Any = None  # the rule's state before the recorded rows
        self._recorded: list[tuple[Tensor, Tensor, Tensor]] = []
        self.offloading = False
        self.observer: Observer | None = None  # sees rows as they are composed; cannot follow rows that move

    def compose(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Run the rule from the state remembered, and remember where it ended."""
        if self._recording and self.rule.window:
            self._recorded.append((logp_MBTV, tokens_BT, mask_BT))
        if self.observer is None:
            logp_BTV, self.state = self.rule(logp_MBTV, tokens_BT, mask_BT, self.state)
        else:
            logp_BTV, self.state, why = self.rule.explain(logp_MBTV, tokens_BT, mask_BT, self.state)
            self.observer(logp_MBTV, tokens_BT, logp_BTV, why)
        return logp_BTV

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        return [layer for cache in self.caches for layer in cache.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.caches[0].get_seq_length())

    def get_max_length(self, layer_idx: int | None = None) -> int:
        lengths = [cache.get_max_length() for cache in self.caches if len(cache)]
        return min((length for length in lengths if length >= 0), default=-1)

    @property
    def batch_size(self) -> int:
        return self.caches[0].batch_size

    @property
    def is_compileable(self) -> bool:
        return False  # every member makes its own masks; the fast path compiles members, not this

    def reset(self) -> None:
        for cache in self.caches:
            cache.reset()
        self.state = None
        self._forget_recording()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for cache in self.caches:
            cache.reorder_cache(beam_idx)
        self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        for cache in self.caches:
            cache.batch_select_indices(indices)
        self._change_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        for cache in self.caches:
            cache.batch_repeat_interleave(repeats)
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def activate_past_recording(self) -> None:
        """From now on, keep what `crop` needs to go back: windowed layers' past and the rule's rows."""
        if any(not hasattr(layer, "crop") for layer in self.layers):
            raise ValueError("a static cache cannot go back; assisted generation needs a dynamic one")
        for cache in self.caches:
            cache.activate_past_recording()
        self._recording = True
        self._forget_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; the sign of the number does not matter, as with the layers' own negative form."""
        removed = abs(tokens_to_remove)
        if removed and self.observer is not None:
            raise ValueError("a trace cannot follow tokens that are taken back; trace the finished text instead")
        if removed and self.rule.window:
            rows = sum(tokens_BT.shape[1] for _, tokens_BT, _ in self._recorded)
            if removed > rows:
                raise RuntimeError(
                    f"cannot crop {removed} tokens: the rule {self.rule.name!r} has state, and {rows} tokens were "
                    "recorded. Call activate_past_recording() before the forward passes that may be undone"
                )
            self._replay(rows - removed)
        for cache in self.caches:
            cache.crop(-removed)
        self._forget_recording()

    def _replay(self, rows: int) -> None:
        self.state = self._state_before
        for logp_MBTV, tokens_BT, mask_BT in self._recorded:
            kept = min(rows, tokens_BT.shape[1])
            if kept:
                _, self.state = self.rule(logp_MBTV[:, :, :kept], tokens_BT[:, :kept], mask_BT[:, :kept], self.state)
            rows -= kept

    def _forget_recording(self) -> None:
        self._recorded, self._state_before = [], self.state

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.observer is not None:
            raise ValueError("a trace cannot follow beams that change places; trace the finished text instead")
        if self.state is not None:
            self.state = type(self.state)(*(change(tensor) for tensor in self.state))
        if self._state_before is not None:
            self._state_before = type(self._state_before)(*(change(tensor) for tensor in self._state_before))
        self._recorded = [
            (torch.stack([change(logp) for logp in logp_MBTV]), change(tokens), change(mask))
            for logp_MBTV, tokens, mask in self._recorded
        ]

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"ComposedCache({self.caches}, rule={self.rule.name!r})"
