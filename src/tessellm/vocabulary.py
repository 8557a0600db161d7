"""Do the members speak the same tokens? Align ids that are permuted or padded, exactly; refuse anything else.

The composition's ids are the base's. What is settled here, in this order:

    the tokens a member speaks   its tokenizer's tokens that have a row in its table
    the same tokens everywhere   or VocabularyError, naming the first tokens that differ and how many
    V, the composed size         the smallest table, but never less than the base's last token needs
    one Alignment a member       nothing to do, a slice (padded tables) or a gather (permuted ids)

Composed ids that are no token (padding, holes) take rows that are no token at the member. Where a member has
too few of them, the id is silent: −inf for every member, so that it is never generated.

It knows no models and reads no files: a member is a table size, a tokenizer and its end ids.
Shapes: B batch, T time, V composed vocabulary, S rows of a member's table, U silent ids, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tessellm.errors import VocabularyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 5  # tokens named in an error, in each direction
SAMPLED = 500  # texts of RUN tokens each, spread over the vocabulary, that every member splits, besides PROBES
RUN = 4
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ttab\n\nand a blank line  ",
    "I'm sure they'd've gone; WE'LL see, won't we?",
    "def f(x_1):\n    return x_1**2 + 0x1F  # $\\frac{a}{b}$",
    "3.14159 + 2718281828 = 12,345,678.90 (½, ①, ²)",
    "Ünïcödé Straße ΑΒΓ привет 你好 日本語 한국어 مرحبا",
    "cafe\u0301 caf\u00e9 \ufb01 \u200b\u00a0 👩‍👩‍👧",
)
ONE_BASE = "Fix: use members fine-tuned from one base with its tokenizer unchanged."
GIVE_TOKENIZER = "Fix: put its tokenizer's files next to its weights."
EXTEND_BASE = (
    "Fix: use an expert trained without added tokens, or add them to the base too (tokenizer.add_tokens, and "
    "model.resize_token_embeddings where its table is too small; their rows there are untrained)."
)


@dataclass(frozen=True)
class Speaker:
    """What is known of one member's tokens."""

    name: str
    table_size: int  # rows of its output embedding (config.vocab_size)
    tokenizer: PreTrainedTokenizerBase | None  # None: not known, only sizes can be compared
    end_ids: tuple[int, ...] = ()  # all end tokens of its config and generation config, in its own ids

    @cached_property
    def vocab(self) -> dict[str, int]:
        return {} if self.tokenizer is None else self.tokenizer.get_vocab()

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Those with a row. There may be others: Gemma 3 1B has 262144 rows and a token with id 262144."""
        if max(self.vocab.values(), default=-1) < self.table_size:
            return self.vocab
        return {token: i for token, i in self.vocab.items() if i < self.table_size}


@dataclass(frozen=True, eq=False)
class Alignment:
    """From the composition's ids to one member's."""

    member_id_V: Tensor | None  # composed id v is the member's member_id_V[v]; None: the same ids
    size: int  # V
    silent_U: Tensor | None = None  # composed ids that some member has no row for; the same for every member
    _copies: dict[torch.device, list[Tensor | None]] = field(default_factory=dict, repr=False)

    def to_member(self, tokens_BT: Tensor) -> Tensor:
        """Input ids for this member."""
        member_id_V, _ = self._on(tokens_BT.device)
        return tokens_BT if member_id_V is None else member_id_V[tokens_BT]

    def to_composed(self, logits_BTS: Tensor) -> Tensor:
        """The member's logits as composed columns: a softmax afterwards is over shared tokens only."""
        member_id_V, silent_U = self._on(logits_BTS.device)
        cut = slice(self.size)
        logits_BTV = logits_BTS[..., cut] if member_id_V is None else logits_BTS.index_select(-1, member_id_V)
        return logits_BTV if silent_U is None else logits_BTV.index_fill(-1, silent_U, -torch.inf)

    def _on(self, device: torch.device) -> list[Tensor | None]:
        """Both maps on that device, copied there once."""
        if device not in self._copies:
            maps = (self.member_id_V, self.silent_U)
            with torch.inference_mode(False):  # a copy made while generating must also serve a backward pass
                self._copies[device] = [ids if ids is None else ids.to(device) for ids in maps]
        return self._copies[device]


@dataclass(frozen=True)
class Vocabulary:
    """What the members agreed on."""

    size: int
    alignments: dict[str, Alignment]
    end_ids: tuple[int, ...]  # union of the members' end tokens, in composed ids, sorted
    notes: tuple[str, ...]  # one plain sentence each, for `tessellm inspect`
    chat_template: str | None


def agree(speakers: Sequence[Speaker]) -> Vocabulary:
    """The vocabulary that the members share; `speakers[0]` is the base. Raises VocabularyError."""
    assert len({s.name for s in speakers}) == len(speakers) > 0, "members have distinct names"
    known = [s for s in speakers if s.tokenizer is not None]
    guide = known[0] if known else speakers[0]  # the base, or who stands in for its unknown tokenizer
    _check_unknown(speakers)
    for speaker in known[1:]:
        _check_tokens(guide, speaker, is_base=guide is speakers[0])

    size = max(max(guide.tokens.values(), default=-1) + 1, min(s.table_size for s in speakers))
    with torch.device("cpu"):  # also while a model is being built on "meta"
        alignments = _align(guide, speakers, size)
        ends = {s.name: _composed_ends(s, alignments[s.name]) for s in speakers}
    chat_template, chat_note = _choose_chat_template(known)
    notes = (
        *_note_ids(guide, speakers, alignments, size),
        *_note_tokenizers(speakers),
        *_note_special_tokens(known),
        *_note_splitting(known),
        *_note_ends(guide, speakers, alignments, ends),
        chat_note,
    )
    return Vocabulary(size, alignments, tuple(sorted(set().union(*ends.values()))), notes, chat_template)


# ── refusals


def _check_unknown(speakers: Sequence[Speaker]) -> None:
    """Without a tokenizer nobody can tell padding from tokens: the tables must be of one size."""
    base = speakers[0]
    for other in speakers[1:]:
        unknown = _listed(s for s in (base, other) if s.tokenizer is None)
        if unknown and other.table_size != base.table_size:
            raise VocabularyError(
                f"The table of {base.name!r} has {base.table_size} rows and that of {other.name!r} "
                f"{other.table_size}: without the tokenizer of {unknown} padding looks like tokens.\n"
                f"  {GIVE_TOKENIZER}"
            )


def _check_tokens(base: Speaker, other: Speaker, is_base: bool) -> None:
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


def _difference(base: Speaker, other: Speaker) -> str:
    missing, added = base.tokens.keys() - other.tokens.keys(), other.tokens.keys() - base.tokens.keys()
    lines = [
        f"{base.name!r} and {other.name!r} do not speak the same tokens (differing: {len(missing) + len(added)}).",
        *_named(base, other, missing),
        *_named(other, base, added),
    ]
    unfit = _listed(s for s, lacks in ((base, added), (other, missing)) if not lacks.isdisjoint(s.vocab))
    if unfit:
        lines.append(f"Fix: the tokenizer of {unfit} does not fit its weights; use the one of its training.")
    elif not missing and min(other.tokens[t] for t in added) > max(base.tokens.values(), default=-1):
        lines.append(f"{other.name!r} added them, and {base.name!r} has no probability to compare with.")
        lines.append(EXTEND_BASE)
    else:
        lines.append(ONE_BASE)
    return "\n  ".join(lines)


def _named(one: Speaker, two: Speaker, only: set[str]) -> Iterator[str]:
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


# ── alignment


def _align(guide: Speaker, speakers: Sequence[Speaker], size: int) -> dict[str, Alignment]:
    maps: dict[str, Tensor | None] = {}
    silent: set[int] = set()
    for s in speakers:
        maps[s.name] = None
        if s.tokenizer is not None and s.tokens != guide.tokens:
            maps[s.name], unmatched = _translate(guide.tokens, s.tokens, size, s.table_size)
            silent.update(unmatched)
    silent_U = torch.tensor(sorted(silent)) if silent else None
    return {name: Alignment(member_id_V, size, silent_U) for name, member_id_V in maps.items()}


def _translate(base: dict[str, int], member: dict[str, int], size: int, table_size: int) -> tuple[Tensor, list[int]]:
    """`member_id_V`, and the composed ids for which the member has no row left (as input they read row 0).

    Tokens go by their text; the other ids to the same id where that row is free, the rest in ascending order.
    """
    base_id_N = torch.tensor(list(base.values()))
    member_id_N = torch.tensor([member[token] for token in base])
    member_id_V = torch.full((size,), -1)
    member_id_V[base_id_N] = member_id_N
    free_S = torch.ones(table_size, dtype=torch.bool)
    free_S[member_id_N] = False

    overlap = min(size, table_size)
    same = ((member_id_V[:overlap] < 0) & free_S[:overlap]).nonzero().flatten()
    member_id_V[same] = same
    free_S[same] = False

    rest, rows = (member_id_V < 0).nonzero().flatten(), free_S.nonzero().flatten()
    member_id_V[rest] = 0
    member_id_V[rest[: len(rows)]] = rows[: len(rest)]
    return member_id_V, rest[len(rows) :].tolist()


def _composed_ends(speaker: Speaker, alignment: Alignment) -> list[int]:
    """The member's end tokens in composed ids; ids outside its table or in cut-off padding are left out."""
    ids_V = torch.arange(alignment.size)
    own_id_V = alignment.to_member(ids_V)
    end_V = torch.isin(own_id_V, torch.tensor(speaker.end_ids, dtype=torch.long))
    silent = [] if alignment.silent_U is None else alignment.silent_U.tolist()
    return [i for i in ids_V[end_V].tolist() if i not in silent]


def _choose_chat_template(known: Sequence[Speaker]) -> tuple[str | None, str]:
    """The base's, otherwise that of the first expert that has one; and the note that says so."""
    templates = {s.name: getattr(s.tokenizer, "chat_template", None) for s in known}
    templates = {name: t.get("default") if isinstance(t, dict) else t for name, t in templates.items()}
    name = next((name for name, template in templates.items() if template), None)
    if name is None:
        return None, "No member has a chat template."
    others = [s for s in known if templates[s.name] not in (None, templates[name])]
    unused = f"; {_listed(others)} would use another" if others else ""
    return templates[name], f"The chat template is that of {name!r}{unused}."


# ── notes


def _note_ids(
    guide: Speaker, speakers: Sequence[Speaker], alignments: dict[str, Alignment], size: int
) -> Iterator[str]:
    if len({s.table_size for s in speakers}) > 1:
        sizes = ", ".join(f"{s.name!r} {s.table_size}" for s in speakers)
        yield f"Tables of different sizes hold the same tokens ({sizes}); the composition has {size} ids."
    for s in speakers:
        if alignments[s.name].member_id_V is not None:
            ids_N = torch.tensor(list(guide.tokens.values()), device="cpu")
            moved = ids_N[alignments[s.name].to_member(ids_N) != ids_N]
            lowest = int(moved.min())
            first = next(token for token, i in guide.tokens.items() if i == lowest)
            yield (
                f"{s.name!r} numbers tokens differently: {len(moved)}, from {first!r} ({lowest} at {guide.name!r}, "
                f"{s.tokens[first]} at {s.name!r}); its ids are translated exactly."
            )
    silent_U = alignments[guide.name].silent_U
    if silent_U is not None:
        yield f"Ids that are no token and have no row at some member are never generated: {len(silent_U)}."


def _note_tokenizers(speakers: Sequence[Speaker]) -> Iterator[str]:
    if unknown := _listed(s for s in speakers if s.tokenizer is None):
        yield f"The tokenizer of {unknown} is not known; equal ids are taken to mean equal tokens."
    for s in speakers:
        if len(s.tokens) < len(s.vocab):
            beyond = s.vocab.keys() - s.tokens.keys()
            first = min(beyond, key=s.vocab.__getitem__)
            yield (
                f"The tokenizer of {s.name!r} has tokens beyond its table: {len(beyond)}, from {first!r} (id "
                f"{s.vocab[first]}); no member speaks them, and a prompt must not hold them."
            )


def _note_special_tokens(known: Sequence[Speaker]) -> Iterator[str]:
    for role in ("bos", "eos", "pad", "unk"):
        text = {s.name: getattr(s.tokenizer, f"{role}_token") for s in known}
        if len(set(text.values())) > 1:
            said = ", ".join(f"{name!r} {'none' if t is None else repr(t)}" for name, t in text.items())
            yield f"The {role} token differs ({said}); that of {known[0].name!r} is used."


def _note_splitting(known: Sequence[Speaker]) -> Iterator[str]:
    """Equal tokens may be split off differently: other merges, another normaliser or pre-tokenizer."""
    if len(known) < 2:
        return
    base, probes = known[0], _probes(known[0])
    expected = [_split(base, probe) for probe in probes]
    for s in known[1:]:
        rows = [(probe, _split(s, probe), e) for probe, e in zip(probes, expected, strict=True)]
        differing = [row for row in rows if row[1] != row[2]]
        if differing:
            probe, own, base_own = min(differing, key=lambda row: len(row[0]))
            yield (
                f"{s.name!r} splits {len(differing)} of {len(probes)} texts differently ({probe!r} into "
                f"{own}, {base.name!r} into {base_own}); prompts are split as {base.name!r} splits them."
            )
        own, base_own = _split(s, "", wrapped=True), _split(base, "", wrapped=True)
        if own != base_own:
            yield f"{s.name!r} adds {own} to a prompt, {base.name!r} {base_own}; {base.name!r} is followed."


def _probes(speaker: Speaker) -> list[str]:
    assert speaker.tokenizer is not None
    tokens = sorted(speaker.tokens, key=speaker.tokens.__getitem__)
    starts = range(0, len(tokens), max(RUN, len(tokens) // SAMPLED))
    return [*PROBES, *(speaker.tokenizer.convert_tokens_to_string(tokens[n : n + RUN]) for n in starts)]


def _split(speaker: Speaker, text: str, wrapped: bool = False) -> list[str] | None:
    """The text's tokens; None where the tokenizer cannot split it (word-level without an unknown token)."""
    assert speaker.tokenizer is not None
    try:
        ids = speaker.tokenizer(text, add_special_tokens=wrapped)["input_ids"]
        return list(speaker.tokenizer.convert_ids_to_tokens(ids))
    except Exception:  # the tokenizers library raises nothing more precise
        return None


def _note_ends(
    guide: Speaker, speakers: Sequence[Speaker], alignments: dict[str, Alignment], ends: dict[str, list[int]]
) -> Iterator[str]:
    wanted = set().union(*ends.values())
    text = {i: f"{token!r} (id {i})" for token, i in guide.tokens.items() if i in wanted}
    said = {name: " and ".join(text.get(i, f"id {i}") for i in ids) or "nothing" for name, ids in ends.items()}
    if not wanted:
        yield "No member declares an end token; generation stops at its length limit."
    elif len(set(said.values())) == 1:
        yield f"Every member ends with {said[guide.name]}."
    else:
        differ = ", ".join(f"{name!r} ends with {own}" for name, own in said.items())
        yield f"The end tokens differ: {differ}; generation stops at any of them."
    for s in speakers:
        heard = alignments[s.name].to_member(torch.tensor(ends[s.name], dtype=torch.long, device="cpu"))
        if lost := sorted(set(s.end_ids) - set(heard.tolist())):
            yield f"{s.name!r} declares end ids that are no ids of the composition and are ignored: {lost}."


def _listed(speakers: Iterable[Speaker]) -> str:
    return " and ".join(repr(s.name) for s in speakers)
