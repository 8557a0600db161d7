"""Do the members speak the same tokens? Align ids that are permuted or padded, exactly; refuse anything else.

The composition's ids are the base's. What is settled here, in this order:

    the tokens a member speaks   its tokenizer's tokens that have a row in its table
    the same tokens everywhere   or VocabularyError, naming the first tokens that differ and how many
    V, the composed size         the smallest table, but never less than the base's last token needs
    one Alignment a member       nothing to do, a slice (padded tables) or a gather (permuted ids)

It knows no models and reads no files: a member is a table size, a tokenizer and its end ids.
Shapes: B batch, T time, V composed vocabulary, S rows of a member's table, U silent ids, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import VocabularyError
from .alignment import Alignment, align, composed_ends
from .member_tokens import MemberTokens
from .notes import (
    choose_chat_template,
    listed,
    note_ends,
    note_ids,
    note_special_tokens,
    note_splitting,
    note_tokenizers,
)

SHOWN = 5  # tokens named in an error, in each direction
ONE_BASE = "Fix: use members fine-tuned from one base with its tokenizer unchanged."
GIVE_TOKENIZER = "Fix: put its tokenizer's files next to its weights."
EXTEND_BASE = (
    "Fix: use an expert trained without added tokens, or add them to the base too (tokenizer.add_tokens, and "
    "model.resize_token_embeddings where its table is too small; their rows there are untrained)."
)


@dataclass(frozen=True)
class Vocabulary:
    """What the members agreed on."""

    size: int
    alignments: dict[str, Alignment]
    member_end_ids: dict[str, tuple[int, ...]]  # every member's end tokens, in composed ids, sorted
    notes: tuple[str, ...]  # one plain sentence each, for `tessellm inspect`
    chat_template: str | None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every end token of any member."""
        return tuple(sorted({token for ids in self.member_end_ids.values() for token in ids}))


def agree(members: Sequence[MemberTokens]) -> Vocabulary:
    """The vocabulary that the members share; `members[0]` is the base. Raises VocabularyError."""
    assert len({s.name for s in members}) == len(members) > 0, "members have distinct names"
    known = [s for s in members if s.tokenizer is not None]
    guide = known[0] if known else members[0]  # the base, or who stands in for its unknown tokenizer
    _check_unknown(members)
    for member in known[1:]:
        _check_tokens(guide, member, is_base=guide is members[0])

    size = max(max(guide.tokens.values(), default=-1) + 1, min(s.table_size for s in members))
    with torch.device("cpu"):  # also while a model is being built on "meta"
        alignments = align(guide, members, size)
        ends = {s.name: composed_ends(s, alignments[s.name]) for s in members}
    chat_template, chat_note = choose_chat_template(known)
    notes = (
        *note_ids(guide, members, alignments, size),
        *note_tokenizers(members),
        *note_special_tokens(known),
        *note_splitting(known),
        *note_ends(guide, members, alignments, ends),
        chat_note,
    )
    member_end_ids = {name: tuple(sorted(ids)) for name, ids in ends.items()}
    return Vocabulary(size, alignments, member_end_ids, notes, chat_template)


def _check_unknown(members: Sequence[MemberTokens]) -> None:
    """Without a tokenizer nobody can tell padding from tokens: the tables must be of one size."""
    base = members[0]
    for other in members[1:]:
        unknown = listed(s for s in (base, other) if s.tokenizer is None)
        if unknown and other.table_size != base.table_size:
            raise VocabularyError(
                f"The table of {base.name!r} has {base.table_size} rows and that of {other.name!r} "
                f"{other.table_size}: without the tokenizer of {unknown} padding looks like tokens.\n"
                f"  {GIVE_TOKENIZER}"
            )


def _check_tokens(base: MemberTokens, other: MemberTokens, is_base: bool) -> None:
    if base.tokens == other.tokens:
        return
    if base.tokens.keys() != other.tokens.keys():
        raise VocabularyError(_difference(base, other))
    if not is_base:
        raise VocabularyError(
            f"{base.name!r} and {other.name!r} number the same tokens differently, and without the base's "
            f"tokenizer its ids are not known.\n  {GIVE_TOKENIZER}"
        )
    for one, two in ((base, other), (other, base)):
        if len(set(one.tokens.values())) == len(one.tokens):
            continue
        first: dict[int, str] = {}
        for token, i in one.tokens.items():
            if two.tokens[token] != two.tokens[first.setdefault(i, token)]:
                raise VocabularyError(
                    f"{one.name!r} has one id ({i}) for the tokens {first[i]!r} and {token!r}, and "
                    f"{two.name!r} has two: there is no exact map between their ids.\n  {ONE_BASE}"
                )


def _difference(base: MemberTokens, other: MemberTokens) -> str:
    missing, added = base.tokens.keys() - other.tokens.keys(), other.tokens.keys() - base.tokens.keys()
    lines = [
        f"{base.name!r} and {other.name!r} do not speak the same tokens (differing: {len(missing) + len(added)}).",
        *_named(base, other, missing),
        *_named(other, base, added),
    ]
    unfit = listed(s for s, lacks in ((base, added), (other, missing)) if not lacks.isdisjoint(s.vocab))
    if unfit:
        lines.append(f"Fix: the tokenizer of {unfit} does not fit its weights; use the one of its training.")
    elif not missing and min(other.tokens[t] for t in added) > max(base.tokens.values(), default=-1):
        lines.append(f"{other.name!r} added them, and {base.name!r} has no probability to compare with.")
        lines.append(EXTEND_BASE)
    else:
        lines.append(ONE_BASE)
    return "\n  ".join(lines)


def _named(one: MemberTokens, two: MemberTokens, only: set[str]) -> Iterator[str]:
    """A line with the first tokens of `one` that `two` does not speak, and what `two` has in their place."""
    first = {token: one.tokens[token] for token in sorted(only, key=one.tokens.__getitem__)[:SHOWN]}
    wanted = set(first.values())
    instead = {i: f", which is {t!r} at {two.name!r}" for t, i in two.tokens.items() if i in wanted}
    why = {t: instead.get(i, "") for t, i in first.items()}
    for t in first.keys() & two.vocab.keys():
        why[t] = f"; id {two.vocab[t]} at {two.name!r}, whose table has only {two.table_size} rows"
    if only:
        named = ", ".join(f"{t!r} (id {i}{why[t]})" for t, i in first.items())
        yield f"Only {one.name!r} speaks {len(only)}: {named}{', …' if len(only) > SHOWN else ''}"
