"""vLLM, for `tessellm bench --against vllm`; its own interpreter runs this file, without tessellm.

A line {"prompts": [[ids]], "new": n} in, a line {"first": seconds to the first token of all prompts, "step": seconds a
step after it} out.
"""

import json
import os
import sys
import time


def main(folder: str, length: int, rows: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    from vllm import LLM, SamplingParams

    model = LLM(folder, max_model_len=length, max_num_seqs=rows, enable_prefix_caching=False)

    def seconds(prompts: list, new: int) -> float:
        start = time.perf_counter()
        model.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start

    for line in sys.stdin:
        wanted = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in wanted["prompts"]]
        first, whole = seconds(prompts, 1), seconds(prompts, wanted["new"])
        print(json.dumps({"first": first, "step": (whole - first) / (wanted["new"] - 1)}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
