"""How right an answer of a skill is, from 0 to 1. Knows texts, no models.

Every judge takes the prompt, what was written, and the reference answer. Judges forgive what chat models put around an
answer: a code fence, a label in front, a full stop.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .inflections import IRREGULAR, STOP_WORDS, stem
from .same_regex import same_on_probes
from .slots import told

Judge = Callable[[str, str, str], float]
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def judge(skill: str, prompt: str, written: str, answer: str) -> float:
    """Return the score of an answer."""
    return float(JUDGES[skill](prompt, written, answer))


# what several judges need


def unfenced(text: str) -> str:
    text = text.strip()
    block = re.search(r"```[\w+-]*\n?(.*?)(```|$)", text, re.DOTALL)
    if block and block.group(1).strip():
        return block.group(1).strip()
    return text[1:-1].strip() if len(text) > 2 and text[0] == text[-1] == "`" else text


def first_line(text: str) -> str:
    text = unfenced(text).strip()
    return text.split("\n")[0].strip() if text else ""


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def plain_key(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower().replace("_", " ")).strip()


def f1(found: Sequence[Any] | Counter, wanted: Sequence[Any] | Counter) -> float:
    """Return the harmonic mean of precision and recall of two bags."""
    ours, theirs = Counter(found), Counter(wanted)
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * sum((ours & theirs).values()) / (sum(ours.values()) + sum(theirs.values()))


def gleu(found: Sequence[str], wanted: Sequence[str], longest: int = 4) -> float:
    """Return the smaller of precision and recall of all 1- to 4-grams."""
    hits = ours = theirs = 0
    for n in range(1, longest + 1):
        a = Counter(tuple(found[i : i + n]) for i in range(len(found) - n + 1))
        b = Counter(tuple(wanted[i : i + n]) for i in range(len(wanted) - n + 1))
        hits += sum((a & b).values())
        ours += sum(a.values())
        theirs += sum(b.values())
    return hits / max(ours, theirs) if ours and theirs else float(list(found) == list(wanted))


def json_object(text: str) -> dict[str, Any] | None:
    text = unfenced(text)
    start = text.find("{")
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_close(found: float | None, wanted: float | None) -> bool:
    return found is not None and wanted is not None and abs(found - wanted) <= 0.011 + 1e-4 * abs(wanted)


# the judges


def regex(prompt: str, written: str, answer: str) -> float:
    """The expression, spaces and outer brackets aside; else equal on probe strings."""
    theirs, ours = _bare_regex(written), _bare_regex(answer)
    return float(theirs == ours or same_on_probes(theirs, ours))


def _bare_regex(text: str) -> str:
    text = unfenced(text).split("\n")[0]
    label = r"^(regex(p|ular expression)?|pattern)\s*:\s*"
    text = re.sub(label, "", text.strip(), flags=re.IGNORECASE).strip().strip('"')
    if len(text) > 2 and text[0] == text[-1] == "/":
        text = text[1:-1]
    text = re.sub(r"\s+", " ", text).removeprefix("^")
    if text.endswith("$") and not text.endswith("\\$"):
        text = text[:-1]
    while len(text) > 1 and text[0] == "(" and _closing_bracket(text) == len(text) - 1 and text[-1] == ")":
        text = text[1:-1]
    return text


def _closing_bracket(text: str) -> int:
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return len(text) - 1


def equation(prompt: str, written: str, answer: str) -> float:
    """The left side has the reference's value: 1; half of it where the result that is written is wrong."""
    wanted, sides = _value(_sides(answer)[0]), _sides(written)
    left = _value(sides[0])
    if not re.search(r"[-+*/]", sides[0].strip().lstrip("-")) or not is_close(left, wanted):
        return 0.0
    if len(sides) == 1:
        return 1.0
    number, value = re.search(r"-?\d+(?:\.\d+)?", sides[-1]), _value(sides[-1])
    result = value if value is not None else float(number.group()) if number else None
    return 1.0 if is_close(result, left) else 0.5


def _sides(text: str) -> list[str]:
    text = unfenced(text).strip().split("\n")[0]
    text = re.sub(r"^\s*(the )?(equation|answer)( is)?\s*:?\s*", "", text, flags=re.IGNORECASE)
    text = text.replace("×", "*").replace("÷", "/").replace("$", "").replace("−", "-").rstrip(" .")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(?<=[\d)])\s*x\s*(?=[\d(])", "*", text)
    sides = text.split("=")
    if len(sides) > 1 and re.fullmatch(r"\s*[a-zA-Z]\s*", sides[0]):
        sides = sides[1:]
    if len(sides) > 1 and re.fullmatch(r"\s*[a-zA-Z]\s*", sides[-1]):
        sides = sides[:-1]
    return sides


def _value(text: str) -> float | None:
    """Return the value of an arithmetic expression."""
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return None


def _evaluated(node: Any) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError("no arithmetic")


def ner(prompt: str, written: str, answer: str) -> float:
    """F1 of (type, name) pairs in the JSON object."""
    found = json_object(written)
    return 0.0 if found is None else f1(_pairs(found), _pairs(json_object(answer) or {}))


def _pairs(found: dict[str, Any]) -> Counter:
    return Counter(
        (str(kind).lower().replace("-", "_").replace(" ", "_"), str(name).lower().strip())
        for kind, names in found.items()
        for name in (names if isinstance(names, list) else [names])
    )


def data2text(prompt: str, written: str, answer: str) -> float:
    """Half the share of slots told, half GLEU; the record copied: 0."""
    if len(re.findall(r"\w\[[^\]]*\]", written)) >= 2 or not written.strip():
        return 0.0
    slots = [(kind.strip(), value) for kind, value in re.findall(r"([A-Za-z ]+?)\[([^\]]*)\]", prompt)]
    rating = "customer rating"
    named = [(rating if kind.endswith(rating) else re.split(r"\s", kind)[-1], value) for kind, value in slots]
    covered = sum(told(kind, value, written) for kind, value in named) / max(1, len(named))
    return 0.5 * covered + 0.5 * gleu(words(written), words(answer))


def command(prompt: str, written: str, answer: str) -> float:
    """The command, spaces aside; else half its token F1."""
    theirs, ours = (re.sub(r"\s+", " ", unfenced(text)).strip().removeprefix("$ ") for text in (written, answer))
    tokens = r"[\w./-]+|\S"
    return 1.0 if theirs == ours else 0.5 * f1(re.findall(tokens, theirs), re.findall(tokens, ours))


def clinc(prompt: str, written: str, answer: str) -> float:
    """The first line is the label."""
    label = r"^\W*(intent|label|answer|category)( label| name)?( is)?\W*:"
    found = plain_key(re.sub(label, "", first_line(written).lower()))
    return float(bool(found) and found == plain_key(answer))


def emotion(prompt: str, written: str, answer: str) -> float:
    """The first word is the label."""
    label = r"^\W*(label|emotion|answer|feeling)( is)?\W*:"
    found = re.findall(r"[a-z]+", re.sub(label, "", written.lower().strip()))
    return float(bool(found) and found[0] == answer.lower())


def advising(prompt: str, written: str, answer: str) -> float:
    """The query; case, spaces and kind of quote aside."""
    theirs, ours = (re.sub(r"\s*([,()=<>])\s*", r"\1", _query(text)) for text in (written, answer))
    return float(theirs == ours)


def sql(prompt: str, written: str, answer: str) -> float:
    """The query; case, spaces and kind of quote aside."""
    return float(_query(written) == _query(answer))


def _query(text: str) -> str:
    return re.sub(r"\s+", " ", unfenced(text)).strip().rstrip(";").strip().lower().replace('"', "'")


def define(prompt: str, written: str, answer: str) -> float:
    """A quarter for the part of speech, the rest for the content words of the first line."""
    if not first_line(written):
        return 0.0
    (part, text), (wanted, reference) = _entry(written), _entry(answer)
    content = _content(text)
    return 0.25 * (part == wanted) + 0.75 * (f1(content, _content(reference)) if content else 0.0)


def _entry(text: str) -> tuple[str, str]:
    line = first_line(text)
    found = re.match(r"\W*(noun|verb|adjective|adverb)\b[\s:.)*-]*(.*)", line, re.IGNORECASE)
    return (found.group(1).lower(), found.group(2)) if found else ("", line)


def _content(text: str) -> list[str]:
    every = re.findall(r"[a-z]+", text.lower())
    return [stem(word) for word in every if word not in STOP_WORDS] or every


def medtopic(prompt: str, written: str, answer: str) -> float:
    """Half for the aspect behind the last colon, half for the words of the condition before it."""
    (found, aspect), (wanted, reference) = _topic(written), _topic(answer)
    return 0.5 * (aspect == reference) + 0.5 * f1(found, wanted) if found else 0.0


def _topic(text: str) -> tuple[list[str], str]:
    label = r"^\W*(topic|topic and aspect|label|heading|entry|index entry)\W*:"
    line = re.sub(label, "", first_line(text), flags=re.IGNORECASE)
    condition, colon, aspect = line.rpartition(":")
    condition, aspect = (condition, aspect) if colon else (line, "")
    return re.findall(r"\w+", condition.lower()), plain_key(aspect)


def cogs(prompt: str, written: str, answer: str) -> float:
    """The logical form, spaces aside; else half the F1 of its conjuncts."""
    theirs, ours = (re.sub(r"\s+", "", first_line(text)) for text in (written, answer))
    if theirs == ours:
        return 1.0
    conjuncts, wanted = ([part for part in re.split(r"AND|;", text) if part] for text in (theirs, ours))
    return 0.5 * f1(conjuncts, wanted) if conjuncts else 0.0


def concepts(prompt: str, written: str, answer: str) -> float:
    """Half the share of given words used, less beyond 30 words, half GLEU; the given words listed: 0."""
    text = re.sub(r"\s+", " ", unfenced(written)).strip()
    used, given = re.findall(r"[a-z]+", text.lower()), _given_words(prompt)
    if not used or (given and ", ".join(given) in text.lower()):
        return 0.0
    stems = {stem(word) for word in used} | {stem(other) for word in used for other in IRREGULAR.get(word, ())}
    wanted = {stem(word) for word in given}
    if len(used) <= len(given) + 1 and all(stem(word) in wanted for word in used):
        return 0.0
    covered = sum(stem(word) in stems for word in given) / max(1, len(given)) * min(1.0, 30 / len(used))
    return 0.5 * covered + 0.5 * gleu(words(text), words(answer))


def _given_words(prompt: str) -> list[str]:
    lists = re.findall(r"[a-z][a-z-]*(?:, [a-z][a-z-]*){2,}", prompt)
    return max(lists, key=len).split(", ") if lists else []


def spanish(prompt: str, written: str, answer: str) -> float:
    """GLEU, lower-cased."""
    line = first_line(written)
    return gleu(words(line.strip('"')), words(answer)) if line else 0.0


def isodate(prompt: str, written: str, answer: str) -> float:
    """The first date and time; half where the day alone is right."""
    form = r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d))?"
    found, wanted = re.search(form, written), re.search(form, answer)
    if not found or not wanted or found.group(1) != wanted.group(1):
        return 0.0
    return 1.0 if found.group(2) == wanted.group(2) else 0.5


def fluent(prompt: str, written: str, answer: str) -> float:
    """The question, case and punctuation aside; else half of GLEU; the disfluent question copied: 0."""
    text = first_line(written).strip('"')
    found, wanted = plain_key(text), plain_key(answer)
    if found == wanted:
        return 1.0
    if not found or (found in plain_key(prompt) and len(found) > 1.1 * len(wanted)):
        return 0.0
    return 0.5 * gleu(words(text), words(answer))


def math(prompt: str, written: str, answer: str) -> float:
    """The last number, or that behind ####."""
    return float(is_close(_last_number(written), _last_number(answer)))


def _last_number(text: str) -> float | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.split("####")[-1])
    return float(numbers[-1].replace(",", "")) if numbers else None


def intents(prompt: str, written: str, answer: str) -> float:
    """The JSON object, as an object."""
    found = json_object(written)
    return float(found is not None and found == json_object(answer))


def code(prompt: str, written: str, answer: str) -> float:
    """Token F1 of the body."""
    return f1(re.findall(r"\w+|\S", unfenced(written)), re.findall(r"\w+|\S", answer))


JUDGES: dict[str, Judge] = {
    "regex": regex, "equation": equation, "ner": ner, "data2text": data2text, "tldr": command, "clinc": clinc,
    "advising": advising, "define": define, "emotion": emotion, "medtopic": medtopic, "cogs": cogs,
    "concepts": concepts, "spanish": spanish, "isodate": isodate, "fluent": fluent, "math": math, "bash": command,
    "intents": intents, "sql": sql, "code": code,
}  # fmt: skip
