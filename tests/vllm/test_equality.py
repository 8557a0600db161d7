"""vLLM writes what transformers writes, for every kind of member, with and without state."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import assert_same, chats, composition, engine, transformers_says, vllm_says

RULES = {  # members of other shapes than the base have no router
    "llama": "mixture",
    "shapes": "mixture",
    "architectures": "mixture",
    "gemma2": "routed",
    "lora": "routed",
    "vocabulary": "routed",
}


@pytest.mark.parametrize(("family", "rule"), [*RULES.items(), ("lora", "product")])
def test_same_tokens_and_logprobs(family: str, rule: str, tmp_path: Path) -> None:
    composed = composition(tmp_path, family, rule)
    asked = chats()
    expected = transformers_says(composed.reference, asked)
    assert (composed.reference.router is not None) == (rule == "routed")
    with engine(composed.folder) as llm:
        assert_same(vllm_says(llm, asked), expected)


def test_prompts_have_priors_of_their_own(tmp_path: Path) -> None:
    """What the tests of routers rest on."""
    composed = composition(tmp_path, "lora", "routed")
    routes = composed.reference.route(chats(20))
    assert len({route.active(0.9) for route in routes}) > 2
    assert len({route.selected for route in routes}) > 1
