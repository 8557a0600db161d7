"""Run by itself, with a folder: start an engine in another process, kill that, and ask for a text."""

from __future__ import annotations

import json
import os
import signal
import sys

from engines import CONTEXT  # sets the environment first

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

if __name__ == "__main__":
    import psutil
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=CONTEXT)
    children = psutil.Process().children(recursive=True)
    print(json.dumps([child.pid for child in children]), flush=True)
    engine = max(children, key=lambda child: child.memory_info().rss)  # the other is Python's resource tracker
    engine.send_signal(signal.SIGKILL)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4), use_tqdm=False)
