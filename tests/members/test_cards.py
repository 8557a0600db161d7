"""Model cards: what is read of them, and that no text of a stranger's breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tessellm.members.cards import LARGEST, LONGEST, Card, read_card

ADAPTERS = Path(__file__).parents[2] / "adapters" / "smollm2"
TRL = """---
base_model: unsloth/llama
library_name: peft
---
# Model Card for Model ID

<!-- Provide a quick summary of what the model is/does. -->

This model is a fine-tuned version of [unsloth/llama](https://hf.co/unsloth/llama).
It has been trained using [TRL](https://github.com/huggingface/trl).

## Model Details
- **Developed by:** [More Information Needed]
"""

CARDS = {
    "metadata": ("---\ndescription: Writes haiku.\n---\n# x\n", Card("Writes haiku.")),
    "windows": ("\ufeff---\r\ndescription: Writes haiku.\r\nstyle: true\r\n---\r\n", Card("Writes haiku.", True)),
    "lines": ("---\ndescription: >\n  Writes\n  haiku.\n---\n", Card("Writes haiku.")),
    "a sentence": (
        "# haiku\n\nWrites haiku about the seasons. Trained for fun.\n",
        Card("Writes haiku about the seasons."),
    ),
    "a trainer's": (TRL, Card()),
    "a trainer's and a sentence": (
        TRL.replace("## M", "It answers questions about trees.\n\n## M"),
        Card("It answers questions about trees."),
    ),
    "no text": ("---\ndescription: 5\nstyle: yes please\n---\n", Card()),
    "style as text": ('---\nstyle: "true"\n---\n', Card()),
    "no YAML": ("---\ndescription: [\n---\n", Card()),
    "no mapping": ("---\n- description\n---\n", Card()),
    "aliases": ("---\na: &a [x, x]\ndescription: y\n---\n", Card()),
    "a table": ("| it measures |\n|---|\n| one two three four five. |\n", Card()),
    "nothing": ("", Card()),
}


@pytest.mark.parametrize("case", CARDS)
def test_cards(tmp_path: Path, case: str) -> None:
    text, expected = CARDS[case]
    (tmp_path / "README.md").write_bytes(text.encode())
    assert read_card(tmp_path) == expected


def test_what_peft_writes_says_nothing(members_dir: Path) -> None:
    assert "limitations of the model" in (members_dir / "lora_math" / "README.md").read_text()
    assert read_card(members_dir / "lora_math") == Card()


def test_no_card_and_odd_ones(tmp_path: Path) -> None:
    assert read_card(tmp_path) == Card()
    assert read_card(tmp_path / "nowhere") == Card()
    (tmp_path / "README.md").write_bytes(b"\xff\xfe\x00---" + b"x" * 2 * LARGEST)
    assert read_card(tmp_path) == Card()
    (tmp_path / "README.md").write_text(f"---\ndescription: {'word ' * 200}\n---\n")
    description = read_card(tmp_path).description
    assert description is not None
    assert LONGEST - 5 < len(description) <= LONGEST
    assert description.endswith("word")


@settings(max_examples=100, deadline=None)
@given(some.text(max_size=200), some.text(alphabet="-\n :#a{}[]&*!|>'\"%@", max_size=60))
def test_any_text_is_read(tmp_path_factory: pytest.TempPathFactory, body: str, metadata: str) -> None:
    folder = tmp_path_factory.mktemp("card")
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n{body}", encoding="utf-8", errors="replace")
    card = read_card(folder)
    assert card.description is None or (0 < len(card.description) <= LONGEST and "\n" not in card.description)


def test_the_adapters_of_this_repository_say_what_they_do() -> None:
    cards = {folder.name: read_card(folder) for folder in ADAPTERS.iterdir()}
    assert [name for name, card in cards.items() if card.style] == ["capitals"]
    assert all(card.description and card.description.endswith(".") for card in cards.values())


def test_the_card_that_peft_writes_says_nothing(members_dir: Path) -> None:
    assert (members_dir / "lora_math" / "README.md").stat().st_size > 4000
    assert read_card(members_dir / "lora_math") == Card()
