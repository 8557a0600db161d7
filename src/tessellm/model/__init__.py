"""The composed model: the slow, obvious reference that every fast path is held to. Knows nothing of files.

Importing it lets `AutoConfig`, `AutoModelForCausalLM` and `pipeline` load compositions.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .composed import ComposedForCausalLM, ComposedOutput
from .config import ComposedConfig

AutoConfig.register("tessellm", ComposedConfig, exist_ok=True)
AutoModelForCausalLM.register(ComposedConfig, ComposedForCausalLM, exist_ok=True)

__all__ = [
    "ComposedConfig",
    "ComposedForCausalLM",
    "ComposedOutput",
]
