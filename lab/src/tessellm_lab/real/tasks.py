"""Tasks: prompts as token ids, and answers judged. Knows texts and the data's formats; no models.

What is asked in one prompt is judged as docs/experiments-real.md says; with `fold`, without regard to case, for blends
of a domain with capitals. Of two requests in one prompt each part has to occur in what was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tessellm.text.chat import Chat

from .packing import Text
from .skills import Example

_NUMBER = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
FUNCTION = "Complete this Python function.\n"  # how the code expert was asked
PASSED = 83  # exit code of a program that came to its end


def encode(tokenizer: Any, examples: Sequence[Example]) -> list[Text]:
    """Prompts in the chat template, and answers with the token that ends them there, as token ids."""
    prompts = [Chat().put(tokenizer, example.prompt).encode(tokenizer) for example in examples]
    texts, end = [example.answer for example in examples], end_of_answer(tokenizer)
    answers = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [(prompt, [*answer, end]) for prompt, answer in zip(prompts, answers, strict=True)]


def end_of_answer(tokenizer: Any) -> int:
    """The special token that the chat template puts behind an answer, else the tokenizer's end token. Some versions of
    transformers read another end token from a GGUF file than the template has, and models learn to end with it."""
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    behind = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("answer")[2]
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return ids[0] if ids and ids[0] in special else tokenizer.eos_token_id


def judge(name: str, text: str, answer: str, fold: bool = False) -> float:
    """How right a text is, from 0 to 1."""
    if fold:
        text, answer = text.lower(), answer.lower()
    return float(JUDGES[name](text.strip(), answer.strip()))


def number_of(text: str) -> float | None:
    """The number behind the first ####."""
    found = _NUMBER.search(text)
    return float(found[1].replace(",", "")) if found else None


def share_of_capitals(text: str) -> float:
    """Of the letters; 0 where there is none."""
    letters = [character for character in text if character.isalpha()]
    return sum(letter.isupper() for letter in letters) / max(1, len(letters))


def _same_number(text: str, answer: str) -> bool:
    return number_of(text) is not None and number_of(text) == number_of(answer)


def _same_command(text: str, answer: str) -> bool:
    return text.split() == answer.split()


def _same_query(text: str, answer: str) -> bool:
    return text.lower().split() == answer.lower().split()


def _same_object(text: str, answer: str) -> bool:
    return _object(text) is not None and _object(text) == _object(answer)


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


JUDGES: dict[str, Callable[[str, str], float]] = {
    "math": _same_number,
    "bash": _same_command,
    "intents": _same_object,
    "sql": _same_query,
    "capitals": lambda text, answer: share_of_capitals(text),
}


def occurs(name: str, text: str, answer: str) -> float:
    """Whether the right answer is somewhere in a text that answers something else too."""
    if name == "intents":
        return float(any(_same_object(part, answer) for part in _objects(text)))
    if name == "math":
        wanted = number_of(answer)
        return float(any(float(found.replace(",", "")) == wanted for found in _NUMBER.findall(text)))
    normalised = (" ".join(each.split()) for each in (text, answer))
    part, wanted_text = (each.lower() if name == "sql" else each for each in normalised)
    return float(wanted_text in part)


def _objects(text: str) -> list[str]:
    """Every part of a text that is a JSON object."""
    found, decoder = [], json.JSONDecoder()
    for start in (match.start() for match in re.finditer(r"\{", text)):
        try:
            found.append(text[start : decoder.raw_decode(text, start)[1]])
        except (ValueError, RecursionError):
            continue
    return found


def function_prompt(problem: Example) -> Example:
    """A problem of HumanEval, asked as the code expert was in training."""
    return Example(FUNCTION + problem.prompt.strip(), problem.answer, {**problem.facts, "signature": problem.prompt})


def program(problem: Example, text: str) -> str:
    """What has to run for a problem of HumanEval to be solved: its beginning, what was written, its tests."""
    facts, block = problem.facts, _BLOCK.search(text)
    code = block[1] if block else text
    is_whole = f"def {facts['entry_point']}" in code
    begun = facts["signature"].rstrip() + ("\n    pass\n\n" if is_whole else "\n")
    ending = f"\n{facts['test']}\ncheck({facts['entry_point']})\nimport os\nos._exit({PASSED})\n"
    return begun + code + "\n" + ending


def two_requests(first: Example, second: Example) -> str:
    """One prompt that asks for both."""
    return f"Do two things.\nFirst: {first.prompt}\nSecond: {second.prompt}"
