"""Runs that train side by side in one computation: which of them broke, at which update, and what in it.

A loss that is not finite ruins its run for good and says nothing by itself; a decoder fitted much later fails with an
error of linear algebra. Here it is noted on the device as it happens, without waiting for the device, and told at the
next look. `check_copies` is for what no look at a loss can see: a device whose copies do not arrive.

Shapes: E run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tessellm.errors import TessellmError

SHOWN = 3  # broken runs that an error tells of


class TrainingError(TessellmError):
    """An experiment's training broke: values are not finite."""


class Watch:
    """The update at which each run's loss was not finite for the first time. `see` may be part of a CUDA graph."""

    def __init__(self, runs: int, device: torch.device | str):
        self.updates = torch.zeros((), dtype=torch.long, device=device)
        self.first_E = torch.zeros(runs, dtype=torch.long, device=device)  # 0: never

    @torch.no_grad()
    def see(self, loss_E: Tensor) -> None:
        self.updates.add_(1)
        is_first_E = (self.first_E == 0) & ~loss_E.isfinite()
        self.first_E.copy_(torch.where(is_first_E, self.updates, self.first_E))

    def restart(self, updates: int) -> None:
        """As if so many updates had been seen, all of them finite."""
        self.updates.fill_(updates)
        self.first_E.zero_()

    def broken(self) -> dict[int, int]:
        """Runs and the updates at which they broke; waits for the device."""
        return {run: first for run, first in enumerate(self.first_E.tolist()) if first}


def unsound(tensors: Mapping[str, Tensor], run: int) -> list[str]:
    """Names of the tensors with values that are not finite in this run."""
    return [name for name, value in tensors.items() if not bool(value[run].isfinite().all())]


def check(watch: Watch, params: Mapping[str, Tensor], describe: Callable[[int], str], last: bool = False) -> None:
    """Refuse to go on with broken runs. The `last` look is at the parameters too: no loss has seen them."""
    broken = watch.broken()
    if last:
        whole_E = torch.stack([value.detach().flatten(1).isfinite().all(1) for value in params.values()]).all(0)
        broken = {run: int(watch.updates) for run, whole in enumerate(whole_E.tolist()) if not whole} | broken
    if not broken:
        return
    told = []
    for run, update in sorted(broken.items())[:SHOWN]:
        names = unsound({name: value.detach() for name, value in params.items()}, run)
        where = f"parameters not finite now: {', '.join(names)}" if names else "its parameters are finite, its data not"
        told.append(f"{describe(run)} broke at update {update} ({where})")
    more = f"; and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
    raise TrainingError(f"training gave values that are not finite: {'; '.join(told)}{more}")


def check_copies(device: torch.device | str) -> None:
    """Refuse a device that does not get what it is sent, or does not send back what it has."""
    for count in (2**8, 2**13, 2**17, 2**21):  # 2 KiB to 16 MiB: drivers copy small and large ones differently
        here, there = (torch.arange(count, device=place) * 2_654_435_761 for place in ("cpu", device))
        same = {"to": torch.equal(here.to(device), there), "from": torch.equal(there.cpu(), here)}
        if not all(same.values()):
            ways = " and ".join(way for way, arrived in same.items() if not arrived)
            raise TrainingError(
                f"copies of {8 * count} bytes {ways} {device} arrive changed: nothing it computes can be trusted. "
                "Use the device alone, without sharing it between processes, or another one"
            )
