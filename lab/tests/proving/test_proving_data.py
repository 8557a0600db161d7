"""The repository's twenty adapters and their prompts are there, whole, and apart from each other."""

import json

import pytest
from safetensors import safe_open

from tessellm.errors import TessellmError
from tessellm_lab.proving.skills import (
    BASE,
    FIFTEEN,
    TWENTY,
    Places,
    conversations,
    development_prompts,
    ordinary_prompts,
    skill_prompts,
)


@pytest.fixture(scope="module")
def places() -> Places:
    return Places.found()


def test_every_skill_has_an_adapter_a_description_and_prompts(places: Places) -> None:
    for kind in ("sentence", "terse"):
        assert set(places.descriptions(kind)) == set(TWENTY)
    for name in TWENTY:
        with safe_open(places.adapter(name) / "adapter_model.safetensors", "pt") as file:
            assert any("lora_A" in key for key in file.keys())
        assert len(development_prompts(places, name, 32)) == 32
    asked = skill_prompts(places, TWENTY, 20)
    assert len(asked) == 20 * 2 * len(TWENTY)
    assert {each.cell for each in asked} == {"seen", "unseen"}


def test_adapters_are_of_one_base_and_say_so(places: Places) -> None:
    for name in FIFTEEN:
        config = json.loads((places.adapter(name) / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "smollm2"


def test_prompts_to_measure_with_are_none_to_tune_with(places: Places) -> None:
    for name in TWENTY:
        given = {example.prompt for example in places.examples(name, "dev")}
        measured = {asked.text for asked in skill_prompts(places, (name,), None)}
        assert not given & measured


def test_the_base_is_expected_for_ordinary_prompts(places: Places) -> None:
    assert {asked.expected for asked in ordinary_prompts(places)} == {BASE}
    found = conversations(places)
    assert {asked.expected for asked in found} - {BASE} <= set(TWENTY)
    assert all(asked.messages[-1][0] == "user" for asked in found)
    assert {asked.cell for asked in found} == {"conversations", "follow-ups"}


def test_a_missing_adapter_is_named(tmp_path) -> None:
    with pytest.raises(TessellmError, match="there is no adapter in"):
        Places(tmp_path, tmp_path, tmp_path).adapter("clinc")
