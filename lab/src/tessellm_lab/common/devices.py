"""What an experiment runs on: two cores at the small size, a GPU at the full one."""

from __future__ import annotations

import torch

from tessellm.errors import TessellmError


def device_for(size: str) -> str:
    """`cuda` at full size; refused before any work where there is none."""
    return checked("cuda" if size == "full" else "cpu")


def checked(device: str) -> str:
    """The same, if it is there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise TessellmError(
            "--size full trains on a GPU, and PyTorch finds none here. Use --size cpu, or run it where there is one"
        )
    return device
