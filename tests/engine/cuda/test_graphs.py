"""On a CUDA device: captured steps, fused kernels, compiled rules and drafts write what the reference does."""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import tessellm
from draft_distribution import draft_always
from random_models import with_deltas
from routing_cases import wrong_places
from tessellm.engine.cuda import slot_pass
from tessellm.engine.cuda.graphs import GraphExecutor
from tessellm.engine.cuda.passes import Mixed
from tessellm.engine.cuda.recording import refusing_waits
from tessellm.engine.cuda.slot_buffers import Mixing
from tessellm.engine.engine import Engine
from tessellm.engine.preparation import prepare
from tessellm.engine.sampling import Sampling, TokenChoice
from tessellm.engine.speculation import Speculation
from tessellm.rules import Product

from conftest import build_model, perturbed
from decoding_cases import prompts, unexcused

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FUSED: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 80}
LONG = {"max_position_embeddings": 512}
KINDS = ("llama", "gemma2", "gpt2", "adapters")


def pair(kind: str, rule: Any, fused: bool = True) -> tuple[Any, Any]:
    """The same composition on the CPU and on the GPU."""
    sizes = {} if kind == "gpt2" else {**LONG, **(FUSED if fused else {})}
    base = build_model("llama" if kind == "adapters" else kind, **sizes)
    torch.manual_seed(0)
    make = (lambda seed: with_deltas(base, 8)) if kind == "adapters" else (lambda seed: perturbed(base, seed, 0.03))
    here = tessellm.compose(base, {"a": make(1), "b": make(2)}, rule=rule)
    return here, copy.deepcopy(here).to("cuda")


def wrong(model: Any, requests: Any) -> list[Any]:
    """Greedy tokens other than the reference's where that one is no near tie."""
    if model.rule.name == "product":
        return unexcused(model, requests)
    return [places for request in requests if (places := wrong_places(model, request, None, margin=1e-2))]


def texts(requests: Any) -> list[list[int]]:
    return [request.tokens for request in requests]


RULES = ("mixture", "product")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rule", ["mixture", "product"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference(kind: str, rule: str, compiled: bool) -> None:
    here, there = pair(kind, rule)
    engine = Engine(there, slots=4, compiled=compiled)
    requests = engine.generate(prompts(9, 60), [Sampling(4 + n, ignore_end=True) for n in range(9)])
    assert not wrong(here, requests)
    assert all(not request.error for request in requests)


@pytest.mark.parametrize(("kind", "rule"), list(itertools.product(["llama", "gemma2", "adapters"], RULES)))
def test_drafts_are_verified_in_graphs(kind: str, rule: str) -> None:
    """Greedy and sampled, at batches 1, 4 and 16; texts long enough for a larger bucket of cells. At batch 4 the engine
    chooses whether to draft, by what passes take: there the texts count, not how many drafts were right."""
    here, there = pair(kind, rule)
    given = [text * 9 for text in prompts(15, 14)]
    asked = [Sampling(30, ignore_end=True) if n % 3 else Sampling(30, 1.0, 0.9, n, True) for n in range(14)]
    asked.append(Sampling(200, ignore_end=True))
    for slots in (1, 4, 16):
        plain = Engine(there, slots=slots, speculation=Speculation("lookup"))
        engine = plain if slots == 4 else draft_always(plain, 8)
        found = engine.generate(given, asked)
        assert not wrong(here, [r for r in found if r.sampling.temperature == 0])
        without = Engine(there, slots=slots).generate(given, asked)
        same = sum(one == other for one, other in zip(texts(found), texts(without), strict=True))
        assert same >= len(given) - 1  # a near tie may fall the other way
        assert engine.speculator is not None
        assert slots == 4 or engine.speculator.accepted > 0


def test_what_was_prepared_is_not_captured_in_the_middle_of_a_text() -> None:
    _, there = pair("llama", "product")
    given, asked = [text * 9 for text in prompts(12, 14)], Sampling(120, ignore_end=True)
    engine = Engine(there, slots=4, speculation=Speculation("lookup"))
    assert engine.speculator is not None
    engine.generate(given[:1], Sampling(2))
    for each in engine.executor.planned_drafts(engine.speculator.lengths):
        each()
    engine.executor.ready_prompts(list(map(len, given)), TokenChoice.GREEDY)
    prepared = set(engine.executor.graph_seconds)
    assert all(seconds > 0 for seconds in engine.executor.graph_seconds.values())
    found = engine.generate(given, asked)
    assert set(engine.executor.graph_seconds) == prepared
    assert texts(found) == texts(Engine(there, slots=4).generate(given, asked))


def test_members_that_no_kernel_knows_are_verified_by_their_modules() -> None:
    here, there = pair("llama", "product", fused=False)
    engine = draft_always(Engine(there, slots=4, speculation=Speculation("lookup")), 4)
    assert all(group.fused is None for group in engine.executor.groups)
    assert not unexcused(here, engine.generate(prompts(6, 60), Sampling(12, ignore_end=True)))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "adapters"])
def test_prompts_are_read_without_masks_in_half_precision(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces and at once, over a sliding window and not, with masks and without, by modules and by kernels: as in
    full precision, up to rounding, which moves Eq. 2 over three such members by 0.1."""
    here, there = pair(kind, "product")
    model = there.to(torch.bfloat16)
    texts, asked = [text * 5 for text in prompts(6, 60)], Sampling(1, ignore_end=True)
    exact = torch.tensor([request.logprobs for request in Engine(here, slots=4).generate(texts, asked)])
    ways = ((True, 2048, False), (False, 2048, False), (False, 32, False), (False, 2048, True), (False, 32, True))
    for masked, chunk, kernels in ways:
        monkeypatch.setattr(slot_pass, "_needs_no_mask", (lambda *_: False) if masked else slot_pass._needs_no_mask)
        engine = Engine(model, slots=4)
        engine.controller.chunk = chunk
        for group in engine.executor.groups:
            group.fused.reads_prompts = kernels  # type: ignore[attr-defined]
        found = torch.tensor([request.logprobs for request in engine.generate(texts, asked)])
        monkeypatch.undo()
        torch.testing.assert_close(found, exact, rtol=0, atol=0.15)


def test_more_numbers_of_rows_than_a_compiler_takes_for_one_function() -> None:
    here, there = pair("llama", "product")
    engine = Engine(there, slots=300, context=40)
    for rows in (1, 2, 3, 5, 9, 17, 33, 65, 129, 300):
        requests = engine.generate(prompts(rows, 20, seed=rows), Sampling(3, ignore_end=True))
        assert all(len(r.tokens) == 3 for r in requests)
    assert not unexcused(here, requests[:20])


def test_weighted_rules_are_captured() -> None:
    here, there = pair("llama", {"name": "product"})
    for rule in ("product", "mixture"):
        weighted = [
            tessellm.compose(m.base, {n: m.member(n) for n in "ab"}, rule=rule, weights={"a": 0.5})
            for m in (here, there)
        ]
        engine = draft_always(Engine(weighted[1], slots=2, compiled=False, speculation=Speculation("lookup")), 2)
        assert not wrong(weighted[0], engine.generate(prompts(3, 40), Sampling(8, ignore_end=True)))


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize(("kind", "rule"), [("llama", "product"), ("gemma2", "product"), ("adapters", "product")])
def test_prompts_are_captured_when_their_shape_comes_again(kind: str, rule: str, draft: str | None) -> None:
    """As they are, captured, and replayed; one and several at a time, some while others are written."""
    here, there = pair(kind, rule)
    engine = Engine(there, slots=4, speculation=Speculation(draft) if draft else None)
    given = [text[:9] * (2 + n % 3) for n, text in enumerate(prompts(24, 60)) if len(text) >= 9]
    asked = [Sampling(3 + n % 5, ignore_end=True) for n in range(len(given))]
    requests = []
    for prompt, sampling in zip(given, asked, strict=True):
        requests.append(engine.submit(prompt, sampling))
        engine.step()
    while engine.busy:
        engine.step()
    requests += engine.generate(given, asked)
    for _ in range(3):
        engine.prefixes.forget()
        requests += engine.generate([text[:20] for text in given if len(text) >= 20][:2], asked[0])
    captured = [key for key in engine.executor.graph_seconds if key[0] == "read"]
    assert {key[1] for key in captured} >= {1, 2}
    assert not unexcused(here, requests)
    assert all(not request.error for request in requests)


def test_prepared_prompts_are_not_captured_again() -> None:
    here, there = pair("llama", "product")
    engine = Engine(there, slots=4)
    given, asked = [(text * 40)[:40] for text in prompts(9, 30)], Sampling(5, ignore_end=True)
    engine.generate(given[:1], asked)
    running = engine.submit(given[1], Sampling(30, ignore_end=True))
    for _ in range(4):
        engine.step()
    engine.executor.ready_prompts([40], TokenChoice.GREEDY)
    prepared = {key for key in engine.executor.graph_seconds if key[0] == "read"}
    assert {key[1:3] for key in prepared} == {(1, 48), (2, 48), (4, 48)}
    requests = [running, *engine.generate(given, asked)]
    assert {key for key in engine.executor.graph_seconds if key[0] == "read"} == prepared
    assert not unexcused(here, requests)


@pytest.mark.parametrize("rule", ["mixture", "product"])
@pytest.mark.parametrize("kind", ["llama", "adapters"])
def test_nothing_is_captured_compiled_or_waited_for_once_all_is_prepared(kind: str, rule: str) -> None:
    here, there = pair(kind, rule)
    engine = Engine(there, slots=4)
    prepared = prepare(engine)
    given, requests = prompts(12, 60), []
    ways = [Sampling(9), Sampling(5, 1.0, seed=1), Sampling(7, 1.0, 0.9, 2), Sampling(6, 1.0, presence_penalty=0.1)]
    for batch in (1, 3, 12):
        for text, way in zip(given[:batch], ways * 3, strict=False):
            requests.append(engine.submit(text, replace(way, ignore_end=True)))
        with refusing_waits():  # but for results: texts come and go while passes are on their way
            while engine.busy:
                engine.step()
    assert prepared.made > 0
    assert prepared.late == 0
    assert not engine.executor.uncaptured  # type: ignore[attr-defined]
    assert not wrong(here, [r for r in requests if r.sampling.choice is TokenChoice.GREEDY])
    without = Engine(there, slots=4).generate([r.prompt for r in requests], [r.sampling for r in requests])
    same = sum(one == other for one, other in zip(texts(requests), texts(without), strict=True))
    assert same >= len(requests) - 1  # a near tie may fall the other way


def test_the_last_device_in_another_thread() -> None:
    """A thread begins with the first device as the current one, to which kernels and graphs go."""
    here, there = pair("llama", "mixture")
    engine = Engine(there.to(f"cuda:{torch.cuda.device_count() - 1}"), slots=2)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(engine.generate, prompts(3, 20), Sampling(12, ignore_end=True)).result()
    assert not wrong(here, found)


@pytest.mark.parametrize("waits", [True, False])
def test_what_cannot_be_captured_runs_as_it_is(waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A rule that copies a number from the host, or waits for one; afterwards other engines capture as before."""

    class HostRule(Product):
        def __call__(self, logp_MBTV: Any, *given: Any) -> tuple[Any, Any]:
            one = 1.0 + 0 * float(logp_MBTV[0, 0, 0, 0]) if waits else torch.tensor(1.0, device=logp_MBTV.device)
            return super().__call__(logp_MBTV * one, *given)

    here, there = pair("llama", "product")
    own = tessellm.compose(there.base, {name: there.member(name) for name in "ab"}, rule=HostRule())
    engine = Engine(own, slots=2, compiled=False)
    requests = engine.generate(prompts(6, 40), Sampling(8, ignore_end=True))
    assert "run uncaptured" in caplog.text
    assert ("decode", Mixing.RULE, TokenChoice.GREEDY) in engine.executor.uncaptured  # type: ignore[attr-defined]
    assert not unexcused(here, requests)
    again = Engine(there, slots=2)
    assert not unexcused(here, again.generate(prompts(6, 40), Sampling(8, ignore_end=True)))
    assert not again.executor.uncaptured  # type: ignore[attr-defined]


def test_without_memory_for_graphs_prompts_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair("llama", "product")
    engine = Engine(there, slots=2)
    capture = GraphExecutor._capture

    def full(self: GraphExecutor, key: Any, *given: Any) -> Any:
        if key[0] == "read":
            raise torch.OutOfMemoryError("full")
        return capture(self, key, *given)

    monkeypatch.setattr(GraphExecutor, "_capture", full)
    requests = engine.generate(prompts(8, 30), Sampling(5, ignore_end=True))
    assert not any(key[0] == "read" for key in engine.executor.graph_seconds)
    assert not engine.executor.prompts.on  # type: ignore[attr-defined]
    assert all(request.finish_reason == "length" for request in requests)
    assert not unexcused(here, requests)


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "adapters"])
def test_nothing_of_a_broken_sequence_is_read_again(kind: str, fused: bool, draft: str | None) -> None:
    """One member reads NaN for one token; slots change hands while passes are on their way."""
    there = pair(kind, "product", fused)[1]
    broken = "base" if kind == "adapters" else "b"  # adapters have the base's embeddings
    with torch.no_grad():
        there.member(broken).get_input_embeddings().weight[7] = torch.nan
        if there.member(broken).get_output_embeddings().weight.isnan().any():  # tied
            there.member(broken).get_output_embeddings().weight = torch.nn.Parameter(
                there.base.lm_head.weight.nan_to_num()
            )
    engine = Engine(there, slots=3, speculation=Speculation(draft) if draft else None)
    clean = [[token if token != 7 else 8 for token in text] for text in prompts(24, 60)]
    mixed = [text if n % 4 else [*text, 7, *text[:9]] for n, text in enumerate(clean)]
    for asked in (1, 6):
        found = engine.generate(mixed, Sampling(asked, ignore_end=True))
        assert all(f"member {broken!r} computes NaN" in (request.error or "") for request in found[::4])
        rest = [request for n, request in enumerate(found) if n % 4 and 7 not in request.tokens[:-1]]
        assert len(rest) > 9
        assert [request.error for request in rest] == [None] * len(rest)


@torch.inference_mode()
def test_mixtures_have_kernels_of_their_own() -> None:
    """A vocabulary of many."""
    from tessellm.engine.cuda.mixture import KernelMixed  # which needs Triton

    for members, rows in ((2, 1), (3, 5), (9, 33)):
        logits_M = list(3 * torch.randn(members, rows, 1, 50_003, device=DEVICE))
        log_pi_BL = torch.rand(rows, members + 1, device=DEVICE).log_softmax(-1)
        count_BM = torch.cat([torch.full((rows, 1), 2.0 - members), torch.ones(rows, members - 1)], 1).to(DEVICE)
        found, expected = (each(logits_M, log_pi_BL, count_BM) for each in (KernelMixed, Mixed))
        torch.testing.assert_close(found.logp_BV, expected.logp_BV, atol=1e-3, rtol=1e-4)
        assert torch.equal(found.best()[0], expected.best()[0])
