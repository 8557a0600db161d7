"""Numbers for Prometheus, in its text format: counters, and histograms with fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from ..engine.requests import Request

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
NATS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)


class Histogram:
    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{le="{label}"}} {total}'
        yield f"{name}_sum {self.sum:.9g}"
        yield f"{name}_count {total}"


class Metrics:
    """What happened since the server started. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.ended: Counter[str] = Counter()
        self.routes: Counter[str] = Counter()  # by member
        self.prompt_tokens = self.new_tokens = 0
        self.first_token, self.between_tokens, self.whole = (Histogram(SECONDS) for _ in range(3))
        self.interference = Histogram(NATS)

    def request_ended(self, request: Request, selected: str | None, now: float) -> None:
        """Count a request; `selected`: the member that answered it, if it came so far."""
        self.ended[request.finish_reason or "error"] += 1
        if selected is not None:
            self.routes[selected] += 1
        self.prompt_tokens += len(request.prompt)
        self.new_tokens += len(request.tokens)
        self.whole.observe(now - request.submitted)
        if request.first_token is not None:
            self.first_token.observe(request.first_token - request.submitted)
            if len(request.tokens) > 1:
                self.between_tokens.observe((now - request.first_token) / (len(request.tokens) - 1))
        for view in request.seen:
            if "log_z" in view:
                self.interference.observe(abs(view["log_z"]))

    def text(self, slots: int, running: int, waiting: int, late: int, drafts: tuple[int, int]) -> str:
        """The page that Prometheus reads. `drafts`: tokens of drafts, and those of them that were accepted."""
        return "\n".join(self._lines(slots, running, waiting, late, *drafts)) + "\n"

    def _lines(self, slots: int, running: int, waiting: int, late: int, drafted: int, accepted: int) -> Iterator[str]:
        gauges = {
            "slots": ("Slots for requests.", slots),
            "slots_used": ("Slots in use.", running),
            "queue_waiting": ("Requests that wait for a slot.", waiting),
        }
        for name, (meaning, value) in gauges.items():
            yield from _head(name, "gauge", meaning)
            yield f"tessellm_{name} {value}"
        yield from _head("late_preparations_total", "counter", "Compilations and captures since the server was ready.")
        yield f"tessellm_late_preparations_total {late}"
        yield from _head("drafted_tokens_total", "counter", "Tokens of drafts.")
        yield f"tessellm_drafted_tokens_total {drafted}"
        yield from _head("accepted_tokens_total", "counter", "Those of them that were accepted.")
        yield f"tessellm_accepted_tokens_total {accepted}"
        yield from _head("responses_total", "counter", "Responses by path and status.")
        for (path, status), count in sorted(self.responses.items()):
            yield f'tessellm_responses_total{{path="{path}",status="{status}"}} {count}'
        yield from _head("requests_total", "counter", "Sequences that ended, by reason.")
        for reason, count in sorted(self.ended.items()):
            yield f'tessellm_requests_total{{reason="{reason}"}} {count}'
        yield from _head("routes_total", "counter", "Sequences by the member that was selected.")
        for member, count in sorted(self.routes.items()):
            yield f'tessellm_routes_total{{member="{member}"}} {count}'
        yield from _head("tokens_total", "counter", "Tokens of prompts and tokens written.")
        yield f'tessellm_tokens_total{{kind="prompt"}} {self.prompt_tokens}'
        yield f'tessellm_tokens_total{{kind="new"}} {self.new_tokens}'
        histograms = {
            "first_token_seconds": ("From request to first token.", self.first_token),
            "between_tokens_seconds": ("Mean time between tokens of a sequence.", self.between_tokens),
            "request_seconds": ("From request to its end.", self.whole),
            "interference_nats": ("|log Z| of traced tokens.", self.interference),
        }
        for name, (meaning, histogram) in histograms.items():
            yield from _head(name, "histogram", meaning)
            yield from histogram.lines(f"tessellm_{name}")


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP tessellm_{name} {meaning}"
    yield f"# TYPE tessellm_{name} {kind}"
