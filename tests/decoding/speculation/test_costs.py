"""The model of what resting costs: near what was measured, and members rest where it says that they should."""

from __future__ import annotations

import pytest

from tessellm.decoding.speculation.costs import CPU, GPU, Costs, expected
from tessellm.decoding.speculation.pace import ModelledPace

H200_MS = 1.45  # of one member of google/gemma-2-2b in a pass of three, one row


@pytest.mark.parametrize(
    ("costs", "rows", "measured_ms"),
    [(Costs(GPU, 3), 1, 4.5), (Costs(GPU, 3), 32, 5.2), (Costs(GPU, 1, 1), 1, 1.95), (Costs(GPU, 1, 6), 1, 2.07)],
)
def test_steps_take_about_what_was_measured(costs: Costs, rows: int, measured_ms: float) -> None:
    assert H200_MS * costs.step(rows) == pytest.approx(measured_ms, rel=0.1)


@pytest.mark.parametrize(("length", "measured_ms"), [(3, 4.75), (7, 4.92), (15, 4.97), (31, 5.0)])
def test_blocks_take_about_what_was_measured(length: int, measured_ms: float) -> None:
    """Three members: a draft's tokens by one of them, and verification (results/resting-cuda.json)."""
    assert H200_MS * Costs(GPU, 3).block(1, length) == pytest.approx(length * 1.85 + measured_ms, rel=0.03)


@pytest.mark.parametrize(
    ("costs", "pays"),
    [
        (Costs(CPU, 6), True), (Costs(CPU, 2), True), (Costs(CPU, 1, 5), False), (Costs(CPU, 1), False),
        (Costs(GPU, 3), True), (Costs(GPU, 2), False), (Costs(GPU, 9), True), (Costs(GPU, 1, 6), False),
    ],
)  # fmt: skip
def test_members_rest_where_they_read_weights_of_their_own(costs: Costs, pays: bool) -> None:
    assert costs.pays is pays


def test_lora_experts_are_rows_through_one_base() -> None:
    """Six of them and a base: verifying takes far less than seven members do, drafting as much as one with deltas."""
    lora, full, draft = Costs(GPU, 1, 6), Costs(GPU, 7), 1 + GPU.alone + GPU.deltas + GPU.expert
    assert lora.block(1, 15) - 15 * draft < 0.4 * (full.block(1, 15) - 15 * (1 + GPU.alone))
    assert lora.step(1) < 1.5 < 6 < full.step(1)


@pytest.mark.parametrize("members", [3, 9])
def test_the_most_tokens_a_second_on_a_gpu(members: int) -> None:
    """Milliseconds a token where every draft is right: what the issue of resting members asks of an H200."""
    costs = Costs(GPU, members)
    by_length = {n: H200_MS * costs.block(1, n) / (n + 1) for n in GPU.lengths}
    assert min(by_length.values()) == by_length[31] < {3: 2.2, 9: 2.6}[members]


def test_texts_that_believe_different_members_cost_a_pass_each() -> None:
    """On a GPU a pass that drafts reads its member's weights for all rows; on a CPU it has its own rows alone."""
    on_gpu, on_cpu = Costs(GPU, 3), Costs(CPU, 3)
    one, three = on_gpu.block(32, 7, 1), on_gpu.block(32, 7, 3)
    assert one / expected(0.99, 7) < on_gpu.step(32) < three / expected(1.0, 7)
    assert three - one == pytest.approx(2 * 7 * (1 + GPU.alone + GPU.row * 31))
    assert on_cpu.block(4, 8, 4) - on_cpu.block(4, 8, 1) == pytest.approx(3 * 8 * (1 - CPU.row))


def test_drafts_are_as_long_as_the_fast_kernels_take() -> None:
    pace, sure = ModelledPace(GPU.lengths, costs=Costs(GPU, 3)), (0.999, 100)
    assert pace.choose(1, [sure]) == 31
    assert pace.choose(32, [sure] * 32) == 7
    assert pace.choose(64, [sure] * 64) == 3
    assert pace.choose(100, [sure] * 100) == 0
    pace.writers = 3
    assert pace.choose(32, [sure] * 32) == 0
    assert pace.choose(1, [(0.3, 100)]) == 0
