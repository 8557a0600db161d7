"""Vocabulary agreement: exact alignment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from tessellm.vocabulary import MemberTokens, agree

from vocabularies import ENDS, NO_TEMPLATE, WORDS, Bare, byte_level, meaning, two, unigram, words

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
    vocabulary = agree([MemberTokens("base", 10, words(), (1,))])
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


@given(permuted())
def test_alignment_is_exact(case: tuple[list[int], list[int], int, int]) -> None:
    base_ids, member_ids, base_size, member_size = case
    members = [MemberTokens("base", base_size, Bare(base_ids)), MemberTokens("math", member_size, Bare(member_ids))]
    vocabulary = agree(members)
    assert max(base_ids) < vocabulary.size <= base_size

    for ids, member in zip((base_ids, member_ids), members, strict=True):
        alignment = vocabulary.alignments[member.name]
        # token by token: input ids and logits, whatever the paddings
        composed_N, own_N = torch.tensor(base_ids), torch.tensor(ids)
        logits = torch.randn(2, member.table_size)
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
    vocabulary = agree([MemberTokens("base", 20, Bare(list(range(20)))), MemberTokens("math", 20, Bare(order))])
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
    members = [MemberTokens("base", size, base), MemberTokens("math", size + 3, math)]
    vocabulary = agree(members)
    read = meaning(vocabulary, members)
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
