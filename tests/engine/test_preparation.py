"""What was prepared is all that requests need, and what cannot be captured or compiled runs as it is."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import tessellm
from tessellm.engine import preparation, sampling
from tessellm.engine.cuda import compiled_rule, graphs, prompt_graphs
from tessellm.engine.cuda.graphs import GraphExecutor
from tessellm.engine.cuda.slot_executor import SlotExecutor
from tessellm.engine.engine import Engine
from tessellm.engine.preparation import prepare
from tessellm.engine.sampling import Sampling, TokenChoice
from tessellm.engine.speculation import Speculation
from tessellm.rules import Product

from captured_steps import FixedPrefillPace, captured
from conftest import build_model, perturbed
from decoding_cases import composition, prompts
from replay_tape import REFUSAL, on_its_device
from speculation_cases import agreeing

WAYS = [
    Sampling(9, ignore_end=True),
    Sampling(4, 1.0, seed=1, ignore_end=True),
    Sampling(6, 1.0, 0.8, 2, True),
    Sampling(5, 1.0, 0.9, 3, True, frequency_penalty=0.5),
    Sampling(3, ignore_end=True, presence_penalty=0.5),
]


class HostRule(Product):
    """Reads a number of the host in every call, as code may that was written without a GPU in mind."""

    def __call__(self, logp_MBTV: Any, tokens_BT: Any, mask_BT: Any, state: Any) -> tuple[Any, Any]:
        return super().__call__(logp_MBTV * torch.tensor([1.0], device=logp_MBTV.device), tokens_BT, mask_BT, state)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The compiler, stopped before it makes kernels."""
    plain = torch.compile
    monkeypatch.setattr(
        compiled_rule.torch, "compile", lambda f, **given: on_its_device(plain(f, backend="eager", **given))
    )
    compiled_rule._shared.cache_clear()
    yield
    compiled_rule._shared.cache_clear()
    torch._dynamo.reset()


def written(engine: Engine) -> list[list[int]]:
    """Texts of all kinds: some enter while others are written, then each is alone."""
    given, asked = prompts(8, 50), [WAYS[n % len(WAYS)] for n in range(8)]
    found = [request.tokens for request in engine.generate(given, asked)]
    return found + [engine.generate([text], way)[0].tokens for text, way in zip(given, asked, strict=True)]


def test_nothing_is_captured_or_compiled_once_all_is_prepared(
    tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "SMALLEST_CELLS", 32)
    model = composition("llama", tmp_path)
    engine = captured(Engine(model, slots=2, context=90), compiled=True)
    told: list[tuple[int, int]] = []
    prepared = prepare(engine, tell=lambda done, total: told.append((done, total)))
    assert told[-1] == (len(told), len(told))
    assert prepared.made > len(told)  # the rule was compiled, too
    assert not engine.busy
    assert not engine.prefixes.rows
    assert written(engine) == written(Engine(model, slots=2, context=90))
    assert prepared.late == 0


@pytest.mark.parametrize("rule", ["mixture", "product"])
def test_chunks_of_long_prompts_are_graphs(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where chunks are of a few widths, and prompts' ends of any; while another text is written."""
    monkeypatch.setattr(prompt_graphs, "LEAST_ON_GPU", 32)
    monkeypatch.setattr(prompt_graphs, "MOST_TOKENS", 64)
    base = build_model("llama", eos_token_id=None, max_position_embeddings=512)
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule=rule)
    engine = captured(Engine(model, slots=2, context=200))
    engine.controller.pace, engine.controller.on_gpu = FixedPrefillPace(32), True
    prepared = prepare(engine)
    found = [engine.submit([5, 6, 7], Sampling(40, ignore_end=True))]
    engine.step()
    replayed: list[Any] = []
    replay, read = GraphExecutor._replay, SlotExecutor.read
    monkeypatch.setattr(
        GraphExecutor, "_replay", lambda self, *key: (replayed.append((key[0], bool(key[-1]))), replay(self, *key))[1]
    )
    monkeypatch.setattr(SlotExecutor, "read", lambda *given: replayed.append(("as it is", None)) or read(*given))
    found += [engine.submit((text * 40)[:150], WAYS[n]) for n, text in enumerate(prompts(3, 20))]
    while engine.busy:
        engine.step()
    assert replayed.count(("read", False)) >= 3
    assert replayed.count(("read", True)) >= 3
    assert ("as it is", None) not in replayed
    assert prepared.late == 0
    expected = Engine(model, slots=2, context=200).generate([r.prompt for r in found], [r.sampling for r in found])
    assert [r.tokens for r in found] == [r.tokens for r in expected]


def test_prepared_pieces_are_timed() -> None:
    base = build_model("llama", eos_token_id=None, max_position_embeddings=512)
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    engine = captured(Engine(model, slots=2, context=300))
    assert engine.executor.chunk_seconds() == {}
    prepared = prepare(engine)
    before = [buffer.clone() for buffer in engine.executor.work.tensors]
    assert engine.executor.chunk_seconds() == dict.fromkeys((64, 128, 256, 512), 1e-3)
    assert all(map(torch.equal, before, engine.executor.work.tensors))
    assert prepared.late == 0


def test_few_shapes_are_prepared_and_do_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 1, 4 and 16, cells by fours; each is captured once, and timed by nobody."""
    base = build_model("llama", eos_token_id=None, max_position_embeddings=4096)
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    engine = captured(Engine(model, slots=16, context=4096))
    engine.executor.few_shapes = True
    (group,) = engine.executor.groups[:1]
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(GraphExecutor, "_prepare", lambda self, *given: asked.append((given[0], *given[2:])))
    for fused, reads in ((False, 2), (True, 1)):
        monkeypatch.setattr(type(group), "reads_fused", fused)
        asked.clear()
        for each in engine.executor.planned():
            each()
        steps = [shape for name, *shape in asked if name == "decode"]
        assert {rows for rows, *_ in steps} == {1, 4, 16}
        assert {cells for *_, cells, _ in steps} == {256, 1024, 4096}
        assert len(steps) == 2 * 27  # by the rule, and by components
        ends = [shape for name, *shape in asked if name == "read" and shape[-1]]
        assert len(ends) == 2 * reads * 40  # one for any number of cells, where kernels read as many as there are


def test_prompts_are_read_together_before_the_first_request() -> None:
    """A forward over many prompts is too large to be captured; it is run all the same."""
    base = build_model("llama", eos_token_id=None)
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    engine, read = captured(Engine(model, slots=16, context=64)), []
    prefill = engine.executor.prefill
    engine.executor.prefill = lambda chunk, *more: read.append(len(chunk.parts)) or prefill(chunk, *more)  # type: ignore[func-returns-value,method-assign]
    prepare(engine)
    assert read == [1, 4, 16]


def test_what_comes_late_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PREPARED_STEPS", (TokenChoice.GREEDY,))
    engine = captured(Engine(composition("llama", tmp_path), slots=2, context=90))
    prepared = prepare(engine)
    engine.generate(prompts(1, 20), WAYS[0])
    assert prepared.late == 0
    engine.generate(prompts(1, 20), WAYS[1])
    assert prepared.late > 0


def test_on_a_cpu_a_short_text_is_all(tmp_path: Path) -> None:
    for context in (2, 64):
        engine = Engine(composition("llama", tmp_path), slots=2, context=context)
        prepared = prepare(engine)
        assert (prepared.made, prepared.late) == (preparation.made(engine), 0)
        assert not engine.busy


def test_an_engine_that_drafts_prepares_its_drafts() -> None:
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    engine = Engine(model, slots=2, context=64, speculation=Speculation("lookup"))
    captured(engine)
    prepared = prepare(engine)
    verified = {(key[1], key[-1]) for key in engine.executor.graphs if key[0] == "verify"}  # type: ignore[attr-defined]
    ways = (TokenChoice.GREEDY, TokenChoice.SAMPLED, TokenChoice.NUCLEUS)
    assert verified == {(rows, way) for rows in (1, 2) for way in ways}
    engine.generate(prompts(3, 20), [Sampling(30), Sampling(30, 0.8), Sampling(30, 0.8, 0.9)])
    assert prepared.late == 0


def test_without_memory_for_all_the_rest_is_prepared_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = composition("llama", tmp_path)
    engine = captured(Engine(model, slots=2, context=90))
    capture, left = GraphExecutor._capture, [3]

    def full(self: Any, *given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("full")
        return capture(self, *given)

    monkeypatch.setattr(GraphExecutor, "_capture", full)
    prepared = prepare(engine)
    assert "memory ran out when 3 of" in caplog.text
    assert written(engine) == written(Engine(model, slots=2, context=90))
    assert prepared.late > 0


def test_passes_that_cannot_be_captured_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule=HostRule())
    engine = captured(Engine(model, slots=3, context=90), strict=False)
    with caplog.at_level(logging.WARNING, "tessellm.engine"):
        prepared = prepare(engine)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"passes of the kind 'decode' run uncaptured, which is slower: {REFUSAL}",
        f"passes of the kind 'read' run uncaptured, which is slower: {REFUSAL}",
    ]
    assert {kind[0] for kind in engine.executor.uncaptured} == {"decode", "read"}  # type: ignore[attr-defined]
    assert written(engine) == written(Engine(model, slots=3, context=90))
    assert prepared.late == 0


def test_one_way_to_choose_that_cannot_be_captured_leaves_the_others_as_they_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties that wait for the host are no reason to read every prompt uncaptured."""
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule="product")
    engine, plain = captured(Engine(model, slots=3, context=90), strict=False), sampling.penalised
    monkeypatch.setattr(
        sampling, "penalised", lambda logp_BV, *given: plain(logp_BV, *given) * logp_BV.new_tensor([1.0])
    )
    prepared = prepare(engine)
    found = {(kind[0], kind[-1]) for kind in engine.executor.uncaptured}  # type: ignore[attr-defined]
    assert found == {(name, TokenChoice.PENALISED) for name in ("decode", "read")}
    assert len([record for record in caplog.records if "run uncaptured" in record.message]) == 2
    assert written(engine) == written(Engine(model, slots=3, context=90))
    assert prepared.late == 0


def test_an_error_of_a_rule_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule=HostRule())
    engine = captured(Engine(model, slots=1, context=90), strict=False)
    request = engine.submit([5, 6, 7], WAYS[0])
    engine.step()

    def broken(*given: Any) -> Any:
        raise RuntimeError("a wrong shape")

    monkeypatch.setattr(HostRule, "__call__", broken)
    engine.executor.graphs.clear()  # type: ignore[attr-defined]
    before = [buffer.clone() for buffer in engine.executor.work.tensors]
    with pytest.raises(RuntimeError, match="a wrong shape"):
        engine.step()
    assert all(map(torch.equal, before, engine.executor.work.tensors))
    assert not request.done


def test_a_rule_that_cannot_be_compiled_runs_as_it_is(traced: None, caplog: pytest.LogCaptureFixture) -> None:
    class Printing(HostRule):
        def __call__(self, logp_MBTV: Any, *given: Any) -> tuple[Any, Any]:
            if float(logp_MBTV.sum()) > 0:  # the compiler does not know
                raise AssertionError
            return Product()(logp_MBTV, *given)

    base = build_model("llama")
    model = tessellm.compose(base, {"a": perturbed(base, 1)}, rule=Printing())
    engine = captured(Engine(model, slots=1, context=90), compiled=True, strict=False)
    with caplog.at_level(logging.WARNING, "tessellm.engine"):
        found = engine.generate([[5, 6, 7]], WAYS[0])
    assert found[0].tokens == Engine(model, slots=1, context=90).generate([[5, 6, 7]], WAYS[0])[0].tokens
    told = {record.getMessage().split(",")[0] for record in caplog.records}
    assert told == {"the rule 'product' runs uncompiled", "passes of the kind 'decode' run uncaptured"}


@pytest.mark.parametrize("run", [lambda engine: engine, captured])
def test_an_engine_that_is_dropped_leaves_its_caches_at_once(run: Any) -> None:
    """They are gigabytes: nothing waits for the garbage collector."""
    engine = run(Engine(agreeing(), slots=2))
    engine.generate(prompts(2, 20), Sampling(4, ignore_end=True))
    left = [weakref.ref(group.cache) for group in engine.executor.groups]
    gc.collect()
    gc.disable()
    try:
        del engine
        assert not any(each() for each in left)
    finally:
        gc.enable()
