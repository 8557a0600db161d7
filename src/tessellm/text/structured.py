"""Text that is held to a form: JSON, or JSON of a schema. A grammar says which tokens may come next; the engine chooses
among them from the mixed distribution. By llguidance (the extra `structured`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError, first_line, require
from .stream import token_bytes

LARGEST = 1 << 16  # characters of a schema
WHITESPACE = r"[ ]?|\n[ ]{0,32}"  # between JSON's tokens: a model that could write spaces for ever might
NEEDED = '{}[]",:-.0123456789aeflnrstu\\'  # tokens of one character, from which any JSON text can be made
LIMITS = {"max_grammar_size": 100_000, "max_lexer_states": 50_000, "verbose_errors": False}
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Structures:
    """The tokens of one tokenizer, as grammars know them: made once, when a form is first asked for."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]):
        self.tokenizer, self.vocabulary, self.ends = tokenizer, vocabulary, sorted(ends)
        self._known: Any = None

    def of(self, schema: dict[str, Any] | None) -> Structure:
        """Return what a text of this schema may be; None: any JSON object."""
        llguidance = require("llguidance", "structured")
        try:
            text = json.dumps(ANY_OBJECT if schema is None else schema)
        except RecursionError:
            raise GenerationError("the schema is nested too deeply") from None
        if len(text) > LARGEST:
            raise GenerationError(f"the schema has {len(text):,} characters; expected at most {LARGEST:,}")
        if self._known is None:
            self._known = self._tokens()
        options = {"whitespace_pattern": WHITESPACE}
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=options)
        except ValueError as error:
            raise GenerationError(f"the schema cannot be read: {first_line(error)}") from error
        matcher = llguidance.LLMatcher(self._known, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise GenerationError(f"the schema cannot be honoured: {first_line(Exception(matcher.get_error()))}")
        form = Structure(matcher, self.vocabulary, self.ends)
        form.allowed()
        if form.failure is not None:
            raise GenerationError(form.failure)
        return form

    def _tokens(self) -> Any:
        """Return the vocabulary as bytes; special tokens but the ends are in no text."""
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self.ends:
            raise GenerationError("these members declare no end token, so a form could not be ended")
        vocabulary = _Vocabulary(self)
        if lacking := [letter for letter in NEEDED if letter.encode() not in vocabulary.by_bytes]:
            raise GenerationError(f"this vocabulary cannot write every JSON text: it has no token {lacking[0]!r}")
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self.ends)


class _Vocabulary:
    """What llguidance asks of a tokenizer: its tokens as bytes."""

    bos_token_id = None

    def __init__(self, of: Structures):
        self.tokenizer, self.eos_token_id = of.tokenizer, of.ends[0]
        known, special = len(of.tokenizer), {*of.tokenizer.all_special_ids, *of.ends}
        found = [
            b"" if token >= known or token in special else token_bytes(of.tokenizer, token)
            for token in range(of.vocabulary)
        ]
        self.special_token_ids = [token for token, text in enumerate(found) if not text]  # which no text may hold
        self.tokens = [text or f"<{token}>".encode() for token, text in enumerate(found)]
        self.by_bytes = {text: token for token, text in enumerate(found) if text}
        self._longest = max(map(len, self.by_bytes), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Return the longest tokens that a text begins with, one after the other, as far as there are any."""
        tokens, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self.by_bytes), None)
            if end is None:
                break
            tokens.append(self.by_bytes[text[start:end]])
            start = end
        return tokens


class Structure:
    """One text's form, as far as it is written; a `Form` of the engine."""

    def __init__(self, matcher: Any, vocabulary: int, ends: Sequence[int]):
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends
        self.failure: str | None = None

    def another(self) -> Structure:
        """Return the same form for another text."""
        return Structure(self._matcher.deep_copy(), self._vocabulary, self._ends)

    def allowed(self) -> Tensor:
        """Return which tokens may come next: [V]. Where none may, the ends, and `failure` says why."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed_V = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()[: self._vocabulary]
        going_on_V = allowed_V.clone()
        going_on_V[self._ends] = False
        if self._matcher.is_error() or not (going_on_V.any() or self._matcher.is_accepting()):
            why = first_line(Exception(self._matcher.get_error())) or "no token of the vocabulary goes on"
            self.failure = f"the text cannot be held to the schema: {why}"
            allowed_V = torch.zeros(self._vocabulary, dtype=torch.bool)
            allowed_V[self._ends] = True
        return allowed_V

    def accept(self, token: int) -> None:
        """Go on behind a token that was chosen."""
        self._matcher.consume_token(token)
