"""Drafts are as long as pays: long where they are right, none where they are not, and tried again at a bounded cost."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from tessellm.engine.executor import row_bucket
from tessellm.engine.speculation.draft_length import AcceptanceCount, AcceptanceRates, Counts, Pace, expected

LENGTHS = (1, 2, 4, 8)


def settle(chance: float, slope: float, steps: int = 400, rows: int = 4) -> tuple[list[int], float]:
    """Lengths chosen where a pass over a draft of G tokens costs 1 + slope · G, and what the passes cost in all."""
    pace, chosen, total = Pace(LENGTHS), [], 0.0
    for _ in range(steps):
        length = pace.choose(rows, [(chance, 100)] * rows)
        cost = 1 + slope * length
        pace.note(rows, length, cost)
        chosen.append(length)
        total += cost
    return chosen, total


@pytest.mark.parametrize(("chance", "slope", "best"), [(0.95, 0.02, 8), (0.7, 0.2, 2), (0.5, 0.3, 1), (0.02, 0.2, 0)])
def test_settles_on_the_length_that_brings_most_tokens_a_second(chance: float, slope: float, best: int) -> None:
    chosen, cost = settle(chance, slope)
    rates = {n: expected(chance, n) / (1 + slope * n) for n in (0, *LENGTHS)}
    assert max(rates, key=lambda n: rates[n]) == best == Counter(chosen).most_common(1)[0][0]
    assert sum(expected(chance, n) for n in chosen) / cost > 0.95 * rates[best]


@pytest.mark.parametrize("slope", [0.05, 0.5, 3.0])
def test_a_useless_drafter_costs_next_to_nothing(slope: float) -> None:
    _, total = settle(1e-3, slope, steps=1000)
    assert total < 1.04 * 1000


def test_a_slow_moment_is_not_held_against_a_length_for_ever() -> None:
    pace = Pace((4,))
    for length in (0, 0, 4, 4):
        pace.note(1, length, 20.0 if length else 1.0)
    assert pace.choose(1, [(0.9, 9)]) == 0
    chosen = []
    for _ in range(800):
        chosen.append(pace.choose(1, [(0.9, 9)]))
        pace.note(1, chosen[-1], 1.2 if chosen[-1] else 1.0)
    assert chosen[-1] == 4
    assert chosen[-50:].count(4) > 45


def test_rates_follow_the_text_and_begin_with_what_others_had() -> None:
    rates = AcceptanceRates()
    texts: list[Counts] = [defaultdict(AcceptanceCount) for _ in range(3)]
    lucky, unlucky, new = texts
    for _ in range(20):
        rates.note(lucky, 0, accepted=4, drafted=4)
        rates.note(unlucky, 0, accepted=0, drafted=4)
    assert rates.rate(unlucky, 0) < 0.25 < rates.rate(new, 0) < 0.9 < rates.rate(lucky, 0)
    assert rates.rate(new, 1) == 0.75  # of another kind, nothing is known
    for _ in range(3000):
        rates.fade(unlucky, 0)
    assert rates.rate(unlucky, 0) > 0.6  # it was long ago


def test_expected_tokens_and_buckets() -> None:
    assert expected(1.0, 3) == 4
    assert expected(0.0, 3) == 1
    assert expected(0.5, 2) == 1.75
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]


def test_where_the_device_tells_its_costs_nothing_is_tried() -> None:
    """The host's part is the same for every length, and one pass measures it."""
    device = {0: 1.0, 2: 1.1, 4: 1.2, 8: 1.5}
    for chance, best in ((0.95, 8), (0.6, 4), (0.01, 0)):
        pace = Pace((2, 4, 8))
        for length, seconds in device.items():
            pace.set_device_time(4, length, seconds)
        chosen = []
        for _ in range(20):
            chosen.append(pace.choose(4, [(chance, 100)] * 4))
            pace.note(4, chosen[-1], device[chosen[-1]] + 0.3)
        assert set(chosen[1:]) == {best}


def test_steps_that_need_not_wait_hide_the_host() -> None:
    """A draft must beat steps whose host works while the device does, not steps that wait for each other."""
    pace = Pace((2,))
    pace.set_device_time(1, 0, 1.0)
    pace.set_device_time(1, 2, 1.1)
    pace.note(1, 2, 2.1)  # the host takes as long as a step
    assert pace.choose(1, [(0.5, 100)]) == 0  # 1.75 tokens in 2.1, against 1 in 1
    assert pace.choose(1, [(0.9, 100)]) == 2  # 2.71
