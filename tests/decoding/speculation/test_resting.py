"""Members that rest: whoever is believed writes, the others read it in one pass, and the text is what it would be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessellm
from draft_distribution import draft_always
from resting import Contrary
from tessellm.decoding.buffers import RowOrder
from tessellm.decoding.engine import Engine
from tessellm.decoding.requests import Request
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.decoding.speculation.costs import CPU, GPU, Costs
from tessellm.decoding.speculation.member_drafts import BelievedDrafter, MemberDrafter
from tessellm.decoding.speculation.who import costs_of
from tessellm.decoding.voices import Voice
from tessellm.errors import EngineError
from tessellm.rules import ComposedRule, Explanation
from tessellm.rules.resting import SUREST, believed_members

from conftest import build_model, character_tokenizer
from decoding_cases import composition, prompts
from host_graphs import captured
from planted import composition as planted
from speculation_cases import Priced, agreeing, drafting, texts

NOBODY = Speculation("none")
MIXED = [Sampling(9 + n, (0.0, 0.8)[n % 2], (1.0, 0.9)[n % 3 == 0], seed=n, ignore_end=True) for n in range(8)]


def believed(*skills: str) -> Any:
    """Experts that each write a digit in place of one letter, each time: whoever is right is believed after two."""
    return planted(*skills, rule="belief")


def written(text: str) -> list[int]:
    ids = character_tokenizer().get_vocab()
    return [ids[character] for character in text]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixed", "both"])
def test_writes_what_all_members_awake_write(kind: str, tmp_path: Path) -> None:
    model, given = composition(kind, tmp_path, rule="belief"), prompts(8, 70)
    expected = Engine(model, 8, speculation=NOBODY).generate(given, MIXED)
    for slots in (1, 4):
        found = drafting(model, slots, "belief", 5).generate(given, MIXED)
        assert texts(found) == texts(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)


def test_weights_and_stopping_change_who_is_right_not_the_text() -> None:
    model, given = agreeing(rule="belief"), prompts(6, 60)
    for changed in (model.rule.with_(weights=[0.4, 1.5]), model.rule.with_(termination="mean")):
        model.rule = changed
        expected = Engine(model, 6, speculation=NOBODY).generate(given, MIXED[:6])
        assert texts(drafting(model, 3, "belief", 7).generate(given, MIXED[:6])) == texts(expected)


def test_members_that_are_not_believed_do_not_run_until_a_draft_is_verified() -> None:
    model = believed("three", "six")
    engine = draft_always(Engine(model, 2, speculation=Speculation("belief")), 8)
    passes: Counter[str] = Counter()
    for name, group in zip(model.members, engine.steps.work.groups, strict=True):
        plain = group.module

        def counted(slot_pass: Any, name: str = name, plain: Any = plain, **given: Any) -> Any:
            does = "writes" if slot_pass.batch.keep == 1 else "reads"
            passes[f"{name} {does}"] += int((slot_pass.position_RT >= 0).any(1).sum())
            return plain(slot_pass=slot_pass, **given)

        group.module = counted
    given = [written("abc3defghabc3defghab"), written("abcdef6ghabcdef6ghab")]
    assert texts(engine.generate(given, Sampling(33, ignore_end=True))) == [
        written("c3defghabc3defghabc3defghabc3defg"),
        written("cdef6ghabcdef6ghabcdef6ghabcdef6g"),
    ]
    assert passes == {  # a draft of four tokens per text, then three of eight; all read the prompts and the drafts
        "three writes": 28, "six writes": 28, "base reads": 10, "three reads": 10, "six reads": 10,
    }  # fmt: skip


def test_a_belief_that_moves_changes_who_writes() -> None:
    model = believed("three", "other_three")
    prompt = written("abc3defghabc3defghabc7defghabc7defghab")
    for text in (prompt[:20], prompt):
        expected = Engine(model, 1, speculation=NOBODY).generate([text], Sampling(30, ignore_end=True))
        assert texts(drafting(model, 1, "belief", 8).generate([text], Sampling(30, ignore_end=True))) == texts(expected)


def test_a_beginning_that_was_written_while_members_rested_can_be_read_again() -> None:
    model, asked = agreeing(rule="belief"), Sampling(30, ignore_end=True)
    engine = drafting(model, 2, "belief", 8, window=0)
    first = engine.generate([prompts(1, 60)[0] * 3], asked)[0]
    longer = [*first.prompt, *first.tokens, *range(5, 20)] + [7] * engine.window
    expected = Engine(model, 2, speculation=NOBODY).generate([longer[:80]], asked)
    assert texts(engine.generate([longer[:80]], asked)) == texts(expected)


def test_requests_that_cannot_have_drafts_go_without() -> None:
    model, given = agreeing(rule="belief"), prompts(4, 60)
    alone = Voice(ComposedRule.make("product", [1.0, 0.0]), frozenset())

    def run(speculation: Speculation) -> list[list[int]]:
        engine = Engine(model, 4, speculation=speculation)
        penalties = Sampling(20, ignore_end=True, frequency_penalty=0.5)
        requests = [engine.submit(given[0], MIXED[0]), engine.submit(given[1], penalties)]
        requests.append(engine.submit(given[2], MIXED[1], voice=alone))
        requests.append(engine.submit(given[3], MIXED[2], observer=lambda *rows: {"token": rows[1][:, 0]}))
        while engine.busy:
            engine.step()
        assert [view["token"] for view in requests[3].seen] == requests[3].tokens
        return texts(requests)

    assert run(Speculation("belief")) == run(NOBODY)


def test_observers_see_every_token_as_if_nobody_rested_and_who_wrote_it() -> None:
    model, given = believed("three", "six"), [written("abc3defghabc3defghab"), written("abcdef6ghabcdef6ghab"), [5]]

    def observe(logp_MB1V: Tensor, token_B1: Tensor, composed_B1V: Tensor, why: Explanation) -> dict[str, Tensor]:
        said_B = composed_B1V[:, 0].gather(-1, token_B1)[:, 0]
        return {"token": token_B1[:, 0], "said": said_B, "belief": why.belief_BTM[:, 0], "all": logp_MB1V[:, :, 0, 7].T}

    def run(speculation: Speculation) -> list[Request]:
        engine = Engine(model, 3, speculation=speculation)
        if engine.speculator:
            draft_always(engine, 8)
        observers = (observe, None, observe)
        asked = [Sampling(20 - n, ignore_end=True) for n in range(3)]
        requests = [engine.submit(*each) for each in zip(given, asked, [None] * 3, observers, strict=True)]
        while engine.busy:
            engine.step()
        return requests

    for one, other in zip(run(Speculation("belief")), run(NOBODY), strict=True):
        assert one.tokens == other.tokens
        assert len(one.seen) == len(other.seen) == (len(one.tokens) if one.observer else 0)
        writers = [view["writer"] for view in one.seen]
        for view, expected in zip(one.seen, other.seen, strict=True):
            assert expected.pop("writer") == -1
            for name, values in expected.items():
                torch.testing.assert_close(torch.tensor(view[name]), torch.tensor(values), atol=1e-4, rtol=1e-4)
        if one.prompt == given[0]:  # all choose behind the prompt and behind each of three drafts
            assert writers == [-1, *(writer for length in (4, 8, 4) for writer in [1] * length + [-1])]


def test_a_text_that_changes_its_law_at_every_token_costs_no_more_than_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule believes another member after every token, and is sure of it each time."""
    base = build_model("llama")
    strangers = {f"e{n}": build_model("llama", 5 + n) for n in range(4)}
    model = tessellm.compose(base, strangers, rule="belief")
    given, asked = prompts(4, 20), Sampling(100, temperature=1.0, ignore_end=True)
    expected = texts(Engine(model, 4, speculation=NOBODY).generate(given, asked))

    def wrong(self: BelievedDrafter, steps: Any, in_slot: Any) -> list[int]:
        self.writer = {slot: (len(request.tokens) + slot) % 5 for slot, request in in_slot.items()}
        return [SUREST] * len(in_slot)

    monkeypatch.setattr(BelievedDrafter, "look", wrong)
    engine = Engine(model, 4, speculation=Speculation("belief"))
    clock = Priced(engine, drafting=0.2, verifying=0.1)
    assert texts(engine.generate(given, asked)) == expected
    assert clock.now / 100 < 1.15


def test_a_rule_that_never_says_what_the_member_would_that_it_is_sure_of() -> None:
    """The worst that drafts can meet, as benchmarks/resting.py measures it."""
    base = build_model("llama")
    model = tessellm.compose(base, {f"e{n}": build_model("llama", 5 + n) for n in range(4)}, rule=Contrary(5))
    given, asked = prompts(4, 20), Sampling(64, ignore_end=True)
    expected = texts(Engine(model, 1, speculation=NOBODY).generate(given, asked))
    engine = Engine(model, 1, speculation=Speculation("belief"))
    assert texts(engine.generate(given, asked)) == expected
    speculator = engine.speculator
    assert speculator is not None
    assert speculator.accepted == 0
    assert 0 < speculator.drafted / len(given) <= 7 * 4


def test_members_rest_by_default_where_each_has_weights_of_its_own(tmp_path: Path) -> None:
    apart, lora = agreeing(rule="belief"), composition("adapters", tmp_path, rule="belief")
    assert Engine(apart).speculator is not None
    assert Engine(lora).speculator is None
    assert Engine(agreeing(rule="evidence")).speculator is None
    assert Engine(apart, plain=True).speculator is None
    assert costs_of(apart) == Costs(CPU, 3)
    assert costs_of(lora) == Costs(CPU, 1, len(lora.members) - 1)


def test_refuses_rules_that_believe_nobody_and_blocks_without_tokens() -> None:
    with pytest.raises(EngineError, match=r"need the rule 'belief', .* this composition has 'evidence'"):
        Engine(agreeing(rule="evidence"), speculation=Speculation("belief"))
    for asked in ("host", "belief:host"):
        with pytest.raises(EngineError, match="cannot rest in the host's memory"):
            Speculation(asked)
    for wrong in ("belief:0", "belief:", "belief:x", "belief:65", "none:1"):
        with pytest.raises(EngineError, match="who drafts: expected 'lookup'"):
            Speculation(wrong)
    assert Speculation("belief").lengths(on_cpu=True) == (4, 8, 16)
    assert Speculation("belief:2").lengths(on_cpu=True) == (2,)
    assert Speculation("belief:2").lengths(on_cpu=False) == Speculation("belief:3").lengths(on_cpu=False) == (3,)
    assert Speculation("belief").lengths(on_cpu=True) == CPU.lengths
    assert Speculation("belief").lengths(on_cpu=False) == GPU.lengths
    assert Speculation("lookup").lengths(on_cpu=False) == (3, 7)


@pytest.mark.parametrize("observer", [None, lambda *rows: {"token": rows[1][:, 0]}])
def test_captured_passes_run_over_all_rows_whoever_is_believed(observer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a pass is captured for a number of rows: members draft in turn, each for its own."""
    monkeypatch.setattr(
        MemberDrafter, "_drafting", lambda self, rows: (self.work.slots.index_S[:rows], RowOrder.FIRST_SLOTS)
    )
    model, asked = believed("three", "six"), Sampling(20, ignore_end=True)
    given = [written("abc3defghabc3defghab"), written("abcdef6ghabcdef6ghab"), written("abcdefghabcdefghab"), [5]]
    expected = texts(Engine(model, 4, speculation=NOBODY).generate(given, asked))
    engine = captured(Engine(model, 4, speculation=Speculation("belief")))
    speculator = engine.speculator
    assert speculator is not None
    speculator.steps = engine.steps
    draft_always(engine, 4)
    requests = [engine.submit(prompt, asked, None, observer) for prompt in given]
    while engine.busy:
        engine.step()
    assert texts(requests) == expected
    assert speculator.accepted > 30
    drafting = {key[2] for key in engine.steps.graphs if key[0].startswith("draft")}  # type: ignore[attr-defined]
    assert drafting == {1}  # a graph of one token, replayed for each


def test_how_sure_the_rule_is() -> None:
    belief_BL = torch.tensor([[0.5, 0.2, 0.3], [0.05, 0.92, 0.03], [0.0005, 0.9994, 0.0001], [0.2, 0.1, 0.7]]).log()
    member_B, sure_B = believed_members(belief_BL)
    assert member_B.tolist() == [0, 1, 1, 0]
    assert sure_B.tolist() == [0, 1, 3, 0]
