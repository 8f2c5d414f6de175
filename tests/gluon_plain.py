"""Gluon's language in plain Triton, so that Triton's interpreter runs kernels that are written in Gluon.

Layouts are forgotten. Copies to shared memory arrive as late as a kernel allows, or at once: a kernel that reads too
early, or overwrites what is still read, gives wrong numbers in one of the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.experimental.gluon.language.nvidia.ampere
import triton.experimental.gluon.language.nvidia.hopper
import triton.language as tl

LATE = [True]  # whether copies arrive only when they are waited for
_groups: list[list[Any]] = [[]]


def _number(x: Any) -> int:
    return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(getattr(x, "value", x))


class Shared:
    """Shared memory: some buffers, or one."""

    def __init__(self, count: int, value: Any = None) -> None:
        self.cells, self.at = [value] * count, 0

    def index(self, at: Any) -> Shared:
        found = object.__new__(Shared)
        found.cells, found.at = self.cells, _number(at)
        return found

    def load(self, layout: Any) -> Any:
        return self.cells[self.at]


def _copy(smem: Shared, pointer: Any, mask: Any) -> None:
    value = tl.load(pointer, mask=mask, other=0)
    if LATE[0]:
        _groups[-1].append((smem, value))
    else:
        smem.cells[smem.at] = value


def _wait(count: int) -> None:
    while len(_groups) - 1 > count:
        for smem, value in _groups.pop(0):
            smem.cells[smem.at] = value


def _allocate(dtype: Any, shape: list[Any], layout: Any, value: Any = None) -> Shared:
    return Shared(_number(shape[0]) if value is None else 1, value)


def _mma(a: Any, b: Shared, acc: Any, is_async: bool) -> Any:
    return tl.dot(a, b.cells[b.at], acc)


def _waited(count: int, deps: Any) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


class Language(SimpleNamespace):
    """Some names of its own; all others are those of Triton's language, as the interpreter has them just now."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


def _jit(fn: Any = None, **how: Any) -> Any:
    if fn is None:
        return lambda fn: _jit(fn, **how)
    made = triton.jit(fn, **how)
    rewrite = made.rewrite

    def rewritten() -> Any:
        found = rewrite()
        found.__globals__["tl"] = tl  # the interpreter looks for it there, and for constants by this name
        found.__annotations__ = {name: kind.replace("gl.", "tl.") for name, kind in found.__annotations__.items()}
        return found

    made.rewrite = rewritten
    return made


@contextmanager
def standing_in() -> Iterator[None]:
    """Modules that are imported now get this for Gluon."""
    names = {
        "arange": lambda low, high, layout: tl.arange(low, high), "num_warps": lambda: 4,
        "full": lambda shape, value, dtype, layout: tl.full(shape, value, dtype),
        "zeros": lambda shape, dtype, layout: tl.zeros(shape, dtype), "convert_layout": lambda x, layout: x,
        "allocate_shared_memory": _allocate,
    }  # fmt: skip
    layouts = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout")
    names |= {name: lambda *given: None for name in (*layouts, "NVMMASharedLayout", "SwizzledSharedLayout")}
    copies = {"async_copy_global_to_shared": _copy, "commit_group": lambda: _groups.append([]), "wait_group": _wait}
    hopper = {"fence_async_shared": lambda: None, "warpgroup_mma": _mma, "warpgroup_mma_wait": _waited}
    hopper["warpgroup_mma_init"] = lambda x: x
    language, root = Language(**names), "triton.experimental.gluon"
    made = {
        root: {"jit": _jit, "language": language}, f"{root}.language.nvidia.hopper": hopper,
        f"{root}.language.nvidia.ampere": {"async_copy": SimpleNamespace(**copies)},
    }  # fmt: skip
    kept = {name: sys.modules.get(name) for name in made}, triton.experimental.gluon
    for name, own in made.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(own)
    triton.experimental.gluon = sys.modules[root]
    yield
    sys.modules.update(kept[0])
    triton.experimental.gluon = kept[1]
