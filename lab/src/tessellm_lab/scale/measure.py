"""What a trained stack can do: score on trained and held-out combinations, and how linearly its layers hold the task.

Decodability: ridge (penalty 1) from a layer's output for one sample of a task to the task's latent; fitted on half of
the tasks that use trained combinations, scored on the other half and on held-out ones, R² a module, averaged. A module
that no trained combination has cannot be fitted: it is left out and reported apart.

Shapes: E run, B task, M module, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.finite import TrainingError
from .training import Trainer

CHUNK = 128  # tasks at once
PENALTY = 1.0


@torch.no_grad()
def measure(trainer: Trainer, tasks: int = 1024, seed: int = 10_007) -> list[dict[str, Any]]:
    """One row a run."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    generator = torch.Generator(device=trainer.device).manual_seed(seed)
    seen, new = (_look(trainer, table, tasks, generator) for table in (trainer.train_masks, trainer.held_masks))
    torch.set_float32_matmul_precision(precision)
    rows = []
    for number, run in enumerate(trainer.stack.runs):
        absent_M = trainer.absent_EM[number].to(trainer.device)
        for layer, pair in enumerate(zip(seen["hidden"], new["hidden"], strict=True)):
            if not all(bool(hidden[number].isfinite().all()) for hidden in pair):
                raise TrainingError(
                    f"run {number} of stack {trainer.stack.name!r} ({run}): layer {layer} gives values that are not "
                    f"finite after {trainer.steps} updates, so nothing can be decoded from it"
                )
        input_decode = decode(seen["code"][number], seen["z"][number], new["code"][number], new["z"][number], absent_M)
        layers = [
            decode(one[number], seen["z"][number], other[number], new["z"][number], absent_M)
            for one, other in zip(seen["hidden"], new["hidden"], strict=True)
        ]
        last = layers[-2] if trainer.stack.network.kind == "mlp" else layers[-1]
        rows.append(
            {
                "encoding": run.encoding, "support": run.support, "held_out_share": run.held_out, "seed": run.seed,
                "stack": trainer.stack.name, "family": trainer.stack.family,
                "network": trainer.stack.network.kind, "width": trainer.stack.network.width,
                "depth": trainer.stack.network.depth, "steps": trainer.steps, "tasks": trainer.trained_E[number],
                "modules": trainer.stack.modules,
                "trained": {name: round(value[number].item(), 4) for name, value in seen["scores"].items()},
                "held_out": {name: round(value[number].item(), 4) for name, value in new["scores"].items()},
                "decode": last, "decode_input": input_decode, "decode_layers": layers,
                "absent": torch.nonzero(absent_M)[:, 0].tolist(),
            }
        )  # fmt: skip
    return rows


@torch.no_grad()
def held_out_scores(trainer: Trainer, tasks: int = 256, seed: int = 20_011) -> list[float]:
    """Every run's score on held-out combinations, and nothing else."""
    generator = torch.Generator(device=trainer.device).manual_seed(seed)
    _, code, x, target = trainer.draw(trainer.held_masks, tasks, generator)
    output = trainer.stack.network(trainer.params, code, x)
    return [round(value, 4) for value in trainer.family.score(output, target)["score"].tolist()]


def _look(trainer: Trainer, table: Any, tasks: int, generator: torch.Generator) -> dict[str, Any]:
    """Latents, codes, hidden layers and scores on fresh tasks."""
    parts: list[tuple[Tensor, Tensor, list[Tensor]]] = []
    scores: dict[str, list[Tensor]] = {}
    for _ in range(0, tasks, CHUNK):
        z, code, x, target = trainer.draw(table, CHUNK, generator)
        hidden: list[Tensor] = []
        output = trainer.stack.network(trainer.params, code, x, hidden=hidden)
        parts.append((z, code, hidden))
        for name, value in trainer.family.score(output, target).items():
            scores.setdefault(name, []).append(value)
    hidden = [torch.cat([part[2][layer] for part in parts], 1) for layer in range(len(parts[0][2]))]
    return {
        "z": torch.cat([part[0] for part in parts], 1),
        "code": torch.cat([part[1] for part in parts], 1),
        "hidden": hidden,
        "scores": {name: torch.stack(values).mean(0) for name, values in scores.items()},
    }


def decode(seen_BD: Tensor, z_BM: Tensor, new_BD: Tensor, new_z_BM: Tensor, absent_M: Tensor) -> dict[str, float]:
    """R² on trained and on held-out combinations; of absent modules, on held-out ones, apart."""
    half = len(z_BM) // 2
    x, z = seen_BD[:half].double(), z_BM[:half].double()
    mean_D, mean_M = x.mean(0), z.mean(0)
    gram_DD = (x - mean_D).T @ (x - mean_D)
    gram_DD.diagonal().add_(PENALTY)
    w_DM = torch.linalg.solve(gram_DD, (x - mean_D).T @ (z - mean_M))

    def r2(rows_BD: Tensor, truth_BM: Tensor, of_M: Tensor) -> float | None:
        truth = truth_BM.double()
        lost_M = ((rows_BD.double() - mean_D) @ w_DM + mean_M - truth).square().mean(0)
        spread_M = truth.var(0, unbiased=False)
        use_M = of_M & (spread_M > 1e-6)
        return round((1 - lost_M[use_M] / spread_M[use_M]).mean().item(), 4) if use_M.any() else None

    found = {
        "trained": r2(seen_BD[half:], z_BM[half:], ~absent_M),
        "held_out": r2(new_BD, new_z_BM, ~absent_M),
        "absent": r2(new_BD, new_z_BM, absent_M),
    }
    return {name: value for name, value in found.items() if value is not None}
