"""How long the command line takes before any command runs: help, version, errors of usage. Medians of ten processes.

Writes results/import-time.json.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from reference_overhead import RESULTS
from tessellm_lab.common.claims import Claim, Result

CALLS = ("--help", "--version", "generate --help", "tune --help", "conpose", "generate", "generate out hi --nope")
ROUNDS, LIMIT = 10, 0.5


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tessellm.cli", *arguments], capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    start = time.perf_counter()
    rounds = [{call: seconds(call.split()) for call in CALLS} for _ in range(ROUNDS)]  # in turns
    tables = {call: {"seconds": [round(each[call], 4) for each in rounds]} for call in CALLS}
    claims = [
        Claim(
            id=call,
            statement=f"tessellm {call}: seconds, median of {ROUNDS}",
            value=round(median, 3),
            target=f"≤ {LIMIT}",
            holds=median <= LIMIT,
        )
        for call, row in tables.items()
        for median in [statistics.median(row["seconds"])]
    ]
    Result("import-time", claims, 0, "cpu", time.perf_counter() - start, tables=tables).write(RESULTS)
    for claim in claims:
        print(f"{claim.id:>24}: {claim.value:.3f} s   {claim.target}")


if __name__ == "__main__":
    main()
