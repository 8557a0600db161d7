"""What a rule remembers, under a paged cache that does everything an engine's does, at random.

Requests come, share prefixes, are read in chunks, write, are preempted, end; blocks go to others.
After every step each request's row must be what the reference says of its whole text. Hidden states are logits here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from vllm.forward_context import override_forward_context

from tessellm.model.cache import ComposedCache
from tessellm.model.transcript import Routing
from tessellm.routing import ChatMarks
from tessellm.routing.template import TemplateMark
from tessellm.rules import ComposedRule, Mixture
from tessellm.vllm.memory import LAYER, Memory, Step
from tessellm.vllm.state import States

from engines import CONTEXT  # noqa: F401 - sets vLLM's environment first
from routers import HandMade

MEMBERS, VOCABULARY, BLOCK, BLOCKS = 3, 6, 4, 16
SIZE = MEMBERS * VOCABULARY
NAMES = ("base", "one", "two")
USER, ANSWER = 4, 5  # the tokens of the template
MARKS = ChatMarks((USER,), TemplateMark((USER,)), TemplateMark((USER,)), (ANSWER,))
RULE = Mixture(switch_prob=0.1, alone=0.6)


def routing(marks: ChatMarks, router: bool) -> Routing:
    return Routing(RULE, NAMES, HandMade("one", "two") if router else None, marks)


KINDS = {
    "template and router": routing(MARKS, True),
    "template": routing(MARKS, False),
    "router": routing(ChatMarks(), True),
    "neither": routing(ChatMarks(), False),
}


@cache
def hidden_of(tokens: tuple[int, ...]) -> Tensor:
    """The hidden states after a text: the same for the same text."""
    generator = torch.Generator().manual_seed(hash(tokens) % 2**40)
    base = torch.randn(VOCABULARY, generator=generator)
    return torch.cat([base + 0.8 * torch.randn(VOCABULARY, generator=generator) for _ in range(MEMBERS)])


@cache
def energy_of(tokens: tuple[int, ...]) -> Tensor:
    """The energies of a text's last token, [K]."""
    return torch.randn(MEMBERS - 1, generator=torch.Generator().manual_seed(hash(tokens) % 2**40 + 1))


def logprobs(hidden_NH: Tensor) -> Tensor:
    return hidden_NH.view(len(hidden_NH), MEMBERS, VOCABULARY).transpose(0, 1).log_softmax(-1)


@cache
def whole_text(kind: str, tokens: tuple[int, ...]) -> Tensor:
    """What the reference says of all of a text, read at once: [T, V]."""
    beginnings = [tokens[: end + 1] for end in range(len(tokens))]
    token_1T, running = torch.tensor([list(tokens)]), ComposedCache([], ComposedRule(RULE))
    mask_1T = torch.ones_like(token_1T, dtype=torch.bool)
    running.transcript.read(token_1T, mask_1T)
    running.transcript.hear(torch.stack([energy_of(each) for each in beginnings])[None])
    restarts = running.transcript.restarts(KINDS[kind], len(tokens))
    logp_MTV = logprobs(torch.stack([hidden_of(each) for each in beginnings]))
    return running.compose(logp_MTV[:, None], token_1T, mask_1T, restarts)[0]


@dataclass
class Text:
    tokens: list[int]
    read: int = 0  # positions in the cache
    blocks: list[int] = field(default_factory=list)


class Pages:
    """Blocks, who holds them, and what is still in those that nobody holds."""

    def __init__(self, chance: random.Random):
        self.chance, self.holders = chance, dict.fromkeys(range(1, BLOCKS), 0)
        self.content: dict[int, tuple[int, ...]] = {}  # the text up to the end of each full block

    def take(self, text: Text, length: int) -> bool:
        """Blocks for so many positions; from what is there already, for a text that starts."""
        if not text.blocks:
            known = {content: block for block, content in self.content.items()}
            while (end := (len(text.blocks) + 1) * BLOCK) < len(text.tokens):
                block = known.get(tuple(text.tokens[:end]))
                if block is None:
                    break
                self.holders[block] += 1
                text.blocks.append(block)
                text.read = end
        while len(text.blocks) * BLOCK < max(length, text.read + 1):
            free = [block for block, holders in self.holders.items() if not holders]
            if not free:
                return False
            block = self.chance.choice(free)
            self.holders[block] = 1
            self.content.pop(block, None)
            text.blocks.append(block)
        return True

    def filled(self, text: Text) -> None:
        for number in range(text.read // BLOCK):
            self.content[text.blocks[number]] = tuple(text.tokens[: (number + 1) * BLOCK])

    def drop(self, text: Text) -> None:
        for block in text.blocks:
            self.holders[block] -= 1
        text.blocks, text.read = [], 0


def make_memory(dtype: torch.dtype = torch.float32) -> Memory:
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(block_size=BLOCK),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    memory = Memory(config, SIZE, MEMBERS - 1)
    memory.bind_kv_cache(torch.zeros(BLOCKS, 1, BLOCK, memory.size, dtype=dtype))
    return memory


def make_states(kind: str) -> States:
    return States(KINDS[kind], make_memory(), SIZE, logprobs)


def run_step(states: States, batch: list[tuple[Text, int]]) -> tuple[Step, Tensor]:
    """Read so many tokens of each text, as one batch: the step, and the hidden states of all its tokens."""
    slots, hidden, energies, tokens, starts = [], [], [], [], [0]
    for text, count in batch:
        for position in range(text.read, text.read + count):
            slots.append(text.blocks[position // BLOCK] * BLOCK + position % BLOCK)
            hidden.append(hidden_of(tuple(text.tokens[: position + 1])))
            energies.append(energy_of(tuple(text.tokens[: position + 1])))
            tokens.append(text.tokens[position])
        text.read += count
        starts.append(len(slots))
    widest = max(len(text.blocks) for text, _ in batch)
    table = torch.tensor([text.blocks + [0] * (widest - len(text.blocks)) for text, _ in batch], dtype=torch.int32)
    lengths = torch.tensor([text.read for text, _ in batch], dtype=torch.int32)
    padded = torch.tensor([*slots, -1])  # an engine pads
    step = Step(torch.tensor(starts, dtype=torch.int32), lengths, table, padded)
    hidden_TH = torch.stack(hidden)
    with override_forward_context(SimpleNamespace(slot_mapping={LAYER: padded})):
        states.memory(hidden_TH, torch.tensor(tokens), torch.stack(energies))
    return step, hidden_TH


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_the_whole_text(seed: int, kind: str) -> None:
    chance = random.Random(seed)
    states, pages = make_states(kind), Pages(chance)
    texts: list[Text] = []
    old = [[chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 20))] for _ in range(3)]
    for _ in range(200):
        if len(texts) < 4 and chance.random() < 0.4:
            start = chance.choice(old)
            start = start[: chance.randrange(1, len(start) + 1)]
            texts.append(Text(start + [chance.randrange(VOCABULARY) for _ in range(chance.randrange(3))]))
        batch: list[tuple[Text, int]] = []
        for text in chance.sample(texts, chance.randrange(len(texts) + 1)):
            left = len(text.tokens) - text.read
            count = chance.choice([1, left, chance.randrange(1, left + 1)])
            if not pages.take(text, text.read + count):
                pages.drop(text)  # preempted
                continue
            count = min(count, len(text.tokens) - text.read)
            if len(text.blocks) * BLOCK >= text.read + count:
                batch.append((text, count))
        if batch:
            step, hidden_TH = run_step(states, batch)
            last_B = step.start_B[1:].long() - 1
            found_BV = states.last_rows(step, hidden_TH[last_B])
            for row, (text, _) in enumerate(batch):
                rows_TV = whole_text(kind, tuple(text.tokens[: text.read]))
                torch.testing.assert_close(found_BV[row], rows_TV[-1], atol=1e-5, rtol=0)
            check_stretch(kind, states, step, hidden_TH, batch, chance)
            for text, _ in batch:
                pages.filled(text)
                if text.read == len(text.tokens):
                    text.tokens.append(chance.randrange(VOCABULARY))
        for text in list(texts):
            if chance.random() < 0.05 or len(text.tokens) > 26:
                old[chance.randrange(3)] = text.tokens[:20]
                pages.drop(text)
                texts.remove(text)


def check_stretch(
    kind: str, states: States, step: Step, hidden_TH: Tensor, batch: list[tuple[Text, int]], chance: random.Random
) -> None:
    """Rows of any stretch of the batch, as for the log-probabilities of prompts."""
    first = chance.randrange(len(hidden_TH))
    last = chance.randrange(first + 1, len(hidden_TH) + 1)
    wanted_TV = torch.cat([whole_text(kind, tuple(text.tokens[: text.read]))[-count:] for text, count in batch])
    found_TV = states.rows(step, first, hidden_TH[first:last])
    torch.testing.assert_close(found_TV, wanted_TV[first:last], atol=1e-5, rtol=0)


def test_a_block_that_was_another_texts_forgets_it() -> None:
    """One text ends where a block ends; the block goes to a second text; a third shares it and reads one token more."""
    for seed in range(10):
        chance, states = random.Random(seed), make_states("neither")
        one, two = ([chance.randrange(VOCABULARY) for _ in range(BLOCK)] for _ in range(2))
        texts = [Text(one, blocks=[1]), Text([*two, 0, 1], blocks=[1, 2]), Text([*two, 3], read=BLOCK, blocks=[1, 3])]
        for text in texts:
            step, hidden_TH = run_step(states, [(text, len(text.tokens) - text.read)])
            found_1V = states.last_rows(step, hidden_TH[-1:])
            torch.testing.assert_close(found_1V[0], whole_text("neither", tuple(text.tokens))[-1], atol=1e-5, rtol=0)


def test_energies_are_kept_to_the_bit() -> None:
    """Beside hidden states in half precision."""
    memory, slot_T = make_memory(torch.bfloat16), torch.tensor([5, 9, 40])
    hidden_TH, energy_TK = torch.randn(3, SIZE).bfloat16(), torch.randn(3, MEMBERS - 1)
    with override_forward_context(SimpleNamespace(slot_mapping={LAYER: slot_T})):
        memory(hidden_TH, torch.tensor([1, 2, 3]), energy_TK)
    for at in (slice(None), slice(1, 2)):
        assert torch.equal(memory.recall(slot_T[at]), hidden_TH[at])
        assert torch.equal(memory.recall_energies(slot_T[at]), energy_TK[at])
    assert memory.token_S[slot_T].tolist() == [1, 2, 3]


def test_an_answer_is_carried_over_the_templates_tokens() -> None:
    """A token of the template inside an answer is looked at, and changes nothing."""
    states = make_states("template and router")
    text = Text([USER, 0, 1, ANSWER, 2, 3, ANSWER, 0, ANSWER], blocks=[1, 2, 3])
    replayed: list[int] = []
    replay = states.replay
    states.replay = lambda *arguments: replayed.append(arguments[2]) or replay(*arguments)  # type: ignore[method-assign]
    for count in (3, *[1] * 6):
        step, hidden_TH = run_step(states, [(text, count)])
        found_1V = states.last_rows(step, hidden_TH[-1:])
        wanted_TV = whole_text("template and router", tuple(text.tokens[: text.read]))
        torch.testing.assert_close(found_1V[0], wanted_TV[-1], atol=1e-5, rtol=0)
    assert replayed == [2, 3]
