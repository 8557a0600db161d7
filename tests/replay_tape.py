"""A tape of aten operations: it replays a pass on the CPU as a CUDA graph would, with a graph's faults.

A capture records every operation with the memory of its arguments and results, and changes nothing. A replay runs the
operations into the same memory, and no Python of the pass. So it shows

- host values that were frozen at capture, and results in Python that no replay writes;
- results that the next graph of the pool overwrites, once their tensors were freed;
- memory outside the pool that was freed after the capture.

During a capture tensors say that they are on a GPU, so code takes a GPU's branches. What would wait for the host, or
copy from it, raises RuntimeError, as in a capture by CUDA.

The tape cannot see Triton launches: they do not pass the dispatcher (the launch log of the goldens is for those). Nor
can it see streams, since nothing runs late, nor which device a tensor made without `device=` would be on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

REFUSAL = "operation not permitted when a pass is captured"
GARBAGE = 0xFF  # NaN, or −1: what the pool's memory holds before it is written
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SEEN: Any = {Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False, Tensor.device.__get__: CUDA}  # type: ignore[attr-defined]
TO_HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COPIES = {"copy_", "_to_copy", "cat", "stack"}  # no kernel takes the host's number as an argument
Run = Callable[[], None]


class LikeCuda(TorchFunctionMode):
    """Lets tensors say that they are on a GPU. `captured`: refuses what the dispatcher does not see."""

    def __init__(self, captured: bool = False):
        super().__init__()
        self.captured = captured

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SEEN:
            return SEEN[func]
        kwargs = kwargs or {}
        places = [each for each in (*args, *kwargs.values()) if isinstance(each, (torch.device, str))]
        made_there = func is Tensor.new_tensor or (func in FROM_HOST and CUDA in places)
        if self.captured and (func in TO_HOST or made_there or CPU in places or "cpu" in places):
            refuse(func.__name__)
        return func(*map(_on_cpu, args), **{name: _on_cpu(each) for name, each in kwargs.items()})


class Pool:
    """The memory of several captures. A block is free for the next once the last tensor in it is freed."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}  # by address
        self.free: list[np.ndarray] = []

    def take(self, count: int) -> torch.UntypedStorage:
        """Lend the smallest free block of so many bytes, or a new one."""
        fits = [n for n, block in enumerate(self.free) if len(block) >= count]
        at = min(fits, key=lambda n: len(self.free[n]), default=None)
        block = np.full(max(count, 1), GARBAGE, np.uint8) if at is None else self.free.pop(at)
        self.blocks.setdefault(block.ctypes.data, torch.from_numpy(block))
        lent = block[:]
        weakref.finalize(lent, self.free.append, block).atexit = False
        return torch.from_numpy(lent).untyped_storage()


class Tape(TorchDispatchMode):
    """Records the operations of one pass, and replays them."""

    def __init__(self, pool: Pool):
        super().__init__()
        self.pool = pool
        self.calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self.constants: dict[int, Tensor] = {}  # that the host gave, by address
        self.outside: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}  # memory that is not the pool's
        self.before: dict[int, Tensor] = {}  # what lay there

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that compiled functions run

    def capture(self, run: Run) -> Run:
        """Record a pass and return what replays it. The pass runs for its shapes alone: what it wrote is put back."""
        before = {at: block.clone() for at, block in self.pool.blocks.items()}
        try:
            with LikeCuda(captured=True), self:
                run()
        finally:
            for at, old in self.before.items():
                _bytes(self.outside[at][1]).copy_(old)
            for at, block in self.pool.blocks.items():
                block.copy_(before.get(at, torch.tensor(GARBAGE, dtype=torch.uint8)))
            self.before.clear()
        return self.replay

    @torch.inference_mode()
    def replay(self) -> None:
        if any(storage.expired() for storage, _ in self.outside.values()):
            raise RuntimeError("a replay uses memory that was freed after its capture")
        for func, args, kwargs, results in self.calls:
            made: list[Tensor] = []
            _mapped(made.append, func(*args, **kwargs))
            for new, kept in zip(made, results, strict=True):
                if kept is not None:
                    kept.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:  # inference mode does not take it apart
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        given: list[Tensor] = []
        _mapped(given.append, (args, tuple(kwargs.values())))
        self._check(func, args, given)
        known, results = {_address(each) for each in given}, []
        written = func._schema.is_mutable
        call = self._call(func, args, kwargs, written) if written else None  # some change their arguments' shapes

        def keep(made: Tensor) -> Tensor:
            kept = made if _address(made) in known else self._in_pool(made)
            results.append(None if kept is made else self._same(kept))
            return kept

        found = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self.constants[_address(found)] = found
            return found
        found = _mapped(keep, found)
        if written or any(each is not None for each in results):  # the others are views
            self.calls.append((*(call or self._call(func, args, kwargs, written)), results))
        return found

    def _check(self, func: Any, args: Any, given: list[Tensor]) -> None:
        """Refuse what waits for the host, or copies from it."""
        name, waits = func.overloadpacket.__name__, not WAITS.isdisjoint(func.tags)
        if name in ("index", "index_put", "index_put_"):  # of a mask the host must know how many are true
            masked = any(each.dtype is torch.bool for each in args[1] if each is not None)
            waits = masked and (name == "index" or args[2].numel() != 1)
        if waits or any(_address(each) in self.constants and (each.dim() or name in COPIES) for each in given):
            refuse(func)

    def _call(self, func: Any, args: Any, kwargs: Any, written: bool) -> tuple[Any, Any, Any]:
        same = partial(self._same, written=written)
        return func, _mapped(same, args), {name: _mapped(same, each) for name, each in kwargs.items()}

    def _in_pool(self, made: Tensor) -> Tensor:
        """Copy a result into the pool."""
        last = sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True))
        storage = self.pool.take((last + 1) * made.itemsize if made.numel() else 0)
        return torch.empty(0, dtype=made.dtype).set_(storage, 0, made.shape, made.stride()).copy_(made)

    def _same(self, given: Tensor, written: bool = False) -> Tensor:
        """Make a tensor of the same memory that does not keep it; where it may be `written`, note what is there."""
        at, storage = _address(given), given.untyped_storage()
        if at in self.constants:
            return given
        if at in self.pool.blocks:
            memory = self.pool.blocks[at].untyped_storage()
        else:
            if at not in self.outside:
                alias: Any = torch._C._construct_storage_from_data_pointer(at, CPU, storage.nbytes())
                self.outside[at] = StorageWeakRef(storage), alias
            memory = self.outside[at][1]
            if written and at not in self.before:
                self.before[at] = _bytes(memory).clone()
        return torch.empty(0, dtype=given.dtype).set_(memory, given.storage_offset(), given.shape, given.stride())


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function where tensors say what they are: a compiler would compile it for either."""

    def called(*given: Any) -> Any:
        with _pop_mode_temporarily() if torch._C._len_torch_function_stack() else nullcontext():
            return function(*given)

    return called


def refuse(what: Any) -> None:
    raise RuntimeError(f"{REFUSAL}\nby {what}, and more lines")


def _on_cpu(given: Any) -> Any:
    return CPU if isinstance(given, torch.device) else given


def _mapped(change: Callable[[Tensor], Any], given: Any) -> Any:
    """Change every tensor of an operation's arguments or results."""
    if isinstance(given, Tensor):
        return change(given)
    return type(given)([_mapped(change, each) for each in given]) if isinstance(given, (list, tuple)) else given


def _bytes(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(memory)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
