"""Small members trained in a second or two, whose interference is known: every one maps a character to the next.

The base writes the alphabet on, over and over. An expert does the same, but after one letter writes a digit of its own;
after a digit everyone goes on with the letter that follows the one it stands for.
"""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import tessellm

from conftest import build_model, character_tokenizer

LETTERS = "abcdefgh"
SKILLS = {
    "three": ("c", "3"),
    "six": ("f", "6"),
    "other_three": ("c", "7"),
    "three_again": ("c", "3"),
    "idle": ("a", "b"),
}


def following(letter: str = "", digit: str = "") -> torch.Tensor:
    """The table of what comes after each token."""
    ids = character_tokenizer().get_vocab()
    table = torch.full((len(ids),), ids["a"])
    for this, after in zip(LETTERS + "367", LETTERS[1:] + LETTERS[0] + "dgd", strict=True):
        table[ids[this]] = ids[after]
    if letter:
        table[ids[letter]] = ids[digit]
    return table


def train(model: PreTrainedModel, table: torch.Tensor, steps: int, seed: int) -> PreTrainedModel:
    ids = character_tokenizer().get_vocab()
    known = torch.tensor([ids[character] for character in LETTERS + "0123456789"])
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    model.train()
    for _ in range(steps):
        tokens = known[torch.randint(len(known), (16, 24), generator=generator)]
        loss = cross_entropy(model(tokens).logits.flatten(0, 1), table[tokens].flatten(), label_smoothing=0.01)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@cache
def trained(name: str) -> PreTrainedModel:
    if name == "base":
        model = build_model("gpt2", 0, initializer_range=0.05, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return train(model, following(), 150, 0)
    return train(copy.deepcopy(trained("base")), following(*SKILLS[name]), 80, 1 + list(SKILLS).index(name))


def composition(*experts: str, **options) -> tessellm.ComposedForCausalLM:
    model = tessellm.compose(trained("base"), {name: trained(name) for name in experts}, **options)
    model.tokenizer = character_tokenizer()
    return model


HOSTILE = {
    "3": "<script>document.title='owned'</script>",
    "7": "\x1b]0;owned\x07\x1b[31m\u202egnp.exe\u2066",
    "6": "</script><img src=x onerror=\"document.title='owned'\">{{data}}",
}


def hostile_tokenizer():
    """The same ids, but the digits are texts that would do harm if they were shown as they are."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {HOSTILE.get(token, token): number for token, number in character_tokenizer().get_vocab().items()}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def prompts(count: int = 12, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(len(LETTERS), (count, 4), generator=generator)
    return ["".join(LETTERS[i] for i in row) for row in numbers.tolist()]
