"""Vocabulary agreement: exact alignment, complete refusals, honest notes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from tessellm.errors import TessellmError, VocabularyError
from tessellm.vocabulary import Speaker, Vocabulary, agree

WORDS = ["<s>", "</s>", "<unk>", "cat", "dog", "sat", "ran", "mat"]
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NO_TEMPLATE = "No member has a chat template."
MERGES = [("a", "b"), ("b", "c")]


def words(ids: dict[str, int] | list[str] = WORDS, **special: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with these ids, or with the words in order."""
    vocab = ids if isinstance(ids, dict) else {word: i for i, word in enumerate(ids)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, **{**ENDS, **special})


def byte_level(order: str = "", merges: list[tuple[str, str]] = MERGES) -> PreTrainedTokenizerFast:
    """Byte-level BPE; the letters of `order` take the first ids."""
    alphabet = list(order) + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(order))
    pieces = [*alphabet, "ab", "bc", "<|endoftext|>"]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def unigram(pieces: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.Unigram([(p, -float(len(pieces) - len(p))) for p in pieces], unk_id=0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def two(
    base: object,
    math: object,
    sizes: tuple[int, int] = (8, 8),
    ends: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> Vocabulary:
    return agree([Speaker("base", sizes[0], base, ends[0]), Speaker("math", sizes[1], math, ends[1])])


def refusal(base: object, math: object, sizes: tuple[int, int] = (8, 8)) -> str:
    with pytest.raises(VocabularyError) as caught:
        two(base, math, sizes)
    assert isinstance(caught.value, TessellmError)
    return str(caught.value)


def meaning(vocabulary: Vocabulary, speakers: list[Speaker]) -> list[dict[int, str]]:
    """What each member takes every composed id to be: the real tokens only."""
    read = []
    for s in speakers:
        text = {i: t for t, i in s.tokens.items()}
        own = vocabulary.alignments[s.name].to_member(torch.arange(vocabulary.size)).tolist()
        read.append({v: text[i] for v, i in enumerate(own) if i in text})
    return read


# ── the same ids


def test_same_tokens_and_tables_need_nothing() -> None:
    vocabulary = two(words(), words(), ends=((1,), (1,)))
    logits, tokens = torch.randn(2, 3, 8), torch.randint(8, (2, 3))
    for alignment in vocabulary.alignments.values():
        assert alignment.member_id_V is None
        assert alignment.to_member(tokens) is tokens
        assert alignment.to_composed(logits).data_ptr() == logits.data_ptr()
        assert torch.equal(alignment.to_composed(logits), logits)
    assert (vocabulary.size, vocabulary.end_ids) == (8, (1,))
    assert vocabulary.notes == ("Every member ends with '</s>' (id 1).", NO_TEMPLATE)


def test_base_alone() -> None:
    vocabulary = agree([Speaker("base", 10, words(), (1,))])
    assert (vocabulary.size, set(vocabulary.alignments)) == (10, {"base"})


@pytest.mark.parametrize("sizes", [(8, 64), (64, 8), (16, 64), (64, 9)])
def test_padded_tables_are_cut_to_the_smallest(sizes: tuple[int, int]) -> None:
    vocabulary = two(words(), words(), sizes)
    assert vocabulary.size == min(sizes)
    for name, size in zip(("base", "math"), sizes, strict=True):
        logits = torch.randn(2, size)
        composed = vocabulary.alignments[name].to_composed(logits)
        assert torch.equal(composed, logits[:, : min(sizes)])
        assert torch.allclose(composed.log_softmax(-1).exp().sum(-1), torch.ones(2))
    assert vocabulary.notes[0] == (
        f"Tables of different sizes hold the same tokens ('base' {sizes[0]}, 'math' {sizes[1]}); "
        f"the composition has {min(sizes)} ids."
    )


def test_holes_in_the_ids_stay_where_they_are() -> None:
    holed = {word: 3 * i for i, word in enumerate(WORDS)}  # last id 21
    vocabulary = two(words(holed), words(holed), (22, 64))
    assert (vocabulary.size, vocabulary.alignments["math"].member_id_V) == (22, None)


# ── permuted ids


@st.composite
def permuted(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Two placements of the same tokens in two tables, with padding and holes."""
    n = draw(st.integers(1, 12))
    sizes = draw(st.integers(n, n + 8)), draw(st.integers(n, n + 8))
    base_ids, member_ids = (draw(st.permutations(range(size)))[:n] for size in sizes)
    return base_ids, member_ids, *sizes


class Bare:
    """A tokenizer reduced to its map, so that hypothesis can try many."""

    bos_token = eos_token = pad_token = unk_token = chat_template = None

    def __init__(self, ids: list[int]) -> None:
        self.ids = {f"t{n}": i for n, i in enumerate(ids)}

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens)


@given(permuted())
def test_alignment_is_exact(case: tuple[list[int], list[int], int, int]) -> None:
    base_ids, member_ids, base_size, member_size = case
    speakers = [Speaker("base", base_size, Bare(base_ids)), Speaker("math", member_size, Bare(member_ids))]
    vocabulary = agree(speakers)
    assert max(base_ids) < vocabulary.size <= base_size

    for ids, speaker in zip((base_ids, member_ids), speakers, strict=True):
        alignment = vocabulary.alignments[speaker.name]
        # token by token: input ids and logits, whatever the paddings
        composed_N, own_N = torch.tensor(base_ids), torch.tensor(ids)
        logits = torch.randn(2, speaker.table_size)
        columns = alignment.to_composed(logits)
        assert torch.equal(alignment.to_member(composed_N), own_N)
        assert torch.equal(columns[:, composed_N], logits[:, own_N])
        assert columns.shape == (2, vocabulary.size)
        # what is no token is no token at the member either, and no row is used twice
        silent = set() if alignment.silent_U is None else set(alignment.silent_U.tolist())
        assert silent.isdisjoint(base_ids)
        heard = torch.tensor([v for v in range(vocabulary.size) if v not in silent])
        own = alignment.to_member(heard)
        assert len(own.unique()) == len(own)
        assert {i for v, i in zip(heard.tolist(), own.tolist(), strict=True) if v not in base_ids}.isdisjoint(ids)
        assert torch.equal(columns[:, heard], logits[:, own])
        assert all(torch.isneginf(columns[:, v]).all() for v in silent)
    assert bool(silent) == (vocabulary.size > member_size)  # only for want of rows


@given(st.permutations(range(20)))
def test_permutation_inverts(order: list[int]) -> None:
    vocabulary = agree([Speaker("base", 20, Bare(list(range(20)))), Speaker("math", 20, Bare(order))])
    alignment, base_logits, tokens = (
        vocabulary.alignments["math"],
        torch.randn(3, 20),
        torch.randint(20, (3, 7)),
    )
    member_logits = torch.empty(3, 20)
    member_logits[:, torch.tensor(order)] = base_logits
    inverse = torch.tensor(order).argsort()
    assert torch.equal(alignment.to_composed(member_logits), base_logits)
    assert torch.equal(inverse[alignment.to_member(tokens)], tokens)
    assert torch.equal(alignment.to_member(inverse[tokens]), tokens)


def test_permuted_ids_are_reported() -> None:
    swapped = ["<s>", "</s>", "<unk>", "dog", "cat", "sat", "ran", "mat"]
    vocabulary = two(words(), words(swapped))
    assert vocabulary.notes[0] == (
        "'math' numbers tokens differently: 2, from 'cat' (3 at 'base', 4 at 'math'); its ids are translated exactly."
    )
    assert not [note for note in vocabulary.notes if "splits" in note]


def test_ids_without_a_row_are_silent_for_everyone() -> None:
    holed = {word: 2 * i for i, word in enumerate(WORDS)}  # needs 15 rows, 7 of them holes
    vocabulary = two(words(holed), words(), (16, 10), ends=((2, 3), (0, 1)))
    assert vocabulary.size == 15
    for name, size in (("base", 16), ("math", 10)):
        composed = vocabulary.alignments[name].to_composed(torch.zeros(1, size))[0]
        assert composed.isneginf().sum() == 15 - 10
        assert not composed[torch.tensor(list(holed.values()))].isneginf().any()
    assert "Ids that are no token and have no row at some member are never generated: 5." in vocabulary.notes
    assert vocabulary.end_ids == (0, 2)  # 3 is silent; math's <s> is row 0, which the silent ids also read
    assert "'base' declares end ids that are no ids of the composition and are ignored: [3]." in vocabulary.notes


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "sentencepiece"])
def test_kinds_of_tokenizer(kind: str, tmp_path: Path) -> None:
    if kind == "byte-level":
        base, math = byte_level(), byte_level("zyx")
    elif kind == "unigram":
        base, math = unigram(["<unk>", "▁", "a", "b", "▁ab"]), unigram(["<unk>", "▁ab", "b", "a", "▁"])
    else:
        base, math = sentencepiece(tmp_path, 0), sentencepiece(tmp_path, 1)
    size = len(base.get_vocab())
    speakers = [Speaker("base", size, base), Speaker("math", size + 3, math)]
    vocabulary = agree(speakers)
    read = meaning(vocabulary, speakers)
    assert vocabulary.alignments["math"].member_id_V is not None
    assert read[0] == read[1] == {i: t for t, i in base.get_vocab().items()}
    assert not [note for note in vocabulary.notes if "splits" in note or "adds" in note]


def sentencepiece(folder: Path, unknown_id: int) -> SentencePieceBackend:
    spm = pytest.importorskip("sentencepiece")
    text, prefix = folder / "text.txt", folder / f"model{unknown_id}"
    text.write_text("the cat sat on the mat\nthe dog ran to the cat\n" * 20)
    spm.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(prefix), vocab_size=24, hard_vocab_limit=False, num_threads=1,
        unk_id=unknown_id, bos_id=1 - unknown_id, eos_id=2, minloglevel=2,
    )  # fmt: skip
    return SentencePieceBackend(vocab_file=f"{prefix}.model", **ENDS)


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
    speakers = [Speaker("base", 8, None), Speaker("a", 8, words()), Speaker("b", 8, words(WORDS[::-1]))]
    with pytest.raises(VocabularyError, match="'a' and 'b' number the same tokens differently, and without the base"):
        agree(speakers)


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
    def speakers(**templates: str | dict[str, str] | None) -> list[Speaker]:
        found = [Speaker(name, 8, words()) for name in templates]
        for speaker, template in zip(found, templates.values(), strict=True):
            speaker.tokenizer.chat_template = template
        return found

    for templates, chosen, note in (
        ({"base": None, "a": None}, None, NO_TEMPLATE),
        ({"base": "B", "a": "B", "b": None}, "B", "The chat template is that of 'base'."),
        ({"base": "B", "a": "A"}, "B", "The chat template is that of 'base'; 'a' would use another."),
        ({"base": None, "a": "A", "b": "B"}, "A", "The chat template is that of 'a'; 'b' would use another."),
        ({"base": {"default": "B", "tool_use": "T"}, "a": "B"}, "B", "The chat template is that of 'base'."),
        ({"base": {"rag": "R"}, "a": "A"}, "A", "The chat template is that of 'a'."),
    ):
        vocabulary = agree(speakers(**templates))
        assert (vocabulary.chat_template, vocabulary.notes[-1]) == (chosen, note)


# ── running


def test_made_while_a_model_is_built_on_meta() -> None:
    with torch.device("meta"):
        vocabulary = two(words(), words(WORDS[::-1]), ends=((1,), (1,)))
    assert vocabulary.end_ids == (1, 6)
    assert vocabulary.alignments["math"].to_member(torch.arange(8)).tolist() == list(range(8))[::-1]


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: where the maps must be copied to
def test_a_map_copied_while_generating_serves_a_backward_pass(device: str) -> None:
    alignment = two(words(), words(WORDS[::-1])).alignments["math"]
    with torch.inference_mode():
        alignment.to_composed(torch.zeros(1, 8, device=device))
    logits = torch.zeros(1, 8, requires_grad=True, device=device, dtype=torch.bfloat16)
    composed = alignment.to_composed(logits)
    composed[0, 3].backward()
    assert (composed.dtype, composed.device.type) == (torch.bfloat16, device)
    if device == "cpu":
        assert logits.grad[0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def test_a_large_vocabulary_is_quick() -> None:
    size = 256_000
    ids = [f"token{n}" for n in range(size - 3)]
    base, math = words([*WORDS[:3], *ids]), words([*ids, *WORDS[:3]])
    began = time.process_time()
    vocabulary = two(base, math, (size, size + 64))
    assert time.process_time() - began < 3  # two members, seconds of CPU; about 1 on an idle core
    assert vocabulary.alignments["math"].to_member(torch.tensor([0, 3])).tolist() == [size - 3, 0]
