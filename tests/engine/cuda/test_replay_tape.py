"""The tape that stands in for CUDA graphs: it replays what a pass computes, and fails as a graph would."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessellm.engine import sampling
from tessellm.engine.engine import Engine
from tessellm.engine.sampling import Sampling, SamplingBuffers

from captured_steps import TapeRecorder, captured
from decoding_cases import composition, prompts
from replay_tape import REFUSAL, Pool, Tape

Replay = Callable[[], None]


def record(recorder: TapeRecorder, run: Replay) -> Replay:
    with torch.inference_mode():
        return recorder.record(run, restored=lambda run: run())


def test_a_replay_computes_with_what_its_buffers_hold_and_a_capture_changes_nothing() -> None:
    x, y, cells = torch.arange(6.0).view(2, 3), torch.zeros(2), torch.zeros(4, 3)
    index = torch.tensor([1, 3])

    def run() -> None:
        wide = torch.nn.functional.linear(x, x).softmax(-1).T.reshape(-1)
        cells[index] = x.split([1, 1])[1] + wide[:3]
        y.copy_(wide.view(2, 2).sum(1)).add_(torch.where(x > 1, x, -1.0).amax(1))

    with torch.inference_mode():
        replay = Tape(Pool()).capture(run)
    assert not y.any()
    assert not cells.any()
    for seed in range(3):
        x.copy_(torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))
        run()
        expected = y.clone(), cells.clone()
        y.zero_()
        cells.zero_()
        replay()
        assert torch.equal(y, expected[0])
        assert torch.equal(cells, expected[1])


def test_a_number_of_the_host_is_frozen() -> None:
    x, host = torch.zeros(3), SimpleNamespace(step=1)
    replay = record(TapeRecorder(), lambda: x.fill_(0).add_(host.step))
    host.step = 2
    replay()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("frozen", [False, True])
def test_an_engine_whose_pass_reads_a_counter_of_the_host_writes_other_texts(
    frozen: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: noise by the host's count of steps, in place of the position on the device."""
    plain, calls = sampling.uniform, []

    def counted(seed_B: Tensor, position_B: Tensor) -> Tensor:
        calls.append(1)
        return plain(seed_B, torch.full_like(position_B, len(calls)) if frozen else position_B)

    monkeypatch.setattr(sampling, "uniform", counted)
    model, asked = composition("llama", tmp_path, rule="product"), Sampling(20, 1.0, seed=1, ignore_end=True)

    def written(engine: Engine) -> list[int]:
        engine.generate(prompts(1, 20), asked)
        calls.clear()
        return engine.generate(prompts(1, 20), asked)[0].tokens

    apart = written(captured(Engine(model, slots=1))) != written(Engine(model, slots=1))
    assert apart is frozen


def fill(x: Tensor, blocks: int) -> None:
    """Write to so much memory of the pool."""
    made = [x * 7 for _ in range(blocks)]
    del made


def two_passes(recorder: TapeRecorder, x: Tensor) -> tuple[Any, Replay, Replay]:
    """One leaves a result in Python, the other reads it there."""
    left = SimpleNamespace(found=None, sum=torch.zeros(()))

    def first() -> None:
        left.found = x * 2

    def second() -> None:
        left.sum.copy_(left.found.sum())

    return left, record(recorder, first), record(recorder, second)


def test_what_a_graph_leaves_is_overwritten_by_the_next_once_it_was_freed() -> None:
    recorder, x = TapeRecorder(), torch.ones(4)
    left, first, second = two_passes(recorder, x)
    while_kept = record(recorder, lambda: fill(x, 1))
    first()
    while_kept()
    second()
    assert left.sum == 8
    left.found = None  # its memory is the pool's again
    once_freed = record(recorder, lambda: fill(x, 2))
    first()
    second()
    assert left.sum == 8
    first()
    once_freed()
    second()
    assert left.sum == 28


def test_what_python_keeps_is_what_the_last_replay_wrote() -> None:
    x = torch.ones(4)
    left, first, _ = two_passes(TapeRecorder(), x)
    assert left.found.isnan().all()  # nothing was computed yet
    kept = []
    for value in (1.0, 3.0):
        x.fill_(value)
        first()
        kept.append(left.found)
    assert [each.tolist() for each in kept] == [[6.0] * 4] * 2


def test_memory_that_was_freed_since_is_not_read() -> None:
    place = SimpleNamespace(x=torch.zeros(4))

    def run() -> None:
        place.x.add_(1)

    replay = record(TapeRecorder(), run)
    replay()
    assert place.x.tolist() == [2.0] * 4  # once before the capture
    place.x = torch.zeros(4)
    with pytest.raises(RuntimeError, match="freed after its capture"):
        replay()


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool((x > 0).all()),
        lambda x: 1.0 in x,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.add(torch.tensor([1.0], device=x.device)),
        lambda x: x.add(torch.tensor([1.0])),
        lambda x: x[[0, 1]],
        lambda x: x.__setitem__(0, 1.0),
    ],
)
def test_a_capture_refuses_what_waits_for_the_host(reads: Callable[[Tensor], Any]) -> None:
    x = torch.arange(3.0)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=REFUSAL):
        Tape(Pool()).capture(lambda: reads(x))
    assert x.tolist() == [0.0, 1.0, 2.0]
    assert not x.is_cuda


def test_a_capture_takes_numbers_that_a_kernel_takes() -> None:
    x = torch.arange(3.0)

    def run() -> None:
        x[x > 1] = 9.0
        x[:1] = 4.0
        x.add_(torch.where(x > 5, x, -1.0)).mul_(torch.arange(3, device=x.device)).mul_(torch.tensor(2.0))

    with torch.inference_mode():
        replay = Tape(Pool()).capture(run)
    replay()
    assert x.tolist() == [0.0, 0.0, 72.0]


def test_an_engine_that_cannot_capture_a_pass_fails_its_test(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SamplingBuffers.choose
    monkeypatch.setattr(
        SamplingBuffers, "choose", lambda self, logp_BV, *given: logp_BV.tolist() and plain(self, logp_BV, *given)
    )
    engine = captured(Engine(composition("llama", tmp_path), slots=1))
    with pytest.raises(AssertionError, match=REFUSAL):
        engine.generate(prompts(1, 20), Sampling(3, 1.0))
