"""What a module computes on the way: the outputs of its parts by name, recorded while it runs.

Works on any `torch.nn.Module`: language models, a diffusion pipeline's denoiser, one member of a composition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tessellm.errors import MemberError, nearest


def block_names(module: nn.Module) -> list[str]:
    """The names of a model's blocks in order: the entries of its outermost lists of modules."""
    found: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found += [f"{name}.{index}" for index in range(len(part))]
    return found


def matching(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The parts that the patterns name (`model.layers.3`, `model.layers.*.mlp`), in the module's order."""
    known = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            likely = known if len(known) <= 12 else block_names(module) or known[:12]
            hint = nearest(pattern, likely)
            raise MemberError(f"{type(module).__name__} has no layer {pattern!r}; {hint}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


@contextmanager
def recorded(
    module: nn.Module, names: Sequence[str], keep: Callable[[Tensor], Tensor] = lambda output: output
) -> Iterator[dict[str, list[Tensor]]]:
    """While inside, every run of a named part adds `keep(its output)` to that part's list."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}

    def hook(name: str) -> Callable[..., None]:
        def record(part: nn.Module, inputs: Any, output: Any) -> None:
            outputs[name].append(keep(tensor_of(output, name).detach()))

        return record

    handles = [module.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def tensor_of(output: Any, name: str) -> Tensor:
    """The tensor that a part hands on: itself, or the first of a tuple or of an output object."""
    if isinstance(output, Tensor):
        return output
    parts = list(output.values()) if hasattr(output, "values") else output
    first = parts[0] if isinstance(parts, tuple | list) and parts else None
    if not isinstance(first, Tensor):
        raise MemberError(f"layer {name!r} gives a {type(output).__name__}, not a tensor; choose a layer inside it")
    return first


@torch.no_grad()
def text_features(
    run: Callable[..., Any],
    module: nn.Module,
    names: Sequence[str],
    rows: Sequence[Sequence[int]],
    positions: Sequence[int],
    batch_size: int = 16,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Each part's output at one position of every text, [N, D] in float64 on the CPU. `run(input_ids, attention_mask)`
    makes the module compute; texts are padded on the right."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    device = next(module.parameters()).device
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        longest = max(map(len, part))
        ids_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in part], device=device)
        mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part], device=device)
        at_B = torch.tensor(positions[start : start + batch_size], device=device)
        with recorded(module, names) as outputs:
            run(ids_BT, mask_BT)
        for name in names:
            if not outputs[name]:
                raise MemberError(f"layer {name!r} was not run on these texts; choose another")
            found[name].append(_at(outputs[name][-1], at_B, ids_BT.shape, name))
        if progress is not None:
            progress(len(part))
    features = {name: torch.cat(parts) for name, parts in found.items()}
    for name, x_ND in features.items():
        check_finite(x_ND, name, module)
    return features


def check_finite(x_ND: Tensor, name: str, module: nn.Module) -> None:
    """Refuse features that nothing can be decoded from, and say whether the weights are why."""
    broken_N = torch.nonzero(~x_ND.isfinite().all(1))[:, 0].tolist()
    if broken_N:
        weights = [key for key, value in module.named_parameters() if not bool(value.isfinite().all())]
        cause = f"neither are its weights {', '.join(weights[:3])}" if weights else "its weights are finite"
        raise MemberError(
            f"layer {name!r} gives values that are not finite for {len(broken_N)} of {len(x_ND)} texts, the first of "
            f"them text {broken_N[0] + 1}; {cause}"
        )


def _at(output: Tensor, at_B: Tensor, shape: torch.Size, name: str) -> Tensor:
    if output.shape[:2] != shape or output.ndim < 3:
        raise MemberError(
            f"layer {name!r} gives {tuple(output.shape)} for {tuple(shape)} tokens; expected [batch, time, …]. Choose "
            "a layer that hands on one vector a token"
        )
    chosen = output[torch.arange(len(at_B), device=output.device), at_B.to(output.device)]
    return chosen.flatten(1).double().cpu()
