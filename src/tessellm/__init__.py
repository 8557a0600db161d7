"""tessellm composes language models that share a base, at decoding time, without training.

    model = tessellm.compose(base="google/gemma-2-2b", experts={"math": "...", "coding": "..."})
    model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)

Importing this package lets `AutoConfig`, `AutoModelForCausalLM` and `pipeline` load compositions.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .compose import compose
from .diagnose import Diagnosis, Trace, diagnose, trace
from .errors import TessellmError
from .members import MemberSpec
from .model import ComposedConfig, ComposedForCausalLM

AutoConfig.register("tessellm", ComposedConfig, exist_ok=True)
AutoModelForCausalLM.register(ComposedConfig, ComposedForCausalLM, exist_ok=True)

__version__ = "0.1.0"
__all__ = [
    "ComposedConfig",
    "ComposedForCausalLM",
    "Diagnosis",
    "MemberSpec",
    "TessellmError",
    "Trace",
    "compose",
    "diagnose",
    "trace",
]
