"""What users of a server feel is measured on a real one, and put into numbers rightly."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

import latency
import server_latency
from served import ServedModel, served, served_by_vllm
from server_latency import LatencyPlan, measure_latency, prompt_text, spread, summary
from streaming import TimedAnswer, ask
from tessellm.errors import EngineError

from servers import Running

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that servers are started once
PLAN = LatencyPlan(requests=8, new=6, prompts=(4, 9), loads=(0.5, 2.0), slots=8)


def test_a_server_is_measured(server: Running) -> None:
    now, told = time.perf_counter(), []
    result = measure_latency(ServedModel(server.url, "tiny", now - 1, now), PLAN, told.append)
    server.wait_until_idle()
    assert result["ready_seconds"] == pytest.approx(1)
    assert result["first_token_since_start_seconds"] > 1
    assert result["requests_per_second"] > 0
    for load in ("all_slots", "load_0.5", "load_2"):
        row = result[load]
        assert row["refused"] == 0
        assert row["answers"] <= 8
        assert 0 < row["gap_ms"]["median"] <= row["gap_ms"]["p99"] <= row["gap_ms"]["largest"]
    assert len(told) == 4


def test_pieces_are_timed_as_they_come_and_refusals_are_told(server: Running) -> None:
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 12, "temperature": 0}
    answer = asyncio.run(ask(server.url, body))
    assert answer.status == 200
    assert len(answer.gaps) == len(answer.came) - 1 > 3
    assert answer.sent < answer.came[0] < answer.came[-1] <= time.perf_counter()
    assert asyncio.run(ask(server.url, {**body, "model": "none"})).status == 404
    with pytest.raises(EngineError, match="answered with 404"):
        measure_latency(ServedModel(server.url, "none", 0, 0), PLAN)


def test_one_member_alone_is_served_by_the_same_server(composed: tuple[Any, Path]) -> None:
    with served(f"{composed[1]}:math", 2, 100) as alone:
        assert alone.model == "tiny"
        assert alone.ready > alone.began
        answer = asyncio.run(ask(alone.url, {"model": "tiny", "prompt": "ab", "max_tokens": 4}))
    assert answer.status == 200


def test_numbers_of_answers() -> None:
    answers = [TimedAnswer(200, 1.0, [1.5, 1.6, 1.9]), TimedAnswer(429, 1.0, retry_after=2), TimedAnswer(200, 2.0)]
    row = summary(answers)
    assert (row["answers"], row["refused"], row["gaps"]) == (1, 1, 2)
    assert row["first_token_ms"] == pytest.approx({"median": 500, "p99": 500, "largest": 500})
    assert row["p99_over_median"] == pytest.approx(1.5)
    assert "99 % within 1.5 medians" in server_latency.in_words(row)
    assert "gaps: none" in server_latency.in_words(summary(answers[2:]))
    assert spread([n / 1000 for n in range(1, 201)]) == pytest.approx({"median": 100.5, "p99": 199, "largest": 200})


def test_prompts_begin_unlike_each_other_and_are_as_long_as_wished() -> None:
    draw = random.Random(0)
    texts = [prompt_text(tokens, draw) for tokens in (1, 64, 600)]
    assert len({text.split()[0] for text in texts}) == 3
    assert [len(text.split()) for text in texts] == [2, 47, 460]


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"new": 1}, {"loads": ()}, {"loads": (0.0,)}, {"prompts": (0,)}])
def test_plans_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="expected"):
        LatencyPlan(**wrong)


def test_a_composition_is_compared_with_its_base_and_with_vllm_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = [], []
    monkeypatch.setattr(latency, "measure_latency", lambda server, plan, progress: {"server": server})

    class Serving:
        def __init__(self, *given: Any):
            asked.append(given)

        def __enter__(self) -> str:
            if "python" in str(asked[-1][0]):
                raise EngineError("it does not know these members")
            return asked[-1][0]

        def __exit__(self, *given: Any) -> None:
            pass

    monkeypatch.setattr(latency, "served", Serving)
    monkeypatch.setattr(latency, "served_by_vllm", Serving)
    result = latency.compare_latency("out", PLAN, Path("python"), told.append)
    assert {name: row["server"] for name, row in result["servers"].items()} == {
        "composition": "out",
        "base alone": "out:base",
    }
    assert told == ["vLLM is left out: it does not know these members"]
    assert list(latency.compare_latency("out:math", PLAN)["servers"]) == ["math"]


def test_a_server_that_does_not_come_up_is_told() -> None:
    with pytest.raises(EngineError, match="vLLM does not serve"), served_by_vllm(Path("/bin/false"), "out", 1, 10):
        pass
