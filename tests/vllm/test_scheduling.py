"""However vLLM schedules, the text is the same: chunks, prefixes from the cache, preemption, one at a time or many."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from engines import Composition, assert_same, chat, chats, composition, engine, prompts, transformers_says, vllm_says


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    """Adapters on a shared base and a full fine-tune, with a router."""
    return composition(tmp_path_factory.mktemp("mixed"), "lora", "routed")


def metric(llm: Any, name: str) -> float:
    return sum(entry.value for entry in llm.get_metrics() if entry.name == name)


def test_chunks_and_cached_prefixes(mixed: Composition) -> None:
    """Prompts are read 24 tokens at a time; then again, longer by a token, from the cache."""
    messages = prompts(52, longest=140)
    asked, longer = [chat(message) for message in messages], [chat([*message, 5]) for message in messages]
    expected, expected_longer = (transformers_says(mixed.reference, rows) for rows in (asked, longer))
    options = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 24}
    with engine(mixed.folder, block_size=32, enable_prefix_caching=True, disable_log_stats=False, **options) as llm:
        assert_same(vllm_says(llm, asked), expected)
        before = metric(llm, "vllm:prefix_cache_hits")
        assert_same(vllm_says(llm, longer), expected_longer)
        assert_same(vllm_says(llm, asked), expected)
        assert metric(llm, "vllm:prefix_cache_hits") - before > 5000


def test_many_at_once_equal_one_at_a_time(mixed: Composition) -> None:
    asked = chats(32, seed=1)
    with engine(mixed.folder, enable_prefix_caching=False) as llm:
        together = vllm_says(llm, asked)
        alone = [vllm_says(llm, [row])[0] for row in asked]
    with_gaps = transformers_says(mixed.reference, asked)
    assert_same(together, with_gaps, least=31)
    assert_same(alone, with_gaps, least=31)


def test_requests_that_are_preempted(mixed: Composition) -> None:
    """The cache holds a few requests at a time, so that some lose their place and start again."""
    asked = chats(52, longest=50, seed=2)
    expected = transformers_says(mixed.reference, asked, new=60)
    options = {"block_size": 32, "num_gpu_blocks_override": 14, "enable_prefix_caching": False}
    with engine(mixed.folder, disable_log_stats=False, max_num_seqs=16, **options) as llm:
        assert_same(vllm_says(llm, asked, new=60), expected)
        assert metric(llm, "vllm:num_preemptions") > 5


def test_same_prompt_sampled_many_times(mixed: Composition) -> None:
    """Requests that share blocks of a prompt, and part after it, keep apart what the rule remembers."""
    from vllm import SamplingParams

    asked = chat((prompts(1, seed=3)[0] * 4)[:96])
    with engine(mixed.folder, block_size=32, enable_prefix_caching=True) as llm:
        sampling = SamplingParams(temperature=1.0, n=12, max_tokens=24, logprobs=0, seed=0, ignore_eos=True)
        for _ in range(2):  # the second time from the cache
            answers = llm.generate([{"prompt_token_ids": asked}], sampling, use_tqdm=False)[0].outputs
            assert len({tuple(answer.token_ids) for answer in answers}) > 6
            for answer in answers:
                said = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
                torch.testing.assert_close(torch.tensor(said), teacher_forced(mixed, asked, list(answer.token_ids)),
                                           atol=1e-4, rtol=0)  # fmt: skip


@torch.inference_mode()
def teacher_forced(composed: Composition, asked: list[int], answer: list[int]) -> torch.Tensor:
    """What the reference finds each token of the answer to have been worth."""
    logp_TV = composed.reference(torch.tensor([asked + answer])).logits[0]
    return logp_TV[len(asked) - 1 : -1].gather(-1, torch.tensor(answer)[:, None])[:, 0]


def test_logprobs_of_prompts(mixed: Composition) -> None:
    """What lm-eval asks for, of texts with and without answers in the template; in chunks, and next to requests that
    are writing."""
    from vllm import SamplingParams

    rows = [row for row in prompts(20, longest=60, seed=4) if len(row) > 2]
    asked = [*rows[:8], *([*chat(row), *other, *chat(row[:5]), *other[:9]] for row, other in pairwise(rows[8:]))]
    expected = [teacher_forced(mixed, row[:1], row[1:]) for row in asked]
    options = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48, "max_num_seqs": 16}
    with engine(mixed.folder, **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": row} for row in asked], sampling, use_tqdm=False)
    for row, output, found in zip(asked, outputs, expected, strict=True):
        said = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
        torch.testing.assert_close(torch.tensor(said), found, atol=1e-4, rtol=0)
