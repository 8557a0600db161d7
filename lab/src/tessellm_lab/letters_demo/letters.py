"""Small letter models: a base that copies a string, and experts that copy it with some letters replaced.

The truly autoregressive form: the prompt is ``STRING>``, the model writes the transformed string and stops.
Members are Llama models with a character tokenizer; an expert is fine-tuned from the base. Everything is
deterministic in the seed. This module knows nothing of composition.

Shapes: B strings, N letters of a string, T tokens of a whole line, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..common.threads import one_thread

ALPHABET = " ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PAD, BOS, EOS, UNK, END_OF_PROMPT = "<pad>", "<bos>", "<eos>", "<unk>", ">"
VOCABULARY = {token: i for i, token in enumerate((PAD, BOS, EOS, UNK, END_OF_PROMPT, *ALPHABET))}
FIRST_LETTER = VOCABULARY[ALPHABET[0]]
HELD_OUT_MODULUS = 7
NO_LOSS = -100

Progress = Callable[[int, float], None]
"""Called after every step with the number of steps done and the loss."""


@dataclass(frozen=True)
class LetterSettings:
    """Sizes and lengths of training. The defaults reach exact copies in half a minute on two cores."""

    max_length: int = 12
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch: int = 32
    base_steps: int = 2000
    base_rate: float = 4e-3
    expert_steps: int = 300
    expert_rate: float = 1e-3
    # Share of an expert's training letters that are drawn from those that it replaces.
    favoured: float = 0.2
    # Half of the strings have up to this share of the letters they have written so far exchanged for random ones.
    # A member then reads its prompt rather than its own past, and agrees with the base after another's letters.
    exchanged: float = 1.0
    # Label smoothing: members agree about the tokens that nobody means, whose ratios to the base multiply in Eq. 2.
    smoothing: float = 0.01
    # The shortest string of training.
    min_length: int = 1


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; lower case is read as upper case; decoding adds no spaces."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(letter.lower(), letter) for letter in ALPHABET.strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, VOCABULARY[BOS])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def transform(string: str, replacements: Mapping[str, str]) -> str:
    """Replaces letters, all at once: {A→K, K→A} swaps them."""
    return "".join(replacements.get(letter, letter) for letter in string)


def sample_strings(
    count: int,
    seed: int,
    *,
    min_length: int = 1,
    max_length: int = LetterSettings.max_length,
    favoured: str = "",
    share: float = 0.0,
) -> list[str]:
    """Random strings that no training saw: those whose letters sum to 0 modulo 7 are never trained on."""
    generator = torch.Generator().manual_seed(seed)
    letters_BN = _sample(count, (min_length, max_length), generator, favoured, share, held_out=True)
    return ["".join(ALPHABET[i] for i in row if i >= 0) for row in letters_BN.tolist()]


def train_base(
    seed: int = 0, settings: LetterSettings | None = None, progress: Progress | None = None, device: str = "cpu"
) -> LlamaForCausalLM:
    """A model from scratch that copies its prompt."""
    settings = settings or LetterSettings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_model_config(settings))
    return _train(model.to(device), {}, seed, settings, settings.base_steps, settings.base_rate, progress)  # type: ignore[arg-type]


def fine_tune(
    base: LlamaForCausalLM,
    replacements: Mapping[str, str],
    seed: int = 0,
    settings: LetterSettings | None = None,
    progress: Progress | None = None,
) -> LlamaForCausalLM:
    """A copy of the base, trained on to replace letters. The base stays as it is."""
    settings = settings or LetterSettings()
    model = copy.deepcopy(base)
    return _train(model, replacements, seed, settings, settings.expert_steps, settings.expert_rate, progress)


def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], batch: int = 500
) -> list[str]:
    """What the model writes after ``STRING>``, greedily; an answer that did not stop ends in '…'."""
    answers: list[str] = []
    for start in range(0, len(strings), batch):
        chunk = strings[start : start + batch]
        prompts: Any = tokenizer([s + END_OF_PROMPT for s in chunk], return_tensors="pt", padding=True)
        tokens_BT = model.generate(  # type: ignore[operator]
            input_ids=prompts.input_ids,
            attention_mask=prompts.attention_mask,
            max_new_tokens=max(map(len, chunk)) + 1,
            do_sample=False,
        )
        for text in tokenizer.batch_decode(tokens_BT[:, prompts.input_ids.shape[1] :]):
            answer, end, _ = text.partition(EOS)
            answers.append(answer if end else answer + "…")
    return answers


def accuracy(answers: Sequence[str], strings: Sequence[str], replacements: Mapping[str, str]) -> float:
    """The share of strings whose whole answer is right, the stop included."""
    right = sum(a == transform(s, replacements) for a, s in zip(answers, strings, strict=True))
    return right / len(strings)


def _model_config(settings: LetterSettings) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=settings.width,
        intermediate_size=2 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=max(256, 2 * settings.max_length + 3),
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        pad_token_id=VOCABULARY[PAD],
        bos_token_id=VOCABULARY[BOS],
        eos_token_id=VOCABULARY[EOS],
    )


@one_thread()
def _train(
    model: LlamaForCausalLM,
    replacements: Mapping[str, str],
    seed: int,
    settings: LetterSettings,
    steps: int,
    rate: float,
    progress: Progress | None,
) -> LlamaForCausalLM:
    generator = torch.Generator().manual_seed(seed)
    favoured, share = "".join(replacements), settings.favoured
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_up_cosine(step, steps))
    model.train()
    for step in range(1, steps + 1):
        letters_BN = _sample(settings.batch, (settings.min_length, settings.max_length), generator, favoured, share)
        tokens_BT, labels_BT = _lines(letters_BN, replacements, settings.exchanged, generator)
        tokens_BT, labels_BT = tokens_BT.to(model.device), labels_BT.to(model.device)
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        loss = cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1),
            labels_BT[:, 1:].flatten(),
            ignore_index=NO_LOSS,
            label_smoothing=settings.smoothing,
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress:
            progress(step, loss.item())
    return model.eval()


def _warm_up_cosine(step: int, steps: int, warm_up: int = 50) -> float:
    return min(1.0, (step + 1) / warm_up) * (0.51 + 0.49 * math.cos(math.pi * step / steps))


def _sample(
    count: int,
    lengths: tuple[int, int],
    generator: torch.Generator,
    favoured: str = "",
    share: float = 0.0,
    held_out: bool = False,
) -> Tensor:
    """Letters as indices of the alphabet, −1 after the end; of the held-out strings or of all others."""
    shortest, longest = lengths
    lengths_B1 = torch.randint(shortest, longest + 1, (count, 1), generator=generator)
    letters_BN = torch.randint(len(ALPHABET), (count, longest), generator=generator)
    if favoured:
        choices = torch.tensor([ALPHABET.index(letter) for letter in favoured])
        chosen_BN = choices[torch.randint(len(favoured), letters_BN.shape, generator=generator)]
        letters_BN = torch.where(torch.rand(letters_BN.shape, generator=generator) < share, chosen_BN, letters_BN)
    inside_BN = torch.arange(longest) < lengths_B1
    residue_B1 = (letters_BN * inside_BN).sum(1, keepdim=True) % HELD_OUT_MODULUS
    last_B1 = letters_BN.gather(1, lengths_B1 - 1)
    if held_out:  # the residue becomes 0
        last_B1 = last_B1 - residue_B1 + HELD_OUT_MODULUS * (last_B1 < residue_B1)
    else:  # a residue of 0 becomes 1 or −1
        step_B1 = torch.where(last_B1 < len(ALPHABET) - 1, 1, -1)
        last_B1 = last_B1 + step_B1 * (residue_B1 == 0)
    return letters_BN.scatter(1, lengths_B1 - 1, last_B1).masked_fill(~inside_BN, -1)


def _lines(
    letters_BN: Tensor, replacements: Mapping[str, str], exchanged: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Lines ``<bos>STRING>ANSWER<eos>``, padded on the right, and their labels: the answer and its end."""
    B, N = letters_BN.shape
    n_B1 = (letters_BN >= 0).sum(1, keepdim=True)
    t_BT = torch.arange(2 * N + 3).expand(B, -1)
    string_BT = (letters_BN + FIRST_LETTER).gather(1, (t_BT - 1).clamp(0, N - 1))
    answer_BN = _replacement_table(replacements)[letters_BN + FIRST_LETTER]
    answer_BT = answer_BN.gather(1, (t_BT - n_B1 - 2).clamp(0, N - 1))
    answering_BT = (t_BT > n_B1 + 1) & (t_BT < 2 * n_B1 + 2)

    tokens_BT = torch.full_like(t_BT, VOCABULARY[PAD])
    tokens_BT = torch.where(t_BT == 2 * n_B1 + 2, VOCABULARY[EOS], tokens_BT)
    tokens_BT = torch.where(answering_BT, answer_BT, tokens_BT)
    tokens_BT = torch.where(t_BT == n_B1 + 1, VOCABULARY[END_OF_PROMPT], tokens_BT)
    tokens_BT = torch.where(t_BT <= n_B1, string_BT, tokens_BT)
    tokens_BT = torch.where(t_BT == 0, VOCABULARY[BOS], tokens_BT)
    labels_BT = torch.where((t_BT > n_B1 + 1) & (t_BT <= 2 * n_B1 + 2), tokens_BT, NO_LOSS)

    share_B1 = exchanged * torch.rand(B, 1, generator=generator) * (torch.rand(B, 1, generator=generator) < 0.5)
    exchange_BT = answering_BT & (torch.rand(t_BT.shape, generator=generator) < share_B1)
    random_BT = FIRST_LETTER + torch.randint(len(ALPHABET), t_BT.shape, generator=generator)
    return torch.where(exchange_BT, random_BT, tokens_BT), labels_BT


def _replacement_table(replacements: Mapping[str, str]) -> Tensor:
    table_V = torch.arange(len(VOCABULARY))
    for letter, other in replacements.items():
        table_V[VOCABULARY[letter]] = VOCABULARY[other]
    return table_V
