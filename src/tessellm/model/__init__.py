"""The composed model: the slow, obvious reference that every fast path is held to. Knows nothing of files."""

from .composed import ComposedForCausalLM, ComposedOutput
from .config import ComposedConfig

__all__ = [
    "ComposedConfig",
    "ComposedForCausalLM",
    "ComposedOutput",
]
