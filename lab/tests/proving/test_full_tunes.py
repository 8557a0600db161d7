"""Full fine-tunes on a small ground: the loss falls, the result is kept, and the router tells it from the base."""

import gzip
import json

from tessellm_lab.proving.full_tunes import Plan, measure

from proving_cases import small_places

PLAN = Plan(("clinc", "isodate"), 12, 2, 3e-3, 3)


def test_full_fine_tunes_are_trained_once_and_routed(tmp_path) -> None:
    places = small_places(tmp_path)
    for name in PLAN.names:
        with gzip.open(places.data / f"{name}.train.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"prompt": f"{name} {n}", "answer": name}) + "\n" for n in range(8))
    said: list[str] = []
    first = measure(places, PLAN, 0, tmp_path / "out", "cpu", said.append)
    assert len(said) == 12 * len(PLAN.names)
    for losses in first.tables["losses"].values():
        assert losses["last"] < losses["first"]
    found = first.tables["nothing given"]["cells"]
    assert found["plain"]["share"] >= 0.95
    assert found["seen"]["of"] == 3 * len(PLAN.names)
    again: list[str] = []
    second = measure(places, PLAN, 0, tmp_path / "out", "cpu", again.append)
    assert not again
    assert second.tables["nothing given"] == first.tables["nothing given"]
