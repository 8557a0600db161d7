"""What active members cost is put into claims rightly, with experts that differ and can be made again."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

import active_members
from active_members_claims import claims_of
from active_members_experts import OURS, SMOLLM2, WEIGHTS, experts_of
from tessellm.routing.route import Route


def test_experts_are_adapters_and_then_noisy_copies() -> None:
    with experts_of(5, Path("nowhere")) as five:
        assert list(five) == list(OURS)
    more = SMOLLM2  # any folder of adapters
    for _ in range(2):
        with experts_of(9, more) as nine:
            assert len(nine) == 9
            copies = [load_file(place / WEIGHTS) for name, place in nine.items() if "-" in name]
            first = next(iter(copies[0]))
            assert len({float(copy[first].float().sum()) for copy in copies}) == len(copies) > 1
            again = [float(copy[first].float().sum()) for copy in copies]
            source = load_file(SMOLLM2 / OURS[0] / WEIGHTS)
            assert not torch.equal(source[first], copies[0][first])
    with experts_of(9, more) as nine:
        assert [float(load_file(p / WEIGHTS)[first].float().sum()) for n, p in nine.items() if "-" in n] == again


def test_the_router_works_and_then_says_what_it_was_told() -> None:
    class Router:
        def route(self, prompts: list[str]) -> list[Route]:
            return [Route({"base": 0.2, "math": 0.8}, "math", {"math": 3.0}) for _ in prompts]

    router = active_members.ChosenRoute(Router())  # type: ignore[arg-type]
    assert router.route(["?"]) == [Route({"base": 1.0}, "base", {"math": 3.0})]  # type: ignore[list-item]


def test_claims() -> None:
    first = {"base first": [0.1, 0.2, 0.4], "expert first": [0.2, 0.5, 0.8], "left first": [0.1, 0.2, 0.6]}
    step = {key.replace("first", "step"): values for key, values in first.items()}
    row = active_members.over_base(first | step)
    assert row["expert first over base"] == 2.0
    assert row["left step over base"] == 1.0
    tables = {
        "tokens 5": {"experts": 5, "prompts": {"64": row}},
        "memory 5": {"experts": 5, "base_mib": 90.0, "mib": 130.0, "adapters_mib": 10.0},
        "server": {
            "clients": 8,
            "composition": {"requests_per_second": 2.0, "load_0.8": {"p99_over_median": 3.5}},
            "base alone": {"requests_per_second": 2.5, "load_0.8": {"p99_over_median": 2.5}},
        },
        "base": {"first": {"here": 9.0, "old": 10.0}, "seconds": 3.0},
    }
    found = {claim.id: (claim.value, claim.holds) for claim in claims_of(tables)}
    assert found["expert first-5-64"] == (2.0, True)
    assert found["expert step-5-64"] == (2.0, False)
    assert found["memory-5"] == (1.3, False)
    assert found["server"] == (0.8, True)
    assert found["gaps-composition"] == (3.5, False)
    assert found["base-first"] == (0.9, True)
