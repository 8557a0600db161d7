"""tessellm composes language models that share a base, at decoding time, without training.

    model = tessellm.compose(base="google/gemma-2-2b", experts={"math": "...", "coding": "..."})
    model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)

Importing this package lets `AutoConfig`, `AutoModelForCausalLM` and `pipeline` load compositions, and takes no time:
what it offers is imported when it is first used, and `tessellm.model`, which registers itself with transformers, as
soon as transformers is imported, or now if it already is. So the folders that `tessellm.model` imports must not import
transformers themselves: they would be half imported then (tests/test_imports.py holds them to it).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .lazy import offer, when_imported

if TYPE_CHECKING:
    from .compose import compose
    from .diagnose import Diagnosis, Trace, diagnose
    from .diagnose.trace import trace
    from .errors import TessellmError
    from .members import MemberSpec
    from .model import ComposedConfig, ComposedForCausalLM

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

offer(
    __name__,
    {
        "ComposedConfig": "model",
        "ComposedForCausalLM": "model",
        "Diagnosis": "diagnose",
        "MemberSpec": "members",
        "TessellmError": "errors",
        "Trace": "diagnose",
        "compose": "compose",
        "diagnose": "diagnose",
        "trace": "diagnose",
    },
)
when_imported("transformers", lambda: import_module(f"{__name__}.model"))
