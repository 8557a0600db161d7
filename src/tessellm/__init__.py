"""tessellm composes language models that share a base, at decoding time, without training.

    model = tessellm.compose(base="google/gemma-2-2b", experts={"math": "...", "coding": "..."})
    model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)

Importing this package lets `AutoConfig`, `AutoModelForCausalLM` and `pipeline` load compositions, and takes no time:
what it offers is imported when it is first used, and `tessellm.model`, which registers itself with transformers, as
soon as transformers is imported, or now if it already is. So the folders that `tessellm.model` imports must not import
transformers themselves: they would be half imported then (tests/test_imports.py holds them to it).
"""

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

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

_ORIGINS = {  # where the names above are imported from
    "ComposedConfig": "model",
    "ComposedForCausalLM": "model",
    "Diagnosis": "diagnose",
    "MemberSpec": "members",
    "TessellmError": "errors",
    "Trace": "diagnose",
    "compose": "compose",
    "diagnose": "diagnose",
    "trace": "diagnose",
}


class _Package(ModuleType):
    """Imports a name when it is first asked for. A submodule of the same name (`compose`, `diagnose`) does not take the
    name's place when it is imported."""

    def __getattr__(self, name: str) -> Any:
        if name not in _ORIGINS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        self.__dict__[name] = value = getattr(import_module(f"{__name__}.{_ORIGINS[name]}"), name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ORIGINS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_ORIGINS})


class _Awaited:
    """A finder that finds what the finders after it find, and calls `then` when that has been imported."""

    def __init__(self, module: str, then: Callable[[], object]):
        self.module, self.then = module, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in later)), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        loader.exec_module = exec_module


def when_imported(module: str, then: Callable[[], object]) -> None:
    """Call `then` as soon as the module has been imported: now, if it already is."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Awaited(module, then))


# bitsandbytes, which PEFT and transformers import where it is installed, complains of a kernel that nobody asked for
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in record.getMessage()
)
sys.modules[__name__].__class__ = _Package
when_imported("transformers", lambda: import_module(f"{__name__}.model"))
