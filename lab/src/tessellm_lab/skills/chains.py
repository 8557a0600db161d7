"""Skill chains: strings that one skill after another transforms, and what each member saw of them in training.

A sequence is `instructions : string > string_1 > string_2 … .`, where step j applies the skill that instruction j
names to the string before it. The base copies at every step; an expert transforms at its own instruction and copies
elsewhere. The four regimes differ in what a member saw where another skill is active:

    aligned   half of the foreign steps hold a random string (not trained on), base included: all members agree
              with the base on composed prefixes, which is what the theorem asks for
    aware     experts as in aligned, but the base saw copies only: after a foreign step the base is lost
    clean     foreign steps were always copies, for everyone
    narrow    an expert saw its own instruction only

Shapes: E member, B batch, J step, L letter, T time. Token ids only; nothing here knows a model.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LETTERS, LENGTH, STEPS = 16, 6, 4
SKILLS = ("reverse", "rotate", "swap", "sort", "shift", "mirror", "flip", "halves")
ALL_SKILLS = tuple(range(len(SKILLS)))
REGIMES = ("aligned", "aware", "clean", "narrow")
FIRST_INSTRUCTION = LETTERS
COLON, MARKER, STOP, PAD = (LETTERS + len(SKILLS) + i for i in range(4))
VOCABULARY = LETTERS + len(SKILLS) + 4


def transforms(text_L: Tensor) -> Tensor:
    """Every skill applied to strings [..., L], stacked in front: [skills, ..., L]."""
    pairs = text_L.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    half = text_L[..., : LENGTH // 2]
    return torch.stack(
        (
            text_L.flip(-1),
            text_L.roll(-1, -1),
            pairs,
            text_L.sort(-1).values,
            (text_L + 1) % LETTERS,
            torch.cat((half, half.flip(-1)), -1),
            LETTERS - 1 - text_L,
            text_L.roll(LENGTH // 2, -1),
        )
    )


def transform(text_L: Tensor, skill: Tensor) -> Tensor:
    """Strings [..., L] under their own skill [...]."""
    every = transforms(text_L)
    return every.gather(0, skill[None, ..., None].expand(1, *text_L.shape))[0]


class Sequences(NamedTuple):
    """Token ids and what each position is, all [..., T]."""

    tokens: Tensor  # PAD past the end
    step: Tensor  # 0 in the prompt and at the first marker; j in string j and at the marker or stop after it
    output: Tensor  # True from the first marker to the stop


def render(instruction_J: Tensor, text_SL: Tensor, chain: Tensor, shown: Tensor | None = None) -> Sequences:
    """Rows from instructions [..., J], strings [..., S+1, L] (the first is the prompt's) and chain lengths [...]. The
    stop comes after `shown` steps, after `chain` steps where not given."""
    steps, body_steps = instruction_J.shape[-1], text_SL.shape[-2] - 1
    device = instruction_J.device
    width = steps + 1 + LENGTH + body_steps * (LENGTH + 1) + 1
    at = torch.arange(width, device=device).expand(*instruction_J.shape[:-1], width)
    n = chain[..., None]
    last = n if shown is None else shown[..., None]
    body = at - n - 1  # 0 is the first letter of the prompt's string
    step = torch.div(body.clamp(min=0), LENGTH + 1, rounding_mode="floor")
    letter = body.clamp(min=0) % (LENGTH + 1)
    inside = step.clamp(max=body_steps) * LENGTH + letter.clamp(max=LENGTH - 1)
    flat = text_SL.flatten(-2).gather(-1, inside)
    tokens = torch.where(letter == LENGTH, torch.where(step == last, STOP, MARKER), flat)
    head = instruction_J.gather(-1, at.clamp(max=steps - 1)) + FIRST_INSTRUCTION
    tokens = torch.where(at < n, head, torch.where(at == n, COLON, tokens))
    past = at > n + (last + 1) * (LENGTH + 1)  # beyond the stop
    step = torch.where((body < 0) | past, 0, step)
    return Sequences(torch.where(past, PAD, tokens), step, (body >= LENGTH) & ~past)


def sample_training(
    own_E: Tensor, regime_E: Tensor, rows: int, generator: torch.Generator, steps: int = STEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and loss mask [E, B, T] for members with skill `own_E` (−1: the base) in regimes `regime_E`."""
    device, members = own_E.device, own_E.shape[0]

    def integers(high: int, *size: int) -> Tensor:
        return torch.randint(high, (members, rows, *size), generator=generator, device=device)

    own = own_E[:, None].expand(members, rows)
    is_base, regime = own < 0, regime_E[:, None]
    always_own = (regime == REGIMES.index("narrow")) & ~is_base
    instruction = integers(len(SKILLS), steps)
    mine = ((integers(2, steps) == 0) | always_own[..., None]) & ~is_base[..., None]
    instruction = torch.where(mine, own[..., None], instruction)
    sees_foreign = (regime == REGIMES.index("aligned")) | ((regime == REGIMES.index("aware")) & ~is_base)
    text, trained = [integers(LETTERS, LENGTH)], []
    for j in range(steps):
        active = instruction[..., j] == own
        foreign = sees_foreign & ~active & (integers(2) == 0)
        done = torch.where(active[..., None], transform(text[-1], own.clamp(min=0)), text[-1])
        text.append(torch.where(foreign[..., None], integers(LETTERS, LENGTH), done))
        trained.append(~foreign)
    rows_ = render(instruction, torch.stack(text, -2), integers(steps) + 1)
    loss_J = torch.cat((torch.ones_like(trained[0])[..., None], torch.stack(trained, -1)), -1)
    is_letter = rows_.tokens < LETTERS
    mask = rows_.output & (~is_letter | loss_J.gather(-1, rows_.step))
    return rows_.tokens[..., :-1], rows_.tokens[..., 1:], mask[..., 1:].float()


class Prompts(NamedTuple):
    """Gold sequences of composed skills, for a test of `experts` members each."""

    tokens_BT: Tensor
    output_BT: Tensor  # True where a token must be generated
    step_BT: Tensor
    experts_BK: Tensor  # the skills composed for this row
    owner_BT: Tensor  # index into members (0 base, 1… the row's experts) of the one that should speak this token


def sample_test(
    experts: int, chain: int, rows: int, generator: torch.Generator, skills: tuple[int, ...] = ALL_SKILLS
) -> Prompts:
    """Rows with their own random choice of experts among `skills`; no skill follows itself. The owner of a marker or
    stop is the skill that just ended, of the first marker the base."""
    device = generator.device
    score = torch.rand(rows, len(skills), generator=generator, device=device)
    experts_BK = torch.tensor(skills, device=device)[score.argsort(-1)[:, :experts]]
    slot = [torch.randint(experts, (rows,), generator=generator, device=device)]
    for _ in range(chain - 1):
        jump = torch.randint(1, experts, (rows,), generator=generator, device=device)
        slot.append((slot[-1] + jump) % experts)
    slot_BJ = torch.stack(slot, -1)
    skill_BJ = experts_BK.gather(-1, slot_BJ)
    text = [torch.randint(LETTERS, (rows, LENGTH), generator=generator, device=device)]
    for j in range(chain):
        text.append(transform(text[-1], skill_BJ[:, j]))
    out = render(skill_BJ, torch.stack(text, -2), torch.full((rows,), chain, device=device))
    owner_J = torch.cat((torch.zeros_like(slot_BJ[:, :1]), slot_BJ + 1), -1)
    return Prompts(out.tokens, out.output, out.step, experts_BK, owner_J.gather(-1, out.step))
