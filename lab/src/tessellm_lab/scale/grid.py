"""The preference grid: imitate an expert who collects objects in a small maze, by preferences that the task sets.

A 7×7 map with walls and 19 free cells, four objects, an agent. Entering a cell collects its object for a reward of
Σ_m z_m G[m, f], f being the object's feature. The expert plans exactly: eight Bellman backups over every cell and every
set of objects already taken. Actions: stay (which ends the episode), up, right, down, left.

Shapes: E run, B episode (one a task), S step, M module, F feature, C free cell, U set of taken objects, A action.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

MAP = ("wwwwwww", "w  w  w", "w  w  w", "ww   ww", "w  w  w", "w  w  w", "wwwwwww")
MOVES = ((0, 0), (-1, 0), (0, 1), (1, 0), (0, -1))
FREE = [(row, column) for row, line in enumerate(MAP) for column, cell in enumerate(line) if cell == " "]
OBJECTS, STEPS, BACKUPS, DISCOUNT = 4, 8, 8, 0.9
SETS = 2**OBJECTS


@cache
def neighbours(device: torch.device) -> Tensor:
    """The cell that each action leads to; into a wall leads nowhere: [A, C]."""
    index = {cell: number for number, cell in enumerate(FREE)}
    to = [[index.get((r + dr, c + dc), index[r, c]) for r, c in FREE] for dr, dc in MOVES]
    return torch.tensor(to, device=device)


@cache
def places(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where on the map each free cell is [C], and where the walls are [49]."""
    place_C = torch.tensor([row * len(MAP) + column for row, column in FREE], device=device)
    return place_C, torch.tensor([float(cell == "w") for line in MAP for cell in line], device=device)


@dataclass(frozen=True)
class Episodes:
    """What an episode is: where the objects and the agent are, and which features the objects have."""

    object_cell_BK: Tensor
    feature_BK: Tensor
    agent_B: Tensor


@dataclass(frozen=True)
class PreferenceGrid:
    """One table of preferences a run."""

    preference_EMF: Tensor
    samples: int = STEPS

    @classmethod
    def random(cls, seeds: list[int], modules: int, features: int, device: torch.device | str) -> PreferenceGrid:
        made = [torch.randn(modules, features, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return cls(torch.stack(made).to(device))

    @property
    def features(self) -> int:
        return self.preference_EMF.shape[2]

    @property
    def inputs(self) -> int:
        return len(MAP) ** 2 * (self.features + 2)

    @property
    def outputs(self) -> int:
        return len(MOVES)

    def draw(self, z_EBM: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Observations along the expert's way [E, B, S, N], and its actions [E, B, S], −1 once it has ended."""
        runs, tasks, _ = z_EBM.shape
        reward_BF = torch.bmm(z_EBM, self.preference_EMF).flatten(0, 1)
        episodes = self.episodes(runs * tasks, generator)
        seen, actions = self.follow(episodes, reward_BF.gather(1, episodes.feature_BK))
        return seen.unflatten(0, (runs, tasks)), actions.unflatten(0, (runs, tasks))

    def episodes(self, count: int, generator: torch.Generator) -> Episodes:
        device = self.preference_EMF.device
        order_BC = torch.rand(count, len(FREE), generator=generator, device=device).argsort(1)
        feature_BK = torch.randint(self.features, (count, OBJECTS), generator=generator, device=device)
        return Episodes(order_BC[:, :OBJECTS], feature_BK, order_BC[:, OBJECTS])

    def follow(self, episodes: Episodes, reward_BK: Tensor) -> tuple[Tensor, Tensor]:
        """The expert's observations [B, S, N] and actions [B, S]."""
        q_BUCA, after_BUC, next_AC = plan(episodes.object_cell_BK, reward_BK)
        rows = torch.arange(len(reward_BK), device=reward_BK.device)
        cell_B, taken_B = episodes.agent_B, torch.zeros_like(episodes.agent_B)
        done_B = torch.zeros_like(cell_B, dtype=torch.bool)
        seen, actions = [], []
        for _ in range(STEPS):
            seen.append(self.observe(episodes, cell_B, taken_B))
            action_B = q_BUCA[rows, taken_B, cell_B].argmax(-1)
            actions.append(torch.where(done_B, -1, action_B))
            done_B = done_B | (action_B == 0)
            to_B = next_AC[action_B, cell_B]
            taken_B = torch.where(done_B, taken_B, after_BUC[rows, taken_B, to_B])
            cell_B = torch.where(done_B, cell_B, to_B)
        return torch.stack(seen, 1), torch.stack(actions, 1)

    def observe(self, episodes: Episodes, cell_B: Tensor, taken_B: Tensor) -> Tensor:
        """What is where, one-hot by cell: features, agent, walls; divided by its root mean square: [B, N]."""
        side, device = len(MAP), cell_B.device
        place_C, wall = places(device)
        seen = torch.zeros(len(cell_B), side * side, self.features + 2, device=device)
        seen[..., -1] = wall
        flat = seen.view(len(cell_B), -1)
        channels = self.features + 2
        bit_K = torch.arange(OBJECTS, device=device)
        here_BK = (((taken_B[:, None] >> bit_K) & 1) == 0).float()
        flat.scatter_add_(1, place_C[episodes.object_cell_BK] * channels + episodes.feature_BK, here_BK)
        flat.scatter_(1, (place_C[cell_B] * channels + self.features)[:, None], 1.0)
        return flat / flat.square().mean(1, keepdim=True).sqrt()

    def loss(self, output_EBSO: Tensor, target_EBS: Tensor) -> Tensor:
        """Cross-entropy of each run over the steps before the end: [E]."""
        nll = functional.cross_entropy(
            output_EBSO.float().flatten(0, 2), target_EBS.flatten().clamp(min=0), reduction="none"
        ).view_as(target_EBS)
        alive = (target_EBS >= 0).float()
        return (nll * alive).flatten(1).sum(1) / alive.flatten(1).sum(1).clamp(min=1)

    def score(self, output_EBSO: Tensor, target_EBS: Tensor) -> dict[str, Tensor]:
        """Share of the expert's actions chosen, and of its whole ways: [E] each."""
        right, alive = output_EBSO.argmax(-1) == target_EBS, target_EBS >= 0
        actions = (right & alive).flatten(1).sum(1) / alive.flatten(1).sum(1)
        return {"score": actions, "whole": (right | ~alive).all(2).float().mean(1)}


def plan(object_cell_BK: Tensor, reward_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values of every action [B, U, C, A], the set of objects taken after entering a cell [B, U, C], and the cell that
    each action leads to [A, C]."""
    device, count = object_cell_BK.device, len(object_cell_BK)
    next_AC = neighbours(device)
    object_BC = torch.full((count, len(FREE)), OBJECTS, device=device)
    object_BC.scatter_(1, object_cell_BK, torch.arange(OBJECTS, device=device).expand(count, -1))
    sets_U = torch.arange(SETS, device=device)
    bit_BC = torch.where(object_BC < OBJECTS, 1 << object_BC, 0)
    after_BUC = sets_U[None, :, None] | bit_BC[:, None]
    is_new_BUC = after_BUC != sets_U[None, :, None]
    gain_BC = functional.pad(reward_BK, (0, 1)).gather(1, object_BC)
    gain_BUC = gain_BC[:, None] * is_new_BUC
    cells_C = torch.arange(len(FREE), device=device)
    moved = next_AC[1:]  # [4, C]
    value_BUC = torch.zeros_like(gain_BUC)
    for _ in range(BACKUPS):
        entered_BUC = gain_BUC + DISCOUNT * value_BUC.flatten(1).gather(
            1, (after_BUC * len(FREE) + cells_C).flatten(1)
        ).view_as(value_BUC)
        moving = entered_BUC[:, :, moved].movedim(2, -1)  # [B, U, C, 4]
        q_BUCA = torch.cat([torch.zeros_like(moving[..., :1]), moving], -1)
        value_BUC = q_BUCA.amax(-1)
    return q_BUCA, after_BUC, next_AC
