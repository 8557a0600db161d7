"""Text made safe to show: whatever it holds, a page or a terminal shows it and does nothing else.

Control characters, escape sequences, marks that reorder text and lone surrogates become visible signs. Imports no
library.
"""

from __future__ import annotations

import unicodedata

JOINERS = "\u200c\u200d"  # letters of some scripts and emoji need them


def visible(text: str, keep: str = "\n\t") -> str:
    """Replace every character that is not plainly shown by a sign; characters in `keep` stay."""
    return "".join(character if character in keep else _sign(character) for character in text)


def _sign(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # ␛ and its like
    if code == 0x7F:
        return "␡"
    category = unicodedata.category(character)
    if (category[0] == "C" and character not in JOINERS) or category in ("Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return character
