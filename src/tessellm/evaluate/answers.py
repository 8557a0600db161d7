"""Final answers: found in a solution, and compared as mathematics.

`boxed` reads the last \\boxed{…} with balanced braces; `equal` compares numbers, formulas, tuples, intervals, sets,
matrices, equations and words as what they mean. `equal_as_published` is the paper's own comparison of strings, kept so
that both can be reported: its pattern ends at the first closing brace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import mpmath

from .latex import FormulaError, names, value

POINTS = ("0.7312", "1.9047", "-1.3271")  # variables take values near these
CLOSE = mpmath.mpf("1e-12")
UNITS = (
    "degrees?|dollars?|cents?|pounds?|ounces?|grams?|kilograms?|kg|g|mg|meters?|metres?|centimeters?|kilometers?|cm|mm"
    "|km|m|inch|inches|in|feet|foot|ft|yards?|miles?|mph|hours?|hrs?|minutes?|mins?|seconds?|secs?|days?|weeks?|months?"
    "|years?|square|cubic|sq|units?|people|students?|ways|points?|times|percent|gallons?|liters?|litres?"
)
_UNIT = re.compile(r"(?<=[\d})\s])\s*\b(?:" + UNITS + r")\b\.?(?:\s*\^\s*(?:\d|\{\d\}))?$")
_NAME = r"[a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?"
_NAMED = re.compile(rf"({_NAME}|\({_NAME}(?:,\s*{_NAME})+\))\s*(?:=|\\in(?![a-zA-Z]))\s*(.+)")
_TEXT = re.compile(r"\\(?:text(?:bf|rm|it|normal)?|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])|±")
_THOUSANDS = re.compile(r"[^,(\[{]*?-?\d{1,3}(?:(?:,\s?|\s)\d{3})+(?:\.\d+)?(?!\d)[^,]*")


def boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{…} or \\fbox{…}."""
    for start in reversed([found.end() for found in re.finditer(r"\\f?box(?:ed)?\s*(?=\{)", text)]):
        end = _closing(text, start)
        if end is not None:
            return text[start + 1 : end].strip()
    bare = re.findall(r"\\boxed\s+([^\s{}$]+)", text)
    return bare[-1] if bare else None


def _closing(text: str, start: int) -> int | None:
    """Where the group that opens at `start` ends; escaped braces are no braces."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] in "{}" and (at == 0 or text[at - 1] != "\\"):
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at
    return None


def equal_as_published(text: str, solution: str) -> bool:
    """The strings up to the first closing brace are the same."""
    found, wanted = (re.findall(r"\\boxed\{([^}]*)\}", each) for each in (text, solution))
    return bool(found and wanted) and found[-1].strip() == wanted[-1].strip()


def equal(answer: str | None, gold: str | None) -> bool:
    """Whether two final answers mean the same."""
    if answer is None or gold is None:
        return False
    found, wanted = clean(answer), clean(gold)
    if "=" in found and "=" in wanted and _same_equation(found, wanted):
        return True
    named = [_NAMED.fullmatch(each) for each in (found, wanted)]
    if not all(named) or len({each[1] for each in named if each}) == 1:  # x = 5 is 5, but it is not y = 5
        found, wanted = (each[2] if each else text for each, text in zip(named, (found, wanted), strict=True))
    if _same(found, wanted):
        return True
    percent = [share for share in (found, wanted) if share.endswith("%")]
    if not percent:
        return False
    bare = [each.removesuffix("%") for each in (found, wanted)]
    hundredth = [f"\\frac{{{each[:-1]}}}{{100}}" if each.endswith("%") else each for each in (found, wanted)]
    return _same(*bare) or _same(*hundredth)


def clean(answer: str) -> str:
    """Without what changes nothing: layout, dollar signs, units, degrees."""
    text = answer.strip().strip("$").removeprefix(r"\(").removesuffix(r"\)").strip()
    text = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?![a-zA-Z])\.?|\\displaystyle(?![a-zA-Z])", "", text)
    text = re.sub(r",\\!\s*", ",", re.sub(r"\\mathrm\s*\{\s*([ei])\s*\}", r" \1 ", text))
    text = re.sub(r"(?<!\\)\\(?:[!,;: ]|q?quad(?![a-zA-Z]))|~", " ", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text).replace("{,}", ",")
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°", "", text)
    text = text.replace(r"\%", "%").replace(r"\$", "").replace("−", "-")
    text = re.sub(r"\\(leq|geq|neq|lt|gt)(?![a-zA-Z])", _short_relation, text)
    text = _without_words(text).strip()
    text = re.sub(r"(?<=\d)[, ]\s?(?=\d{3}(?!\d))", "", text) if _THOUSANDS.fullmatch(text) else text
    text = text.removesuffix(".").strip()
    while (shorter := _UNIT.sub("", text).strip()) and shorter != text:
        text = shorter
    return re.sub(r"\s+", " ", text)


def _short_relation(found: re.Match) -> str:
    return {"leq": r"\le ", "geq": r"\ge ", "neq": r"\ne ", "lt": "<", "gt": ">"}[found[1]]


def _without_words(text: str) -> str:
    """Words that follow mathematics are units; words alone are the answer; and, or join."""
    text = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}", ",", text)
    alone = _TEXT.fullmatch(text.strip())
    if alone:
        return _choice(alone[1])
    if not re.search(r"\d|(?<!\\)\b[a-zA-Z]\b|\\pi|\\frac|\\sqrt", _TEXT.sub("", text)):
        return _choice(_TEXT.sub(lambda found: found[1], text))
    return re.sub(_TEXT.pattern + r"\s*(?:\^\s*(?:\d|\{\d\}))?", " ", text)


def _choice(words: str) -> str:
    words = re.sub(r"\s+", " ", words).strip().rstrip(".")
    lettered = re.fullmatch(r"\(?([A-Z])\)?", words)
    return lettered[1] if lettered else words.lower()


def _same(found: str, wanted: str) -> bool:
    if re.sub(r"\s", "", found).lower() == re.sub(r"\s", "", wanted).lower():
        return bool(found.strip())
    if re.fullmatch(r"\(([A-Z])\)", found) or re.fullmatch(r"\(([A-Z])\)", wanted):
        return found.strip("()") == wanted.strip("()")
    for read, ordered in ((_union, False), (_matrix, True), (_bracketed, True), (_listed, False)):
        left, right = read(found), read(wanted)
        if left is not None or right is not None:
            left, right = left or [found], right or [wanted]
            return _all_same(left, right) if ordered else _same_in_any_order(left, right)
    return _same_value(found, wanted)


def _all_same(left: Sequence[str], right: Sequence[str]) -> bool:
    return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))


def _same_in_any_order(left: Sequence[str], right: Sequence[str]) -> bool:
    rest = list(right)
    for each in left:
        match = next((other for other in rest if _same(each, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return not rest


def _union(text: str) -> list[str] | None:
    parts = re.split(r"\\cup(?![a-zA-Z])|∪", text)
    return [part.strip() for part in parts] if len(parts) > 1 else None


def _matrix(text: str) -> list[str] | None:
    found = re.fullmatch(r"\s*\\begin\{([bpvV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}\s*", text, re.DOTALL)
    if not found:
        return None
    rows = [row for row in re.split(r"\\\\", found[2]) if row.strip()]
    return [f"{len(rows)}", *(entry.strip() for row in rows for entry in row.split("&"))]


def _bracketed(text: str) -> list[str] | None:
    """A tuple or an interval: its brackets, as words, and its parts in order."""
    opened, closed = text[:1], text[-1:]
    if opened not in "([" or closed not in ")]" or len(text) < 2:
        return None
    parts = _parts(text[1:-1])
    return [f"open {opened}", *parts, f"close {closed}"] if len(parts) > 1 else None


def _listed(text: str) -> list[str] | None:
    """A set, several values, or both values of a ±."""
    braces = re.fullmatch(r"\\\{(.*)\\\}", text, re.DOTALL)
    parts = _parts(braces[1] if braces else text)
    signed = [each for part in parts for each in _both_signs(part)]
    return [part.strip() for part in signed] if braces or len(signed) > 1 else None


def _both_signs(text: str) -> list[str]:
    return [_PLUS_MINUS.sub(sign, text) for sign in "+-"] if _PLUS_MINUS.search(text) else [text]


def _parts(text: str) -> list[str]:
    """What commas separate, outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _same_equation(found: str, wanted: str) -> bool:
    """left − right of one is a multiple of the other's."""
    sides = [each.split("=") for each in (found, wanted)]
    if any(len(each) != 2 for each in sides):
        return False
    left, right = (f"({each[0]})-({each[1]})" for each in sides)
    return _agree(left, right, lambda pairs: _constant([a / b for a, b in pairs]))


def _same_value(found: str, wanted: str) -> bool:
    return _agree(found, wanted, lambda pairs: all(_close(a, b) for a, b in pairs))


def _agree(left: str, right: str, judge: Callable[[list[tuple[mpmath.mpc, mpmath.mpc]]], bool]) -> bool:
    """Judge both formulas' values at several points."""
    try:
        variables = sorted(names(left) | names(right))
        places = [
            {name: mpmath.mpf(point) + mpmath.mpf(number) / 7 for number, name in enumerate(variables)}
            for point in POINTS
        ]
        return judge([(value(left, place), value(right, place)) for place in places])
    except (FormulaError, ZeroDivisionError):
        return False


def _close(a: mpmath.mpc, b: mpmath.mpc) -> bool:
    if mpmath.isnan(a) or mpmath.isnan(b):
        return False
    if mpmath.isinf(a) or mpmath.isinf(b):
        return a == b
    return abs(a - b) <= CLOSE * max(abs(a), abs(b)) or max(abs(a), abs(b)) < mpmath.mpf("1e-25")


def _constant(ratios: Sequence[mpmath.mpc]) -> bool:
    return all(_close(ratio, ratios[0]) for ratio in ratios)
