"""What is said behind a long text is the same however it is read: at once, from its end, token by token, by an engine.

Answers here have begun further back than `belief` averages, so that whoever starts in the middle starts too late.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from tessellm.decoding import prompt_pace
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.voices import Voice
from tessellm.diagnose.trace import trace
from tessellm.model.variants import with_rule

from conftest import CHARACTERS

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 0}


def words(length: int, seed: int) -> str:
    """Letters that say nothing, without a line's end."""
    number = torch.randint(26, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(CHARACTERS[each] for each in number)


def conversation(model: Any, *lengths: int) -> list[int]:
    """Token ids of questions and answers of these lengths in turn; one that ends with an answer is to be continued."""
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": words(length, number + length)}
        for number, length in enumerate(lengths)
    ]
    begun = turns.pop()["content"] if len(turns) % 2 == 0 else ""
    text = model.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) + begun
    return model.tokenizer(text, add_special_tokens=False).input_ids


LENGTHS = {
    "a long question": (330,),
    "a short one": (3,),
    "a long answer": (20, 320),
    "both": (200, 200),
    "several turns": (60, 90, 40, 70, 20),
    "several, the last goes on": (30, 40, 20, 210),
    "a long first answer": (10, 300, 40),
}


@pytest.fixture(scope="module", params=["belief", "unread belief", "owner", "evidence"])
def model(request: pytest.FixtureRequest, chatting: dict[str, Any]) -> Any:
    made = tessellm.compose(**chatting, rule="belief")
    if request.param == "unread belief":
        made.set_rule({"name": "belief", "span": 20})
    elif request.param == "owner":
        made.set_rule(made.rule.rule, termination="owner")
    elif request.param != "belief":
        made.set_rule(request.param)
    return made


def rows(model: Any, ids: list[int]) -> Tensor:
    """The reference: all of a text at once, [T, V]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def padded(texts: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, texts))
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}


def test_the_end_of_texts_in_a_batch_is_that_of_each_alone(model: Any) -> None:
    texts = [conversation(model, *lengths) for lengths in LENGTHS.values()]
    with torch.inference_mode():
        for keep in (1, 30):
            found = model(**padded(texts), logits_to_keep=keep).logits
            for ids, found_TV in zip(texts, found, strict=True):
                own = min(keep, len(ids))
                torch.testing.assert_close(found_TV[-own:], rows(model, ids)[-own:], **CLOSE)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_pieces_agree_with_the_whole(model: Any, lengths: tuple[int, ...]) -> None:
    ids = conversation(model, *lengths)
    whole, cuts = rows(model, ids), [len(ids) * 3 // 5, len(ids) - 3]
    with torch.inference_mode():
        for keep in (0, 1):  # the first piece is read for its end alone, or all of it
            output = model(torch.tensor([ids[: cuts[0]]]), logits_to_keep=keep, use_cache=True)
            torch.testing.assert_close(output.logits[0, -1], whole[cuts[0] - 1], **CLOSE)
            output = model(torch.tensor([ids[cuts[0] : cuts[1]]]), past_key_values=output.past_key_values)
            torch.testing.assert_close(output.logits[0], whole[cuts[0] : cuts[1]], **CLOSE)
            for place in range(cuts[1], len(ids)):
                output = model(torch.tensor([[ids[place]]]), past_key_values=output.past_key_values)
                torch.testing.assert_close(output.logits[0, 0], whole[place], **CLOSE)


def test_a_long_piece_goes_on_from_what_was_read_before(model: Any) -> None:
    ids = conversation(model, 20, 320)
    with torch.inference_mode():
        cache = model(torch.tensor([ids[:60]]), logits_to_keep=1, use_cache=True).past_key_values
        found = model(torch.tensor([ids[60:]]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
    torch.testing.assert_close(found, rows(model, ids)[-1], **CLOSE)


def check_requests(model: Any, requests: list[Any]) -> None:
    """What an engine wrote, and how likely it found it, is what the reference says of the finished texts."""
    for request in requests:
        said_TV = rows(model, request.prompt + request.tokens)[len(request.prompt) - 1 : -1]
        logp_T = said_TV.gather(-1, torch.tensor(request.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.logprobs), logp_T, atol=1e-4, rtol=0)
        torch.testing.assert_close(logp_T, said_TV.max(-1).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("slots", "plain"), [(1, False), (4, False), (4, True)])
def test_an_engine_says_the_same(model: Any, slots: int, plain: bool) -> None:
    texts = [conversation(model, *lengths) for lengths in LENGTHS.values()]
    check_requests(model, Engine(model, slots, plain=plain).generate(texts, Sampling(6, ignore_end=True)))


def test_an_engine_that_reads_slowly_says_the_same(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pace, "MOST", 24)
    engine = Engine(model, 4)
    engine.schedule.keep_pace()
    first = engine.submit([5, 6], Sampling(60, ignore_end=True))
    engine.step()
    texts = [conversation(model, *lengths) for lengths in LENGTHS.values()]
    later = [engine.submit(text, Sampling(4, ignore_end=True)) for text in texts]
    while engine.busy:
        engine.step()
    check_requests(model, [first, *later])


def test_an_answer_that_is_asked_to_go_on_says_the_same(model: Any) -> None:
    """The engine holds its beginning, and reads again what the rule needs of it."""
    engine, ids = Engine(model, 2), conversation(model, 20, 300)
    first = engine.generate([ids], Sampling(8, ignore_end=True))[0]
    again = engine.generate([ids + first.tokens[:5]], Sampling(3, ignore_end=True))[0]
    assert again.tokens == first.tokens[5:]
    check_requests(model, [first, again])


def test_another_voice_says_the_same(model: Any) -> None:
    engine = Engine(with_rule(model, "product"), 3, window=model.rule.window)
    texts = [conversation(model, *lengths) for lengths in LENGTHS.values()]
    requests = [engine.submit(text, Sampling(4, ignore_end=True), Voice(model.rule, frozenset())) for text in texts]
    engine.submit(texts[0], Sampling(4))
    while engine.busy:
        engine.step()
    check_requests(model, requests)


@pytest.mark.parametrize("lengths", [(20, 320), (30, 40, 20, 210)], ids=["one turn", "two"])
def test_a_trace_of_a_long_answer_says_the_same(model: Any, lengths: tuple[int, ...]) -> None:
    ids = conversation(model, *lengths)
    logp_T = rows(model, ids)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    for start in (1, 40, len(ids) - 5):
        found = trace(model, torch.tensor(ids), start=start)
        torch.testing.assert_close(found["logprob"][0, start:, -1].float(), logp_T[start - 1 :], **CLOSE)
