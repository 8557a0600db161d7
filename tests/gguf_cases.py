"""A small Llama with its tokenizer as a GGUF file, as llama.cpp's converter would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel

from conftest import CHARACTERS, CHAT_TEMPLATE, CONTEXT, SPECIAL, build_model

BYTES = {" ": "Ġ", "\n": "Ċ"}  # how a byte-level vocabulary spells them
TOKENS = [*SPECIAL, *(BYTES.get(token, token) for token in CHARACTERS), "th"]
HEADS, KV_HEADS = 4, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def model_for(seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model with as many token rows as the file's tokenizer has tokens."""
    return build_model("llama", seed, vocab_size=len(TOKENS), **config)


def write_gguf(
    path: Path,
    model: PreTrainedModel | None = None,
    kind: str = "Q8_0",
    architecture: str = "llama",
    pad: bool = False,
    parts: int = 1,
) -> Path:
    """Write the model; its matrices are stored as `kind`. Without `pad`, no padding token is named."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    _add_tokenizer(writer, pad)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    for name, tensor in (model or model_for()).state_dict().items():
        _add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, pad: bool) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    if pad:
        writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(writer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = _interleaved(tensor, HEADS if "q_proj" in name else KV_HEADS)
    array = tensor.float().numpy()
    stored = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
    writer.add_tensor(_gguf_name(name), gguf.quantize(array, stored), raw_dtype=stored)


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The order in which llama.cpp keeps what is rotated."""
    return tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape).contiguous()


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    _, _, number, inside = stem.split(".", 3)
    return f"blk.{number}.{NAMES[inside]}.weight"
