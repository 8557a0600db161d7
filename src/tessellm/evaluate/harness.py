"""A composition as a model of lm-eval: its tasks ask, the reference scores, the engine writes.

Tokens, prompts and truncation are those of lm-eval's own model for Hugging Face checkpoints, to which a test holds it.
Every answer goes into a journal, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs

from ..errors import GenerationError
from ..model import ComposedForCausalLM
from ..text.options import TextOptions
from ..text.prompts import tokenizer_of
from .journal import Journal, key_of
from .scoring import ContinuationScore, score
from .writer import Ask, BlockWriter, Written

LONGEST = 2048  # tokens, where the members do not say; as lm-eval
BLOCK = 4  # batches that are scored together and then noted
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}


class ComposedLM(TemplateLM):
    """What lm-eval asks of a model, answered by a composition."""

    def __init__(
        self,
        model: ComposedForCausalLM,
        batch_size: int = 8,
        max_gen_toks: int = 256,
        engine: str = "auto",
        journal: Journal | None = None,
        progress: Callable[[int], None] = lambda done: None,
        note: Callable[[str], None] = lambda text: None,
    ):
        super().__init__()
        self.model, self.batch_size, self.max_gen_toks, self.progress = model, batch_size, max_gen_toks, progress
        self.tokenizer: Any = tokenizer_of(model)
        self.writer = BlockWriter(model, batch_size, engine, note)
        self.journal = journal if journal is not None else Journal()
        self._device = model.device

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        return self.model.config.max_position_embeddings or LONGEST

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return [*self._scores([(context, after) for _, context, after in requests])]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, (string,) in enumerate(request.args for request in requests):
            rolled = utils.get_rolling_token_windows(
                self.tok_encode(string), self.prefix_token_id, self.max_length, context_len=1
            )
            for window in map(utils.make_disjoint_window, rolled):
                windows.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, scored in zip(owners, self._scores(windows), strict=True):
            totals[owner] += scored.logprob
        return totals

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[ContinuationScore]:
        """Of all pairs. Blocks do not depend on what the journal holds, so that a run that goes on gives, to the last
        bit, what one without a break gives."""
        keys = [key_of("loglikelihood", context, after) for context, after in pairs]
        every = dict(zip(keys, pairs, strict=True))
        order = sorted(every, key=lambda key: (-sum(map(len, every[key])), key))
        for start in range(0, len(order), BLOCK * self.batch_size):
            block = order[start : start + BLOCK * self.batch_size]
            missing = {key for key in block if key not in self.journal}
            found = score(self.model, [every[key] for key in block], self.batch_size) if missing else []
            for key, (logprob, is_greedy) in zip(block, found, strict=False):
                if key in missing:
                    self.journal.add(key, logprob=logprob, is_greedy=is_greedy)
                    self.progress(1)
        return [ContinuationScore(self.journal[key]["logprob"], self.journal[key]["is_greedy"]) for key in keys]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [written.text for written in self.write([request.args for request in requests])]

    def write(self, prompts: Sequence[tuple[str, dict[str, Any]]]) -> list[Written]:
        """What follows each prompt, under lm-eval's generation arguments."""
        every = {self._key(*prompt): prompt for prompt in prompts}
        keys, asks = list(every), [self._ask(*prompt) for prompt in every.values()]
        missing = {number for number, key in enumerate(keys) if key not in self.journal}
        since = time.monotonic()
        for number, written in self.writer.write(asks, missing):
            now = time.monotonic()  # what one problem took alone is not defined in a batch; the sum is
            self.journal.add(keys[number], **vars(written), prompt_tokens=len(asks[number].ids), seconds=now - since)
            since = now
            self.progress(1)
        return [_written(self.journal[self._key(*prompt)]) for prompt in prompts]

    def entry(self, prompt: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What the journal holds of a prompt that was written."""
        return self.journal[self._key(prompt, arguments)]

    def _key(self, prompt: str, arguments: dict[str, Any]) -> str:
        return key_of("generate", prompt, arguments, self.max_gen_toks)

    def _ask(self, prompt: str, arguments: dict[str, Any]) -> Ask:
        settings: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        if unknown := sorted(set(settings) - KNOWN):
            raise GenerationError(f"the task asks for {', '.join(unknown)}, which the engine does not know")
        room = self.max_length - settings["max_gen_toks"]
        if room <= 0:
            raise GenerationError(
                f"the task asks for {settings['max_gen_toks']} new tokens, which leave no room for a prompt in a "
                f"context of {self.max_length}. Evaluate members with a longer context, or another task"
            )
        end = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        stops = tuple(stop for stop in (*settings["until"], end) if stop)
        options = TextOptions(
            settings["max_gen_toks"],
            settings["temperature"],
            settings.get("top_p", 1.0),
            stop=tuple(dict.fromkeys(stops)),
        )
        return Ask(tuple(self.tok_encode(prompt)[-room:]), options)


def _written(entry: dict[str, Any]) -> Written:
    return Written(entry["text"], entry["tokens"], entry["finish_reason"], entry["error"])
