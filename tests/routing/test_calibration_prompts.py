"""The calibration prompts: ordinary, varied, and none of them an instruction of a skill."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib import resources

TEXT = resources.files("tessellm.routing").joinpath("calibration_prompts.jsonl").read_text(encoding="utf-8")
ITEMS = [json.loads(line) for line in TEXT.splitlines()]
PROMPTS = [item["prompt"] for item in ITEMS]
SHARES = {"everyday": 352, "trade": 128, "request": 64, "language": 96}

INSTRUCTIONS = [  # how skills word their prompts; a calibration prompt so worded would widen that skill's own scores
    r"\b(sentence|question|problem|comment|record|words|columns|schema|table|text|task|input|user): |^english: ",
    r"\b(label|logical form|equation|emotion|pattern|sql|spanish|german|iso 8601|json|answer|output|code|response):",
    r"\btranslate (\w+ )*(in)?to\b|\btranslation of\b|\bin(to)? spanish\b|\btraduce al\b",
    r"\b(which|what|name the|the) emotion\b|\bwriter feel\b|\bone word\b|\bwhat (illness|disease)\b",
    r"\b(one|single)[- ]line (command|equation|answer)\b|\bone[- ]line\b|\bunix command\b|\bcommand line\b",
    r"\b(clean up|rewrite) (this|the following) question\b|\bdisfluenc|\bpredicates?\b|\bsemantic parse\b",
    r"\bdefine\b|\bdefinition of\b|\bdictionary (entry|meaning)\b",
    r"\b(write|make|build) (a|one|1) sentence (with|out of)\b",
    r"\b(write|give) (\w+ ){0,3}(sql|query|regex|regular expression|bash|shell command)\b",
    r"\b(sql|sparql|regex|bash) (for|over|command|query|statement)\b",
    r"\bas json\b|\bin json\b|\bjson (object|only)\b|\bsnake_case\b",
    r"\b(named )?entit(y|ies)\b|\bintent(s)? (label|of)\b|\bclassify\b",
    r"\biso (format|notation|date)\b|\byyyy\b|\btldr\b|\bdef \w+\(|\bselect \w+ from\b|name\[",
]


def test_there_are_enough_of_every_kind() -> None:
    assert Counter(item["kind"] for item in ITEMS) == SHARES
    assert {tuple(item) for item in ITEMS} == {("prompt", "kind", "language")}
    languages = Counter(item["language"] for item in ITEMS)
    assert languages.pop("en") == len(ITEMS) - SHARES["language"]
    assert len(languages) == 15
    assert min(languages.values()) >= 6


def test_prefixes_are_fair_samples() -> None:
    """A caller may take the first few hundred."""
    for size in (64, 128, 214, 430):
        counts = Counter(item["kind"] for item in ITEMS[:size])
        assert all(abs(counts[kind] / size - share / len(ITEMS)) < 0.05 for kind, share in SHARES.items())


def test_prompts_differ() -> None:
    words = [tuple(re.findall(r"\w+", prompt.lower())) for prompt in PROMPTS]
    assert len(set(words)) == len(PROMPTS)
    openings = Counter(tuple(prompt.lower().split()[:2]) for prompt in PROMPTS)
    assert max(openings.values()) <= 4


def test_lengths_vary() -> None:
    lengths = sorted(len(prompt.split()) for prompt in PROMPTS)
    assert all(prompt == prompt.strip() and prompt for prompt in PROMPTS)
    assert lengths[0] == 1
    assert lengths[-1] <= 350
    assert 12 <= lengths[len(lengths) // 2] <= 16
    assert 0.06 <= sum(length > 80 for length in lengths) / len(lengths) <= 0.1


def test_no_prompt_is_worded_as_a_skill_is() -> None:
    found = [
        (pattern, prompt) for pattern in INSTRUCTIONS for prompt in PROMPTS if re.search(pattern, prompt, re.IGNORECASE)
    ]
    assert not found
