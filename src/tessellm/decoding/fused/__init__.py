"""Decoding steps as few Triton kernels, for the common decoder architectures on a GPU. Others run on their modules."""

import importlib.util

import torch


def runs_on(device: torch.device) -> bool:
    """Whether there are a GPU and Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
