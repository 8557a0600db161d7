"""Where a chat template's user speaks and its answers begin, whatever spaces stand around what is said."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tessellm.model.chat_marks import before_answer, before_user, common_beginning, in_chat, rendered
from tessellm.rules.chat_turns import since_user

from conftest import CHARACTERS, SPECIAL

TURNS = {
    "special tokens": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}<s>assistant\n\n",
    "words": "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}assistant:",
}


def merging_spaces(template):
    """A tokenizer that makes one token of two spaces, or of two new lines, as most do."""
    pairs = [(space, space) for space in "\n "]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS, *map("".join, pairs)])}
    core = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("answer", ["b", "b\n", "b\n\n", "b  "])
@pytest.mark.parametrize("said", ["", "c", "\nc", "\n\nc", "  c", "c\n", "c\n\n", "c  ", "\n"])
def test_turns_are_found_whatever_spaces_stand_around_what_is_said(template, answer, said):
    tokenizer = merging_spaces(template)
    turn, (user, spaces) = before_answer(tokenizer, in_chat(tokenizer)), before_user(tokenizer)
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, ("a", answer, said), strict=True)]
    (ids,) = rendered(tokenizer, [chat])
    assert ids[-len(turn) :] == turn
    window = torch.tensor([[[-1.0] * 9 + ids]])
    heard = tokenizer.decode([ids[place - 9] for place in since_user(user, window, spaces)[0, 0].nonzero().flatten()])
    assert heard.strip().startswith(said.strip())
    assert "b" not in heard


def test_turns_between_which_there_are_only_spaces_are_not_told_apart():
    tokenizer = merging_spaces("{% for m in messages %}{{ m.content }}\n\n\n{% endfor %}")
    assert before_user(tokenizer) == ([], 0)
    assert tokenizer.decode(before_answer(tokenizer, in_chat(tokenizer))).isspace()


def test_what_all_rows_begin_with():
    assert common_beginning([[1, 2, 3], [1, 2], [1, 2, 4]]) == [1, 2]
    assert common_beginning([[1], [2]]) == []
    assert common_beginning([]) == []
