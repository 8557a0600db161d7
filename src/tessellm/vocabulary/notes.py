"""What a user should know of how the members' tokens agree: one plain sentence each, for `tessellm inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from .alignment import Alignment
from .member_tokens import MemberTokens

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


def choose_chat_template(known: Sequence[MemberTokens]) -> tuple[str | None, str]:
    """The base's, otherwise that of the first expert that has one; and the note that says so."""
    templates = {s.name: getattr(s.tokenizer, "chat_template", None) for s in known}
    templates = {name: t.get("default") if isinstance(t, dict) else t for name, t in templates.items()}
    name = next((name for name, template in templates.items() if template), None)
    if name is None:
        return None, "No member has a chat template."
    others = [s for s in known if templates[s.name] not in (None, templates[name])]
    unused = f"; not used: that of {listed(others)}" if others else ""
    return templates[name], f"The chat template is that of {name!r}{unused}."


def note_ids(
    guide: MemberTokens, members: Sequence[MemberTokens], alignments: dict[str, Alignment], size: int
) -> Iterator[str]:
    if len({s.table_size for s in members}) > 1:
        sizes = ", ".join(f"{s.name!r} {s.table_size}" for s in members)
        yield f"Tables of different sizes hold the same tokens ({sizes}); the composition has {size} ids."
    for s in members:
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


def note_tokenizers(members: Sequence[MemberTokens]) -> Iterator[str]:
    if unknown := listed(s for s in members if s.tokenizer is None):
        yield f"The tokenizer of {unknown} is not known; equal ids are taken to mean equal tokens."
    for s in members:
        if len(s.tokens) < len(s.vocab):
            beyond = s.vocab.keys() - s.tokens.keys()
            first = min(beyond, key=s.vocab.__getitem__)
            yield (
                f"The tokenizer of {s.name!r} has tokens beyond its table: {len(beyond)}, from {first!r} (id "
                f"{s.vocab[first]}); no member speaks them, and a prompt must not hold them."
            )


def note_special_tokens(known: Sequence[MemberTokens]) -> Iterator[str]:
    for role in ("bos", "eos", "pad", "unk"):
        text = {s.name: getattr(s.tokenizer, f"{role}_token") for s in known}
        if len(set(text.values())) > 1:
            differing = ", ".join(f"{name!r} {'none' if t is None else repr(t)}" for name, t in text.items())
            yield f"The {role} token differs ({differing}); that of {known[0].name!r} is used."


def note_splitting(known: Sequence[MemberTokens]) -> Iterator[str]:
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


def _probes(member: MemberTokens) -> list[str]:
    assert member.tokenizer is not None
    tokens = sorted(member.tokens, key=member.tokens.__getitem__)
    starts = range(0, len(tokens), max(RUN, len(tokens) // SAMPLED))
    return [*PROBES, *(member.tokenizer.convert_tokens_to_string(tokens[n : n + RUN]) for n in starts)]


def _split(member: MemberTokens, text: str, wrapped: bool = False) -> list[str] | None:
    """The text's tokens; None where the tokenizer cannot split it (word-level without an unknown token)."""
    assert member.tokenizer is not None
    try:
        ids = member.tokenizer(text, add_special_tokens=wrapped)["input_ids"]
        return list(member.tokenizer.convert_ids_to_tokens(ids))
    except Exception:  # the tokenizers library raises nothing more precise
        return None


def note_ends(
    guide: MemberTokens, members: Sequence[MemberTokens], alignments: dict[str, Alignment], ends: dict[str, list[int]]
) -> Iterator[str]:
    wanted = set().union(*ends.values())
    text = {i: f"{token!r} (id {i})" for token, i in guide.tokens.items() if i in wanted}
    named = {name: " and ".join(text.get(i, f"id {i}") for i in ids) or "nothing" for name, ids in ends.items()}
    if not wanted:
        yield "No member declares an end token; generation stops at its length limit."
    elif len(set(named.values())) == 1:
        yield f"Every member ends with {named[guide.name]}."
    else:
        differ = ", ".join(f"{name!r} ends with {own}" for name, own in named.items())
        yield f"The end tokens differ: {differ}; generation stops at any of them."
    for s in members:
        own_ids = alignments[s.name].to_member(torch.tensor(ends[s.name], dtype=torch.long, device="cpu"))
        if lost := sorted(set(s.end_ids) - set(own_ids.tolist())):
            yield f"{s.name!r} declares end ids that are no ids of the composition and are ignored: {lost}."


def listed(members: Iterable[MemberTokens]) -> str:
    return " and ".join(repr(s.name) for s in members)
