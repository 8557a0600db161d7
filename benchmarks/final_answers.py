"""Final answers judged by math-verify instead of `tessellm.evaluate.answers`, over the table in the tests.

    pip install "math-verify[antlr4_13_2]" && python benchmarks/final_answers.py

Prints where it errs, both orders of each pair asked for, and what formulas that run away take. Decides nothing.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "evaluate")]
WRAPS = {"boxed": r"\boxed{%s}", "dollars": "$%s$"}
RUNAWAYS = ("9^{9^{9^{9}}}", "99999999!!!!", "(" * 300, "x^" * 150)


def judged(answer: str, gold: str, wrap: str) -> bool:
    from math_verify import parse, verify

    return verify(parse(wrap % gold), parse(wrap % answer))


def main() -> None:
    from test_answers import DIFFERENT, SAME

    logging.disable(logging.CRITICAL)
    for name, wrap in WRAPS.items():
        wrong = [(a, b, same) for pairs, same in ((SAME, True), (DIFFERENT, False)) for a, b in pairs
                 if {judged(a, b, wrap), judged(b, a, wrap)} != {same}]  # fmt: skip
        print(f"{name}: {len(wrong)} of {len(SAME) + len(DIFFERENT)} wrong")
        for answer, gold, same in wrong:
            print(f"  {answer}  |  {gold}  ({'refused' if same else 'accepted'})")
    for formula in RUNAWAYS:
        since = time.process_time()
        judged(formula, "1", WRAPS["boxed"])
        print(f"{formula[:16]}…: {time.process_time() - since:.2f} s")


if __name__ == "__main__":
    main()
