"""How many tokens a text has at least, without tokenising all of it: what is surely too long costs next to nothing.

Two bounds. A token covers at most as many bytes as the longest of the vocabulary has, where no token stands for more
text than its own: so bytes / longest is a lower bound. And a text that is far longer than texts that fit usually are
has its beginning tokenised first: where that alone has twice the tokens that fit, the whole has more than fit.
"""

from __future__ import annotations

import json
import math
from typing import Any

USUAL = 16  # characters per token: texts with fewer tokens than that are rare (long runs of spaces)
LOSSLESS = {"Sequence", "ByteLevel", "Split", "Digits", "Punctuation"}  # pre-tokenizers that may keep all of a text
MOST_BYTES = 4  # of a character, which may be a token of its own


class Lengths:
    """Lower bounds on token counts, for one tokenizer and one limit."""

    def __init__(self, tokenizer: Any, context: int):
        self.tokenizer, self.context = tokenizer, context
        self.longest = longest_token(tokenizer)

    def at_least(self, text: str) -> int:
        """Bound a text's tokens from below by its bytes."""
        return 0 if self.longest is None else math.ceil(len(text.encode()) / self.longest)

    def beginning(self, text: str) -> int:
        """Bound a very long text's tokens from below by its beginning."""
        return tokens_of_beginning(self.tokenizer, self.context, text)


def tokens_of_beginning(tokenizer: Any, context: int, text: str) -> int:
    """Count tokens that a text has at least, if it is much longer than texts that fit usually are; else 0."""
    if len(text) <= USUAL * context:
        return 0
    ids = tokenizer(text[: USUAL * context], add_special_tokens=False)["input_ids"]
    return len(ids) // 2  # what follows may change the last few tokens, not half of them


def longest_token(tokenizer: Any) -> int | None:
    """Bytes of text that a token covers at most; None where one may cover any number (normalised or dropped text,
    unknown words)."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or not _keeps_all(core):
        return None
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    by_letter = "ByteLevel" in _kinds(core.pre_tokenizer)  # a letter of the vocabulary is a byte
    own = (len(token if by_letter else token.encode()) for token in tokenizer.get_vocab() if token not in added)
    return max(MOST_BYTES, *own, *(len(token.encode()) for token in added))


def _keeps_all(core: Any) -> bool:
    """Whether every part of a text is in some token."""
    kinds, model = _kinds(core.pre_tokenizer), core.model
    unknown = getattr(model, "unk_token", None)
    fused = getattr(model, "fuse_unk", True) and unknown is not None
    complete = "ByteLevel" in kinds or unknown is not None
    stripping = any(token.lstrip or token.rstrip for token in core.get_added_tokens_decoder().values())
    kept = "Removed" not in str(_state(core.pre_tokenizer)) and kinds <= LOSSLESS
    return core.normalizer is None and type(model).__name__ == "BPE" and complete and kept and not (fused or stripping)


def _state(part: Any) -> Any:
    return json.loads(part.__getstate__()) if part is not None else {}


def _kinds(part: Any) -> set[str]:
    """List the types of a pre-tokenizer and of its parts."""
    state = _state(part)
    return {each["type"] for each in (state, *state.get("pretokenizers", ())) if "type" in each}
