"""Text in, text out: prompts from files, batches, streaming. What `tessellm generate` does, as functions."""

from __future__ import annotations

import json
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from .continuations import Request, Streamer, by_engine, by_reference, engine_for, pad_id, stop_position
from .decoding.speculation import Speculation
from .errors import EngineError, PromptError
from .model import ComposedForCausalLM


@dataclass(frozen=True)
class Generated:
    """One prompt's continuation."""

    prompt: str
    text: str
    tokens: int
    finish_reason: str  # stop: an end token or a stop text; length: max_new_tokens


def read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """Prompts from the command line (- is standard input) and from a file."""
    found = [_standard_input() if prompt == "-" else prompt for prompt in prompts]
    for number, prompt in enumerate(found, 1):
        check_characters(prompt, f"prompt {number}")
    if file is not None:
        found += read_texts(file, "prompt")
    if not found:
        if file is not None:
            raise PromptError(f"{file} holds no prompts. Expected one a line")
        raise PromptError("no prompt was given. Expected prompts as arguments, or --file with one a line")
    return found


def _standard_input() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError("standard input cannot be read: it is not UTF-8 text") from error


def read_texts(path: Path, key: str) -> list[str]:
    """Texts from a JSON list or JSON lines (of strings, or with that key), or from the lines of any other file."""
    return [_text_of(entry, key, where) for where, entry in _entries(path)]


def read_examples(path: Path) -> list[tuple[str, str]]:
    """Pairs of a prompt, which may be empty, and the text that should follow it."""
    found = [
        (_text_of(entry, "prompt", where) if isinstance(entry, dict) and "prompt" in entry else "", text)
        for (where, entry), text in zip(_entries(path), read_texts(path, "text"), strict=True)
    ]
    if not found:
        raise PromptError(f"{path} holds no texts. Expected one a line")
    return found


def _entries(path: Path) -> list[tuple[str, Any]]:
    """Where in the file, and what is there: JSON, or text."""
    return [(where, read()) for where, read in entries(path)]


def entries(path: Path, suffix: str | None = None) -> list[tuple[str, Callable[[], Any]]]:
    """Where in the file, and how to read what is there; reading an entry that is malformed raises PromptError. The
    name says which kind of file it is, unless `suffix` does."""
    suffix = path.suffix if suffix is None else suffix
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    if _is_utf16(content):
        raise PromptError(f"{path} cannot be read: it is UTF-16 text. Save it as UTF-8")
    if suffix == ".json":
        found = _parse(_decoded(content, str(path)), str(path))
        if not isinstance(found, list):
            raise PromptError(f"{path}: expected a list; got {type(found).__name__}")
        return [(f"{path}, entry {number}", partial(_same, entry)) for number, entry in enumerate(found, 1)]
    lines = [(f"{path}, line {n}", line) for n, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    read = _parsed_line if suffix == ".jsonl" else _decoded
    return [(where, partial(read, line.removesuffix(b"\r"), where)) for where, line in lines]


def _is_utf16(content: bytes) -> bool:
    """By its mark, or by what English looks like in it: every other byte is zero."""
    start = content[:4096]
    return start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or start.count(0) > len(start) // 4


def _same(entry: Any) -> Any:
    return entry


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{where} cannot be read: it is not UTF-8 text") from error


def _parsed_line(line: bytes, where: str) -> Any:
    return _parse(_decoded(line, where), where)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: no valid JSON ({error})") from error


def _text_of(entry: Any, key: str, where: str) -> str:
    text = entry.get(key) if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise PromptError(f'{where}: expected {{"{key}": "…"}} or a string')
    check_characters(text, where)
    return text


def check_characters(text: str, where: str) -> None:
    """JSON can hold half a character (\\ud800), which no tokenizer reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where}: character {error.start + 1} is half a character ({text[error.start]!r})"
        ) from error


def tokenizer_of(model: ComposedForCausalLM) -> Any:
    if model.tokenizer is None:
        raise PromptError("no member came with a tokenizer, so text cannot be read. Save one into the base's folder")
    return model.tokenizer


def encode_examples(model: ComposedForCausalLM, examples: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Token ids of a prompt and its text, none longer than the members' context, and how many are the prompt's."""
    tokenizer, limit = tokenizer_of(model), model.config.max_position_embeddings
    encoded = []
    for number, (prompt, text) in enumerate(examples, 1):
        row = tokenizer(prompt + text)["input_ids"]
        if limit and len(row) > limit:
            raise PromptError(f"text {number} has {len(row)} tokens; the members' shortest context is {limit}")
        encoded.append((row, len(tokenizer(prompt)["input_ids"]) if prompt else 0))
    return encoded


def generate_texts(
    model: ComposedForCausalLM,
    prompts: Sequence[str],
    request: Request,
    batch_size: int = 8,
    stream: TextIO | None = None,
    engine: str = "auto",
    note: Callable[[str], None] = lambda text: None,
    speculate: str | None = None,
) -> Iterator[Generated]:
    """Continue every prompt, in order. By the fast path, or by model.py if `engine` is "reference" or the fast path
    cannot run this composition; then `note` is told why. `speculate` says who drafts: "lookup" or "member:NAME"."""
    speculation = Speculation(speculate) if speculate is not None else None
    if speculation is not None:
        speculation.check(model)
        if engine == "reference":
            raise EngineError("the reference decodes without drafts: leave out --speculate or --engine reference")
    rows, request = encode_prompts(model, prompts, request)
    tokenizer = tokenizer_of(model)
    streamer = Streamer(tokenizer, stream, request.stop) if stream is not None else None
    fast = None
    if engine != "reference":
        try:
            fast = engine_for(model, rows, request, batch_size, speculation)
        except EngineError as error:
            note(str(error))
    if fast is None:
        written = by_reference(model, rows, request, batch_size, streamer)
    else:
        written = by_engine(fast, tokenizer, rows, request, streamer)
    for prompt, new_T in zip(prompts, written, strict=True):
        yield finished(model, prompt, new_T, request)


def encode_prompts(
    model: ComposedForCausalLM, prompts: Sequence[str], request: Request
) -> tuple[list[list[int]], Request]:
    """Their token ids, and the request, fitted to them if it is to be; if it can be fulfilled."""
    if "" in request.stop:
        raise PromptError("a stop text must not be empty: every text holds it")
    tokenizer, limit = tokenizer_of(model), model.config.max_position_embeddings
    texts = [as_chat(tokenizer, prompt) if request.chat else prompt for prompt in prompts]
    rows = [tokenizer(text, add_special_tokens=not request.chat)["input_ids"] for text in texts]
    if request.fit and limit:
        room = limit - max(map(len, rows), default=0)
        request = replace(request, max_new_tokens=max(1, min(request.max_new_tokens, room)))
    check_lengths(model, rows, request.max_new_tokens)
    return rows, request


def check_lengths(model: ComposedForCausalLM, rows: Sequence[Sequence[int]], new: int) -> None:
    for number, row in enumerate(rows, 1):
        if not row:
            raise PromptError(f"prompt {number} is empty, and the tokenizer adds no beginning-of-text token")
        model.config.check_room(len(row), new, f"prompt {number}", "--max-new-tokens")


def as_chat(tokenizer: Any, prompt: str) -> str:
    if not tokenizer.chat_template:
        raise PromptError("no member has a chat template; leave out --chat")
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template raises what it likes
        raise PromptError(f"the chat template cannot be used: {error}. Mend it, or leave out --chat") from error


def finished(model: ComposedForCausalLM, prompt: str, new_T: list[int], request: Request) -> Generated:
    ends = set(model.config.eos_token_id or ())
    length = next((t for t, token in enumerate(new_T) if token in ends), None)
    kept = new_T if length is None else new_T[:length]
    text = tokenizer_of(model).decode(kept, skip_special_tokens=True)
    cut = stop_position(text, request.stop)
    if cut is not None:
        while kept and kept[-1] == pad_id(model):  # other prompts of the batch went on
            kept.pop()
    return Generated(prompt, text[:cut], len(kept), "stop" if length is not None or cut is not None else "length")
