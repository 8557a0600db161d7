"""One case in a process of its own, where what it needs must be set before torch is imported.

    python separate.py FOLDER FAMILY RULE SEED '{"tensor_parallel_size": 2}'

Composes, writes with both engines, compares, and prints how many models were compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

options = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
if options.get("enforce_eager") is False:
    os.environ["TORCHDYNAMO_DISABLE"] = "0"

from engines import assert_same, chats, composition, engine, transformers_says, vllm_says  # noqa: E402


def main() -> None:
    folder, family, rule, seed = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    shutil.rmtree(folder / "members", ignore_errors=True)
    composed = composition(folder, family, rule, seed=seed)
    asked = chats(seed=seed)
    expected = transformers_says(composed.reference, asked)
    with engine(composed.folder, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert_same(vllm_says(llm, asked), expected)
        from vllm.compilation.counter import compilation_counter as counter

        print(counter.num_aot_compiles)


if __name__ == "__main__":
    main()
