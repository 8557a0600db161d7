"""Lets `from_pretrained(folder, trust_remote_code=True)` find tessellm, which must be installed."""

from tessellm.model import ComposedConfig, ComposedForCausalLM

__all__ = ["ComposedConfig", "ComposedForCausalLM"]
