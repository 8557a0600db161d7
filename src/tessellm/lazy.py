"""Imports that wait, so that `import tessellm` and the command line begin at once: names that a package imports when
they are first asked for, and what is done once some module has been imported. Knows nothing of what is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def offer(package: str, origins: Mapping[str, str]) -> None:
    """Let a package offer names, each imported from one of its modules when it is first asked for.

    A submodule of the same name (`compose`, `diagnose`) does not take the name's place when it is imported.
    """

    class Offering(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in origins:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            self.__dict__[name] = value = getattr(import_module(f"{package}.{origins[name]}"), name)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in origins or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *origins})

    sys.modules[package].__class__ = Offering


def when_imported(module: str, then: Callable[[], object]) -> None:
    """Call `then` as soon as the module has been imported: now, if it already is."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Awaited(module, then))


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
