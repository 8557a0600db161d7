"""One case in a process of its own, where what it needs must be set before torch is imported.

    python separate.py FOLDER FAMILY RULE SEED '{"tensor_parallel_size": 2}'

Composes, writes with both engines, compares, and prints how many models were compiled. With the rule "default" it is
the routes that are compared, of vLLM's own multi-LoRA.
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

from engines import (  # noqa: E402
    assert_same,
    assert_same_routes,
    chats,
    composition,
    engine,
    routed_engine,
    transformers_says,
    vllm_routes,
    vllm_says,
)


def main() -> None:
    folder, family, rule, seed = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    shutil.rmtree(folder / "members", ignore_errors=True)
    composed = composition(folder, family, rule, seed=seed)
    asked = chats(seed=seed)
    if rule == "default":
        with routed_engine(composed.folder, **options) as llm:
            members = composed.reference.config.member_names
            assert_same_routes(composed.reference.route(asked), vllm_routes(llm, members, asked))
        return
    expected = transformers_says(composed.reference, asked)
    with engine(composed.folder, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert_same(vllm_says(llm, asked), expected)
        from vllm.compilation.counter import compilation_counter as counter

        print(counter.num_aot_compiles)


if __name__ == "__main__":
    main()
