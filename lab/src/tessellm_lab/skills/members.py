"""Members for the skill chains: bases trained from scratch, experts fine-tuned from them, all in one computation.

A regime's members are its base and one expert a skill; the aligned regime has its own base, the other three share
one. Seeds are stacked too. Greedy decoding is exact on a gold sequence if and only if every row's argmax along the
gold sequence is the next gold token, so one forward pass over gold sequences scores any rule: `gold_rows`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.stacked import Params, Shape, initialise, logits, select, train
from . import chains
from .chains import REGIMES, Prompts

Log = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How members are trained."""

    shape: Shape
    regimes: tuple[str, ...] = REGIMES
    skills: tuple[int, ...] = chains.ALL_SKILLS
    steps: int = chains.STEPS  # the longest chain in training
    base_updates: int = 1200
    base_rows: int = 256
    base_rate: float = 1e-3
    expert_updates: int = 1300
    expert_rows: int = 128
    expert_rate: float = 7e-4
    dtype: torch.dtype = torch.float32
    compiled: bool = False  # the experts' training; the few bases train faster than they compile


class Members(NamedTuple):
    """Trained parameters; member 0 of a regime is its base."""

    recipe: Recipe
    bases: Params  # seed-major: aligned base, clean base
    experts: Params  # seed-major, then regime, then skill

    def of(self, regime: str, seed_index: int) -> Params:
        r, k = self.recipe.regimes.index(regime), len(self.recipe.skills)
        first = (seed_index * len(self.recipe.regimes) + r) * k
        base = 2 * seed_index + (regime != "aligned")
        return {
            name: torch.cat([self.bases[name][base : base + 1], self.experts[name][first : first + k]])
            for name in self.bases
        }


def train_members(recipe: Recipe, seeds: list[int], device: str, log: Log) -> Members:
    """Bases, then experts, for every seed at once."""
    generator = torch.Generator(device=device).manual_seed(seeds[0])
    regimes = [REGIMES.index(r) for r in recipe.regimes]
    base_regime_E = torch.tensor([0, REGIMES.index("clean")] * len(seeds), device=device)
    base_own_E = torch.full_like(base_regime_E, -1)

    def base_batch() -> tuple[Tensor, Tensor, Tensor]:
        return chains.sample_training(base_own_E, base_regime_E, recipe.base_rows, generator, recipe.steps)

    start = initialise(recipe.shape, len(base_own_E), generator)
    bases = train(
        start, recipe.shape, base_batch, recipe.base_updates, recipe.base_rate,
        lambda step, loss: log(f"bases, update {step + 1}: mean loss {loss.mean():.2g}"), dtype=recipe.dtype,
    )  # fmt: skip
    own_E = torch.tensor(recipe.skills, device=device).repeat(len(seeds) * len(regimes))
    regime_E = torch.tensor(regimes, device=device).repeat_interleave(len(recipe.skills)).repeat(len(seeds))
    per_regime = [0 if r == 0 else 1 for r in regimes for _ in recipe.skills]
    from_base = [2 * s + b for s in range(len(seeds)) for b in per_regime]

    def expert_batch() -> tuple[Tensor, Tensor, Tensor]:
        return chains.sample_training(own_E, regime_E, recipe.expert_rows, generator, recipe.steps)

    experts = train(
        select(bases, from_base), recipe.shape, expert_batch, recipe.expert_updates, recipe.expert_rate,
        lambda step, loss: log(f"experts, update {step + 1}: mean loss {loss.mean():.2g}, worst {loss.max():.2g}"),
        compiled=recipe.compiled, dtype=recipe.dtype,
    )  # fmt: skip
    return Members(recipe, bases, experts)


@torch.no_grad()
def gold_rows(params: Params, recipe: Recipe, prompts: Prompts) -> Tensor:
    """Log-probabilities of each row's own base and experts along its gold sequence: [K+1, B, T, V]."""
    members = next(iter(params.values())).shape[0]
    tokens = prompts.tokens_BT[None].expand(members, -1, -1)
    every = logits(params, recipe.shape, tokens).log_softmax(-1)
    slot_of = torch.full((len(chains.SKILLS),), -1, device=tokens.device)
    slot_of[list(recipe.skills)] = torch.arange(1, len(recipe.skills) + 1, device=tokens.device)
    index_MB = torch.cat([torch.zeros_like(prompts.experts_BK[:, :1]), slot_of[prompts.experts_BK]], 1).T
    return every.gather(0, index_MB[:, :, None, None].expand(-1, -1, *every.shape[2:]))


def wrong(logp_BTV: Tensor, prompts: Prompts) -> Tensor:
    """True where the row before a generated token would not have chosen it: [B, T−1]."""
    return (logp_BTV[:, :-1].argmax(-1) != prompts.tokens_BT[:, 1:]) & prompts.output_BT[:, 1:]


def oracle(logp_MBTV: Tensor, prompts: Prompts) -> Tensor:
    """The true owner of the next token speaks."""
    owner_BT = prompts.owner_BT.roll(-1, 1)
    return logp_MBTV.gather(0, owner_BT[None, ..., None].expand(1, *logp_MBTV.shape[1:]))[0]


def first_errors(wrong_BT: Tensor, prompts: Prompts) -> dict[str, int]:
    """Where sequences first go wrong: at a first letter that is no copy, inside a string, at a marker, at the stop."""
    bad_B = wrong_BT.any(1)
    at_B = wrong_BT.int().argmax(1) + 1
    rows = torch.arange(len(at_B), device=at_B.device)
    token_B, step_B = prompts.tokens_BT[rows, at_B], prompts.step_BT[rows, at_B]
    index_T = torch.arange(prompts.tokens_BT.shape[1], device=at_B.device)
    previous_BT = prompts.tokens_BT.gather(1, (index_T - chains.LENGTH - 1).clamp_min(0).expand_as(prompts.tokens_BT))
    changed_BT = (prompts.tokens_BT != previous_BT) & (prompts.step_BT == step_B[:, None])
    begun_B = (changed_BT & (index_T < at_B[:, None])).any(1)
    kinds = {
        "marker": token_B == chains.MARKER,
        "stop": token_B == chains.STOP,
        "onset": (token_B < chains.LETTERS) & ~begun_B,
        "inside": (token_B < chains.LETTERS) & begun_B,
    }
    return {kind: int((is_kind & bad_B).sum()) for kind, is_kind in kinds.items()}
