"""Vocabulary agreement: complete refusals, honest notes."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tessellm.errors import VocabularyError
from tessellm.vocabulary import MemberTokens, agree

from vocabularies import MERGES, NO_TEMPLATE, WORDS, Bare, byte_level, refusal, two, words

# ── refusals


def test_refuses_added_tokens() -> None:
    added = [*WORDS, *(f"<|x{n}|>" for n in range(7))]
    message = refusal(words(), words(added), (64, 64))
    assert message == (
        "'base' and 'math' do not speak the same tokens (differing: 7).\n"
        "  Only 'math' speaks 7: '<|x0|>' (id 8), '<|x1|>' (id 9), '<|x2|>' (id 10), '<|x3|>' (id 11), "
        "'<|x4|>' (id 12), …\n"
        "  'math' added them, and 'base' has no probability to compare with.\n"
        "  Fix: use an expert trained without added tokens, or add them to the base too "
        "(tokenizer.add_tokens, and model.resize_token_embeddings where its table is too small; "
        "their rows there are untrained)."
    )


def test_refuses_renamed_tokens() -> None:
    message = refusal(words(), words([*WORDS[:-1], "<|im_end|>"]))
    assert "(differing: 2)" in message
    assert "Only 'base' speaks 1: 'mat' (id 7, which is '<|im_end|>' at 'math')\n" in message
    assert "Only 'math' speaks 1: '<|im_end|>' (id 7, which is 'mat' at 'base')\n" in message
    assert message.endswith("Fix: use members fine-tuned from one base with its tokenizer unchanged.")


def test_refuses_tokens_that_the_expert_lacks() -> None:
    message = refusal(words(), words(WORDS[:-2]), (8, 8))
    assert "(differing: 2)" in message
    assert "Only 'base' speaks 2: 'ran' (id 6), 'mat' (id 7)\n" in message
    assert "Only 'math'" not in message


@pytest.mark.parametrize(("sizes", "speaks", "cannot"), [((8, 6), "base", "math"), ((6, 8), "math", "base")])
def test_refuses_a_table_smaller_than_its_tokens(sizes: tuple[int, int], speaks: str, cannot: str) -> None:
    message = refusal(words(), words(), sizes)
    assert f"Only {speaks!r} speaks 2: 'ran' (id 6; id 6 at {cannot!r}, whose table has only 6 rows), " in message
    assert f"the tokenizer of {cannot!r} does not fit its weights" in message


def test_refuses_two_tokens_with_one_id() -> None:
    """An alias on one side only would count a row twice, or not at all."""
    alias, apart = Bare([0, 1, 1]), Bare([0, 2, 1])
    for pair in ((alias, apart), (apart, alias)):
        message = refusal(*pair)
        assert "has one id (1) for the tokens 't1' and 't2'" in message
        assert "no exact map" in message
        assert "Fix: " in message
    two(alias, Bare([1, 0, 0]))  # the same alias on both sides is only a permutation


def test_refuses_unknown_tokenizers_with_other_sizes() -> None:
    for base, math, unknown in (
        (words(), None, "'math'"),
        (None, words(), "'base'"),
        (None, None, "'base' and 'math'"),
    ):
        message = refusal(base, math, (8, 64))
        assert "'base' has 8 rows and that of 'math' 64" in message
        assert f"without the tokenizer of {unknown} padding looks like tokens" in message
        assert message.endswith("Fix: put its tokenizer's files next to its weights.")


def test_refuses_permuted_experts_of_an_unknown_base() -> None:
    members = [MemberTokens("base", 8, None), MemberTokens("a", 8, words()), MemberTokens("b", 8, words(WORDS[::-1]))]
    with pytest.raises(VocabularyError, match="'a' and 'b' number the same tokens differently, and without the base"):
        agree(members)


# ── what is only noted


def test_unknown_tokenizers_of_one_size() -> None:
    vocabulary = two(None, None, (64, 64), ends=((2,), (2, 5)))
    assert (vocabulary.size, vocabulary.end_ids) == (64, (2, 5))
    assert vocabulary.notes == (
        "The tokenizer of 'base' and 'math' is not known; equal ids are taken to mean equal tokens.",
        "The end tokens differ: 'base' ends with id 2, 'math' ends with id 2 and id 5; "
        "generation stops at any of them.",
        NO_TEMPLATE,
    )
    assert "The tokenizer of 'base' is not known" in two(None, words()).notes[0]


def test_tokens_beyond_every_table() -> None:
    """Gemma 3 1B: the tokenizer's last token has no row, at any member."""
    vocabulary = two(words(), words([*WORDS[:-1], "<pad>"]), (7, 7))
    assert vocabulary.size == 7
    assert vocabulary.notes[:2] == (
        "The tokenizer of 'base' has tokens beyond its table: 1, from 'mat' (id 7); "
        "no member speaks them, and a prompt must not hold them.",
        "The tokenizer of 'math' has tokens beyond its table: 1, from '<pad>' (id 7); "
        "no member speaks them, and a prompt must not hold them.",
    )


def test_end_tokens_are_translated_united_and_named() -> None:
    vocabulary = two(words(), words(WORDS[::-1]), ends=((1,), (6, 0)))  # math: </s> is 6, mat is 0
    assert vocabulary.end_ids == (1, 7)
    assert (
        "The end tokens differ: 'base' ends with '</s>' (id 1), "
        "'math' ends with '</s>' (id 1) and 'mat' (id 7); generation stops at any of them."
    ) in vocabulary.notes


def test_end_tokens_outside_the_table_are_ignored() -> None:
    vocabulary = two(words(), words(), (8, 64), ends=((), (50256, -1, 63)))
    assert vocabulary.end_ids == ()
    assert vocabulary.notes[1:3] == (
        "No member declares an end token; generation stops at its length limit.",
        "'math' declares end ids that are no ids of the composition and are ignored: [-1, 63, 50256].",
    )
    assert any("'math' ends with nothing" in note for note in two(words(), words(), ends=((1,), ())).notes)


def test_special_tokens_are_compared() -> None:
    notes = two(words(), words(eos_token="mat", pad_token="<unk>")).notes
    assert "The eos token differs ('base' '</s>', 'math' 'mat'); that of 'base' is used." in notes
    assert "The pad token differs ('base' none, 'math' '<unk>'); that of 'base' is used." in notes
    assert len(notes) == 4


def test_other_merges_are_noticed() -> None:
    base, math = byte_level("abcd"), byte_level("abcd", MERGES[::-1])
    (note,) = [n for n in two(base, math, (300, 300)).notes if "splits" in n]
    assert note.startswith("'math' splits ")
    assert "('abcd' into ['a', 'bc', 'd'], 'base' into ['ab', 'c', 'd'])" in note
    assert note.endswith("prompts are split as 'base' splits them.")


def test_other_normalizer_and_pre_tokenizer_are_noticed() -> None:
    lower, spaces = byte_level(), byte_level()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    spaces.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for other in (lower, spaces):
        assert any(note.startswith("'math' splits ") for note in two(byte_level(), other, (300, 300)).notes)


def test_added_bos_is_noticed() -> None:
    math = words()
    math.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    assert "'math' adds ['<s>'] to a prompt, 'base' []; 'base' is followed." in two(words(), math).notes


def test_tokenizers_that_cannot_split_are_compared_by_their_tokens() -> None:
    core = Tokenizer(models.WordLevel({"cat": 0, "dog": 1}))  # raises on any other word
    strict = PreTrainedTokenizerFast(tokenizer_object=core)
    assert two(strict, strict, (2, 2)).size == 2


def test_chat_template_is_the_bases_or_the_first_experts() -> None:
    def members(**templates: str | dict[str, str] | None) -> list[MemberTokens]:
        found = [MemberTokens(name, 8, words()) for name in templates]
        for member, template in zip(found, templates.values(), strict=True):
            member.tokenizer.chat_template = template
        return found

    for templates, chosen, note in (
        ({"base": None, "a": None}, None, NO_TEMPLATE),
        ({"base": "B", "a": "B", "b": None}, "B", "The chat template is that of 'base'."),
        ({"base": "B", "a": "A"}, "B", "The chat template is that of 'base'; not used: that of 'a'."),
        (
            {"base": None, "a": "A", "b": "B"},
            "A",
            "The chat template is that of 'a'; not used: that of 'b'.",
        ),
        ({"base": {"default": "B", "tool_use": "T"}, "a": "B"}, "B", "The chat template is that of 'base'."),
        ({"base": {"rag": "R"}, "a": "A"}, "A", "The chat template is that of 'a'."),
    ):
        vocabulary = agree(members(**templates))
        assert (vocabulary.chat_template, vocabulary.notes[-1]) == (chosen, note)
