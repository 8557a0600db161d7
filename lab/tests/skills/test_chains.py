"""Skill chains: what the skills do, what each regime trains on, and who owns which token."""

import torch

from tessellm_lab.skills import chains
from tessellm_lab.skills.chains import COLON, MARKER, REGIMES, SKILLS, STOP


def test_every_skill_on_one_string():
    made = chains.transforms(torch.tensor([3, 1, 4, 15, 9, 2])).tolist()
    assert dict(zip(SKILLS, made, strict=True)) == {
        "reverse": [2, 9, 15, 4, 1, 3],
        "rotate": [1, 4, 15, 9, 2, 3],
        "swap": [1, 3, 15, 4, 2, 9],
        "sort": [1, 2, 3, 4, 9, 15],
        "shift": [4, 2, 5, 0, 10, 3],
        "mirror": [3, 1, 4, 4, 1, 3],
        "flip": [12, 14, 11, 0, 6, 13],
        "halves": [15, 9, 2, 3, 1, 4],
    }


def test_a_gold_sequence_reads_as_described():
    prompts = chains.sample_test(4, 2, 50, torch.Generator().manual_seed(0))
    for row, experts, owner in zip(prompts.tokens_BT, prompts.experts_BK, prompts.owner_BT, strict=True):
        first, second = (row[:2] - chains.FIRST_INSTRUCTION).tolist()
        strings = [row[3:9], row[10:16], row[17:23]]
        assert [row[i].item() for i in (2, 9, 16, 23)] == [COLON, MARKER, MARKER, STOP]
        assert first != second
        assert torch.equal(strings[1], chains.transforms(strings[0])[first])
        assert torch.equal(strings[2], chains.transforms(strings[1])[second])
        assert experts[owner[10] - 1] == first
        assert experts[owner[23] - 1] == second
        assert owner[9] == 0


def trained_letters(regime: str, own: int) -> tuple[float, float]:
    """Shares of letters that are trained on, and of strings that copy the one before, in chains of one member."""
    member = torch.tensor([own]), torch.tensor([REGIMES.index(regime)])
    inputs, targets, mask = chains.sample_training(*member, 400, torch.Generator().manual_seed(1))
    tokens = torch.cat([inputs[..., :1], targets], -1)[0]
    letters = (tokens[:, 8:] < chains.LETTERS) & (mask[0, :, 7:].cumsum(-1) > 0)
    copies = tokens[:, 8:] == tokens[:, 1:-7]
    return mask[0, :, 7:][letters].mean().item(), copies[letters].float().mean().item()


def test_regimes_differ_in_foreign_steps():
    assert trained_letters("clean", own=-1) == (1.0, 1.0)
    assert trained_letters("aware", own=-1) == (1.0, 1.0)  # the base of aware saw copies only
    aligned, _ = trained_letters("aligned", own=-1)
    assert 0.4 < aligned < 0.65  # half of the base's own steps are foreign, and no letter of them is trained on
    _, copies = trained_letters("narrow", own=4)
    assert copies == 0.0  # shift changes every letter, and narrow never idles
