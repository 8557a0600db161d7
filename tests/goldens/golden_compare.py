"""Compare what is computed now with what was recorded. Every function returns the differences, as lines to read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

ROUNDING = 1e-4  # of log-probabilities; a choice with a smaller margin may fall either way
REPLIED = 1e-3  # of numbers in replies, most of which have four digits


def logit_differences(place: str, golden: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> list[str]:
    """Compare rows of logits, entry by entry."""
    if [len(row) for row in golden] != [len(row) for row in found]:
        return [f"{place}: expected {len(golden)} rows of {len(golden[0])} logits; got {len(found)}"]
    return [
        f"{place}: row {t}, token {v}: expected {one}; got {other}"
        for t, (row, now) in enumerate(zip(golden, found, strict=True))
        for v, (one, other) in enumerate(zip(row, now, strict=True))
        if not math.isclose(one, other, rel_tol=0, abs_tol=ROUNDING)
    ]


def written_differences(place: str, golden: Sequence[Mapping[str, Any]], found: Sequence[Any]) -> list[str]:
    """Compare what was written for each prompt, token by token. Behind a token whose margin is within rounding texts
    may go on differently: there the comparison of this prompt ends."""
    if len(golden) != len(found):
        return [f"{place}: expected {len(golden)} texts; got {len(found)}"]
    pairs = enumerate(zip(golden, found, strict=True))
    return [f"{place}: prompt {n}: {line}" for n, (one, other) in pairs for line in _text(one, other)]


def _text(golden: Mapping[str, Any], found: Any) -> Iterator[str]:
    tokens, logprobs = golden["tokens"], golden["logprobs"]
    for t, (token, margin) in enumerate(zip(tokens, golden["margins"], strict=True)):
        now = found.tokens[t] if t < len(found.tokens) else None
        if now != token:
            if margin > ROUNDING:
                yield f"token {t}: expected {token}; got {now}"
            return
        if not math.isclose(logprobs[t], found.logprobs[t], rel_tol=0, abs_tol=ROUNDING):
            yield f"log-probability of token {t}: expected {logprobs[t]}; got {found.logprobs[t]}"
    if len(found.tokens) != len(tokens) or found.finish != golden["finish"]:
        expected = f"{len(tokens)} tokens, {golden['finish']}"
        yield f"expected {expected}; got {len(found.tokens)} tokens, {found.finish}"


def differences(golden: Any, found: Any, place: str = "", tolerance: float = REPLIED) -> list[str]:
    """Compare JSON values: keys, lengths, types and values, floats up to a tolerance."""
    if isinstance(golden, dict) and isinstance(found, dict):
        absent = [f"{place}.{key}: is missing" for key in golden if key not in found]
        new = [f"{place}.{key}: was not there; got {found[key]!r}" for key in found if key not in golden]
        both = [key for key in golden if key in found]
        return absent + new + [d for k in both for d in differences(golden[k], found[k], f"{place}.{k}", tolerance)]
    if isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        pairs = enumerate(zip(golden, found, strict=True))
        return [d for n, (one, other) in pairs for d in differences(one, other, f"{place}[{n}]", tolerance)]
    if isinstance(golden, float) and isinstance(found, int | float):
        near = math.isclose(golden, found, rel_tol=tolerance, abs_tol=tolerance)
        return [] if near else [f"{place}: expected {golden}; got {found}"]
    same = golden == found and isinstance(found, bool) == isinstance(golden, bool)
    return [] if same else [f"{place}: expected {golden!r}; got {found!r}"]


def launch_differences(place: str, golden: Sequence[str], found: Sequence[str]) -> list[str]:
    """Compare launches in order: which were added or are missing, and of one that changed, which of its parts did."""
    wrong = []
    for kind, i, j, m, n in SequenceMatcher(None, golden, found, autojunk=False).get_opcodes():
        pairs = zip_longest(golden[i:j], found[m:n]) if kind != "equal" else ()
        for number, (one, other) in enumerate(pairs, i):
            if one is None or other is None:
                wrong.append(f"{place}: launch {number} {'is missing' if other is None else 'is new'}: {one or other}")
            else:
                words = (" ".join(w for w in a.split() if w not in b.split()) for a, b in ((one, other), (other, one)))
                wrong.append(f"{place}: launch {number}, {one.split()[0]}: expected {next(words)}; got {next(words)}")
    return wrong
