"""`reproduce neurons`: a linear number of neurons is enough, counted and checked on random and adversarial points.

After the theorem of arXiv 2507.07207, with a construction of ours (see `construction`). Adversarial points climb the
error by gradient from the worst random ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.claims import Claim, Result
from ..common.panels import COLOURS, caption, drawn, panels, save
from ..scale.tasks import all_masks, latents
from ..scale.teacher import Hyperteacher
from .construction import Network, Teacher, approximate, exact_binary

MODULES, PIECES = (8, 16, 32, 64), (4, 8, 16, 32, 64)
MOST, SIZE = 3, 8
CLIMBS, CLIMB_STEPS, CLIMB_RATE = 64, 60, 0.02


def teacher(modules: int, seed: int, most: int = MOST, size: int = SIZE) -> Teacher:
    """A random one, in float64."""
    made = Hyperteacher.random([seed], modules, most, size, "cpu")
    return Teacher(made.theta_EMNH[0].double(), made.beta_EMH[0].double(), made.omega_EHO[0].double(), most)


def points(of: Teacher, count: int, generator: torch.Generator, kind: str) -> tuple[Tensor, Tensor]:
    """Random tasks and inputs."""
    masks = all_masks(len(of.theta_MNH), of.most)
    chosen = masks[torch.randint(len(masks), (count,), generator=generator)]
    x = 2 * torch.rand(count, of.theta_MNH.shape[1], generator=generator, dtype=torch.float64) - 1
    return latents(chosen, kind, generator).double(), x


def largest_error(network: Network, of: Teacher, z_BM: Tensor, x_BN: Tensor) -> Tensor:
    """The worst output's error at every point: [B]."""
    return (network(z_BM, x_BN) - of(z_BM, x_BN)).abs().amax(1)


def climb(network: Network, of: Teacher, z_BM: Tensor, x_BN: Tensor) -> float:
    """The largest error found by going uphill in z (same modules, weights in [0, 1]) and in x from the worst points."""
    with torch.no_grad():
        start = largest_error(network, of, z_BM, x_BN).topk(min(CLIMBS, len(z_BM))).indices
    z, x, on = z_BM[start].clone(), x_BN[start].clone(), z_BM[start] > 0
    worst = 0.0
    for _ in range(CLIMB_STEPS):
        z.requires_grad_()
        x.requires_grad_()
        error = largest_error(network, of, z, x)
        worst = max(worst, error.max().item())
        to_z, to_x = torch.autograd.grad(error.sum(), (z, x))
        z = ((z.detach() + CLIMB_RATE * to_z.sign()).clamp(0, 1) * on).detach()
        x = (x.detach() + CLIMB_RATE * to_x.sign()).clamp(-1, 1)
    return worst


def cell(modules: int, pieces: int, seed: int, count: int) -> dict[str, Any]:
    """One construction, checked."""
    of = teacher(modules, seed)
    network = approximate(of, pieces)
    generator = torch.Generator().manual_seed(seed + 1)
    z, x = points(of, count, generator, "continuous")
    found = largest_error(network, of, z, x)
    return {
        "modules": modules, "pieces": pieces, "neurons": network.neurons, "parameters": network.parameters,
        "bound": network.bound, "random": found.max().item(), "adversarial": climb(network, of, z, x),
    }  # fmt: skip


def exact_cell(modules: int, seed: int, count: int) -> dict[str, Any]:
    of = teacher(modules, seed)
    network = exact_binary(of)
    z, x = points(of, count, torch.Generator().manual_seed(seed + 2), "khot")
    error = largest_error(network, of, z, x).max().item()
    return {"modules": modules, "neurons": network.neurons, "error": error}


def run(seed: int, out: Path, size: str, log: Callable[[str], None] = print) -> Result:
    """Build, count, check; `neurons.json` and `neurons.png`."""
    began = time.monotonic()
    count = 20_000 if size == "full" else 2_000
    cells = []
    for modules in MODULES:
        cells += [cell(modules, pieces, seed, count) for pieces in PIECES]
        smallest = min(each["adversarial"] for each in cells[-len(PIECES) :])
        log(f"M = {modules}: down to an error of {smallest:.2g}")
    exact = [exact_cell(modules, seed, count) for modules in MODULES]
    figures = drawn(lambda: draw(cells, exact, out))
    tables = {"approximate": cells, "exact": exact}
    return Result("neurons", claims_of(cells, exact), seed, size, time.monotonic() - began, figures, tables)


def claims_of(cells: list[dict[str, Any]], exact: list[dict[str, Any]]) -> list[Claim]:
    worst = max(max(c["random"], c["adversarial"]) / c["bound"] for c in cells)
    counts = {c["pieces"]: {d["neurons"] for d in cells if d["pieces"] == c["pieces"]} for c in cells}
    differing = max(len(found) for found in counts.values())
    halving = [c["adversarial"] / d["adversarial"] for c in cells for d in cells
               if c["modules"] == d["modules"] and d["pieces"] == 2 * c["pieces"]]  # fmt: skip
    error = max(c["error"] for c in exact)
    ratio = [c["neurons"] / c["modules"] for c in exact]
    straight = max(ratio) - min(ratio)
    text = f"largest error over the bound, random and adversarial points, {len(cells)} networks"
    mean = sum(halving) / len(halving)
    return [
        Claim("bound", text, round(worst, 4), "≤ 1", worst <= 1),
        Claim("modules", "different neuron counts across M at one ε", differing, "1", differing == 1),
        Claim("rate", "error shrinks by this when the neurons double (mean; ε ~ 1/neurons²: 4)", round(mean, 2)),
        Claim("exact", "binary z: largest error of the exact form", error, "≤ 1e-10", error <= 1e-10),
        Claim("linear", "binary z: neurons a module, largest minus smallest", round(straight, 3), "≤ 2", straight <= 2),
    ]


def draw(cells: list[dict[str, Any]], exact: list[dict[str, Any]], out: Path) -> str:
    """Error against neurons, and neurons against modules."""
    figure, (left, right) = panels(2)
    for number, modules in enumerate(MODULES):
        chosen = [c for c in cells if c["modules"] == modules]
        neurons = [c["neurons"] for c in chosen]
        left.loglog(neurons, [c["bound"] for c in chosen], ":", color=COLOURS[number])
        left.loglog(neurons, [c["adversarial"] for c in chosen], "o-", color=COLOURS[number], label=f"M = {modules}")
    left.minorticks_off()
    counts = sorted({c["neurons"] for c in cells})
    left.set_xticks(counts, [f"{count:,}" for count in counts])
    left.legend(fontsize=7)
    caption(left, "Error (adversarial) and its bound (dotted)", "neurons", "largest error")
    for number, pieces in enumerate(PIECES):
        chosen = [c for c in cells if c["pieces"] == pieces]
        label = f"ε ≤ {max(c['bound'] for c in chosen):.2g}"
        right.plot(
            [c["modules"] for c in chosen], [c["neurons"] for c in chosen], "o-", color=COLOURS[number], label=label
        )
    right.plot([c["modules"] for c in exact], [c["neurons"] for c in exact], "k--", label="exact, binary z")
    right.set_yscale("log")
    right.legend(fontsize=7)
    caption(right, "Neurons against modules", "modules M", "neurons")
    return save(figure, out, "neurons")
