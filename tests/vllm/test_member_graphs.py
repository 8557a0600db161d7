"""Members under CUDA graphs, shown on a CPU by a tape that replays into the same memory, as vLLM's pieces are replayed:
a graph reads its inputs where they were at capture, and the next graph may write where the last one's output is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tessellm.vllm.members import InnerMember, StaticInputs, run_members

import engines  # noqa: F401 - sets vLLM's environment first
from replay_tape import Pool, Tape

WIDTH, TOKENS = 8, 12
SHIFTS = {"base": 0, "math": 3, "coding": 5, "full": 0}  # from the composition's ids to a member's


class Graphed(nn.Module):
    """A model whose forward is captured at the first call and replayed from then on; its output is not kept."""

    def __init__(self, pool: Pool, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table, self.weight = torch.randn(40, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH)
        self.pool = pool
        self.replay: Callable[[], None] | None = None
        self.at, self.shape = 0, torch.Size()

    def eager(self, ids: Tensor, positions: Tensor) -> Tensor:
        return (self.table[ids] + positions[:, None] * 0.1) @ self.weight

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        def run() -> None:
            out = self.eager(ids, positions)
            self.at, self.shape = out.untyped_storage().data_ptr(), out.shape

        if self.replay is None:
            self.replay = Tape(self.pool).capture(run)
        self.replay()
        memory = self.pool.blocks[self.at].untyped_storage()
        return torch.empty(0).set_(memory, 0, self.shape, (self.shape[1], 1))


def member(pool: Pool, seed: int, names: list[str]) -> InnerMember:
    made = InnerMember.__new__(InnerMember)
    nn.Module.__init__(made)
    made.names, made.model = names, Graphed(pool, seed)
    made.inputs = StaticInputs(TOKENS * len(names))
    return made


@torch.inference_mode()
def test_graphs_that_share_memory_and_read_the_addresses_of_their_capture() -> None:
    pool = Pool()
    members = [member(pool, 0, ["base", "math"]), member(pool, 1, ["coding"]), member(pool, 2, ["full"])]
    output_TH = torch.zeros(TOKENS, 4 * WIDTH)
    for seed in range(3):
        ids = torch.randint(0, 20, (TOKENS,), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(TOKENS) + seed
        own = {name: ids + shift for name, shift in SHIFTS.items()}  # a new tensor at every step
        run_members(members, own.__getitem__, positions, output_TH)
        wanted = [each.model.eager(own[name], positions) for each in members for name in each.names]
        torch.testing.assert_close(output_TH, torch.cat(wanted, -1))


@torch.inference_mode()
def test_the_tape_shows_what_goes_wrong_without_copies() -> None:
    """Outputs read after the next graph ran, and inputs at new addresses."""
    pool, ids, positions = Pool(), torch.arange(TOKENS), torch.arange(TOKENS)
    models = [Graphed(pool, seed) for seed in range(2)]
    late = [model(ids, positions) for model in models]
    assert not torch.equal(late[0], models[0].eager(ids, positions))
    frozen = Graphed(pool, 2)
    frozen(ids + 1, positions)
    with pytest.raises(RuntimeError, match="freed after its capture"):
        frozen(ids + 2, positions)
