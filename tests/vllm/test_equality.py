"""vLLM writes what transformers writes, for every kind of member, with and without state."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import FAMILIES, assert_same, composition, engine, prompts, transformers_says, vllm_says


@pytest.mark.parametrize(("family", "rule"), [*((each, "evidence") for each in FAMILIES), ("lora", "product")])
def test_same_tokens_and_logprobs(family: str, rule: str, tmp_path: Path) -> None:
    composed = composition(tmp_path, family, rule)
    asked = prompts()
    expected = transformers_says(composed.reference, asked)
    with engine(composed.folder) as llm:
        assert_same(vllm_says(llm, asked), expected)
