"""Tokenizers of which a token may be less than a character: of bytes, and of pieces with bytes for all else."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tessellm.text.stream import byte_letters


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte, and some merged ones: half of an emoji, and a letter with its accent's first byte."""
    letters = {byte: letter for letter, byte in byte_letters().items()}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    merged = ["".join(letters[byte] for byte in part) for part in ("🙂".encode()[:2], b"th", "é".encode(), b" the")]
    vocabulary |= {text: 256 + n for n, text in enumerate(merged)}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Words that begin with a mark for their space, and bytes for all else, as in Llama 2 and Gemma."""
    pieces = ["▁the", "▁", "▁a", "cat", "s", "▁é", "\n", "<unk>"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {piece: 256 + n for n, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
