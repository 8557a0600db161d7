"""The same study on real text-to-image models: the layers of any diffusers pipeline by name, while it draws.

    from diffusers import DiffusionPipeline
    pipe = DiffusionPipeline.from_pretrained("…")
    scores = probe_pipeline(pipe, examples, ["unet.mid_block"], steps=20)

`examples` are those of the text probe (`diagnose.labelled`): a prompt and its labelled constituents. Whether a picture
came out right is for the user's own judge to say; relate it to the scores with `experiments.correlation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...diagnose.activations import matching, recorded
from ...diagnose.labelled import Labelled
from ...diagnose.probe import SHUFFLES, Decodability, Labels, check_enough, decode, group_numbers
from ...errors import MemberError, require

DENOISERS = ("unet", "transformer")


def probe_pipeline(
    pipe: Any,
    examples: Sequence[Labelled],
    layers: Sequence[str],
    at: float = 0.5,
    batch_size: int = 4,
    folds: int = 5,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    **call: Any,
) -> list[Decodability]:
    """Each label from each named layer (`unet.mid_block`, `transformer.transformer_blocks.*`), `at` that share of the
    way through sampling. `call` goes to the pipeline: num_inference_steps, guidance_scale, height, …"""
    require("diffusers", "images")
    labels, groups_N = Labels.of(examples), group_numbers(examples)
    check_enough(labels, groups_N, folds)
    features = pipeline_features(pipe, [e.text for e in examples], layers, at, batch_size, seed, progress, **call)
    return [
        Decodability(None, layer, label, labels.kind(label), score, shuffled, None)
        for layer, x_ND in features.items()
        for label, (score, shuffled) in decode(x_ND, labels, groups_N, folds, SHUFFLES, seed).items()
    ]


@torch.no_grad()
def pipeline_features(
    pipe: Any,
    prompts: Sequence[str],
    layers: Sequence[str],
    at: float = 0.5,
    batch_size: int = 4,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    **call: Any,
) -> dict[str, Tensor]:
    """What each layer puts out for every prompt, averaged over space: [N, D] in float64."""
    parts = nn.ModuleDict({name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)})
    names = matching(parts, layers)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for start in range(0, len(prompts), batch_size):
        batch = list(prompts[start : start + batch_size])
        generators = [torch.Generator().manual_seed(seed + start + n) for n in range(len(batch))]
        with recorded(parts, names, keep=lambda output: _over_space(output).double().cpu()) as outputs:
            pipe(batch, generator=generators, output_type="latent", **call)
        for name, runs in outputs.items():
            if not runs:
                raise MemberError(f"layer {name!r} was not run while drawing; choose another")
            chosen = runs[_which_run(name, at, len(runs))]
            found[name].append(_with_prompt(chosen, len(batch), name))
        if progress is not None:
            progress(len(batch))
    return {name: torch.cat(rows) for name, rows in found.items()}


def _which_run(name: str, at: float, runs: int) -> int:
    """Denoisers run once a step; a text encoder reads the prompts first and what to avoid after that."""
    return min(int(at * runs), runs - 1) if name.split(".")[0] in DENOISERS else 0


def _over_space(output_BX: Tensor) -> Tensor:
    """[B, D] from [B, D, height, width] (a convolution's) or [B, T, D] (a transformer's)."""
    if output_BX.ndim == 4:
        return output_BX.mean((2, 3))
    return output_BX.mean(1) if output_BX.ndim == 3 else output_BX.flatten(1)


def _with_prompt(rows_BD: Tensor, prompts: int, name: str) -> Tensor:
    """Guidance runs every prompt twice, first without it; the rows that saw the prompt are the last ones."""
    if len(rows_BD) not in (prompts, 2 * prompts):
        raise MemberError(
            f"layer {name!r} gives {len(rows_BD)} rows for {prompts} prompts; expected one or two a prompt"
        )
    return rows_BD[-prompts:]
