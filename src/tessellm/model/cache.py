"""ComposedCache: one cache per member, the rule's state and what was read, behind one Hugging Face `Cache`.

Whatever generation does to a cache (reorder, crop, select, repeat) is done to every member's cache, to the rule's state
and to the transcript, so that beams, batches and rollbacks stay right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ..rules import ComposedRule, Explanation
from .transcript import Restarts, Transcript

Observer = Callable[[Tensor, Tensor, Tensor, Explanation], Mapping[str, Tensor] | None]
"""Called with every row that is composed: logp_MBTV, tokens_BT, the composed logp_BTV, and why. The tokens are those
fed where a model composes, and those chosen from the rows where an engine decodes; the engine keeps what is returned,
[B, …] by name, with the request's tokens."""


class Recorded(NamedTuple):
    """Rows that may be taken back."""

    logp_MBTV: Tensor
    tokens_BT: Tensor
    mask_BT: Tensor
    restarts: Restarts | None

    def first(self, count: int) -> Recorded:
        restarts = None if self.restarts is None else self.restarts.part(0, count)
        return Recorded(self.logp_MBTV[:, :, :count], self.tokens_BT[:, :count], self.mask_BT[:, :count], restarts)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Recorded:
        logp_MBTV = torch.stack([change(logp) for logp in self.logp_MBTV])
        restarts = None if self.restarts is None else Restarts(*map(change, self.restarts))
        return Recorded(logp_MBTV, change(self.tokens_BT), change(self.mask_BT), restarts)


def spans(restarts: Restarts | None, length: int) -> Iterator[tuple[int, int]]:
    """Cut so many positions before each one at which some text restarts."""
    cuts = [] if restarts is None else restarts.restart_BS.any(0).nonzero()[:, 0].tolist()
    yield from itertools.pairwise(sorted({0, *cuts, length}))


class ComposedCache(Cache):
    """The caches of all members, in the members' order, and what the rule remembers."""

    def __init__(self, caches: Sequence[Cache], rule: ComposedRule, answer_start: int | Tensor | None = None):
        self.caches = list(caches)
        self.rule = rule
        self.transcript = Transcript(answer_start)
        self.state: Any = None
        self._recording = False
        self._state_before: Any = None  # the rule's state before the recorded rows
        self._recorded: list[Recorded] = []
        self.offloading = False
        self.observer: Observer | None = None  # sees rows as they are composed; cannot follow rows that move

    def compose(
        self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor, restarts: Restarts | None = None
    ) -> Tensor:
        """Run the rule from the state remembered, and remember where it ended. Where a routed rule restarts, its state
        is made anew."""
        if self._recording and self.rule.stateful:
            self._recorded.append(Recorded(logp_MBTV, tokens_BT, mask_BT, restarts))
        rows = []
        for start, stop in spans(restarts, tokens_BT.shape[1]):
            self._restart(restarts, start, logp_MBTV)
            rows.append(self._run(logp_MBTV[:, :, start:stop], tokens_BT[:, start:stop], mask_BT[:, start:stop]))
        return torch.cat(rows, 1)

    def _run(self, logp_MBTV: Tensor, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        if self.observer is None:
            logp_BTV, self.state = self.rule(logp_MBTV, tokens_BT, mask_BT, self.state)
        else:
            logp_BTV, self.state, why = self.rule.explain(logp_MBTV, tokens_BT, mask_BT, self.state)
            self.observer(logp_MBTV, tokens_BT, logp_BTV, why)
        return logp_BTV

    def _restart(self, restarts: Restarts | None, at: int, like_MBTV: Tensor) -> None:
        """Give texts that restart at this position the state before an answer, from the prior there."""
        rule = self.rule.routed
        if restarts is None or rule is None:
            return
        restart_B, prior_BC = (each[:, at].to(like_MBTV.device) for each in restarts)
        fresh = rule.init_state(prior_BC, like_MBTV.shape[-1])
        if self.state is None:
            self.state = fresh
            return
        self.state = type(fresh)(
            *(
                torch.where(restart_B.view(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(fresh, self.state, strict=True)
            )
        )

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
        self.state, self.transcript = None, Transcript()
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
        if removed and self.rule.stateful:
            rows = sum(recorded.tokens_BT.shape[1] for recorded in self._recorded)
            if removed > rows:
                raise RuntimeError(
                    f"cannot crop {removed} tokens: the rule {self.rule.name!r} has state, and {rows} tokens were "
                    "recorded. Call activate_past_recording() before the forward passes that may be undone"
                )
            self._replay(rows - removed)
        self.transcript.crop(removed)
        for cache in self.caches:
            cache.crop(-removed)
        self._forget_recording()

    def _replay(self, rows: int) -> None:
        self.state = self._state_before
        recorded, self._recording = self._recorded, False
        for each in recorded:
            kept = min(rows, each.tokens_BT.shape[1])
            if kept:
                self.compose(*each.first(kept))
            rows -= kept
        self._recording = True

    def _forget_recording(self) -> None:
        self._recorded, self._state_before = [], self.state

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.observer is not None:
            raise ValueError("a trace cannot follow beams that change places; trace the finished text instead")
        if self.state is not None:
            self.state = type(self.state)(*(change(tensor) for tensor in self.state))
        if self._state_before is not None:
            self._state_before = type(self._state_before)(*(change(tensor) for tensor in self._state_before))
        self._recorded = [each.changed(change) for each in self._recorded]
        self.transcript.change_rows(change)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"ComposedCache({self.caches}, rule={self.rule.name!r})"
