"""Makes Triton's interpreter quicker, with the same numbers: half of what its kernels take here is
looking up types, looking for functions to replace at every call, and reductions that go number by
number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def quicken() -> None:
    """In this process, once; where the interpreter is built otherwise, it stays as it is."""
    from triton.runtime import interpreter

    if getattr(interpreter, "is_quick", False):
        return
    interpreter.is_quick = True
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype)
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        interpreter._patch_builtin = _found_once(interpreter)
    reduce_ops = getattr(interpreter, "ReduceOps", None)
    if hasattr(reduce_ops, "generic_reduce"):
        reduce_ops.generic_reduce = _by_halves(reduce_ops.generic_reduce)


def _looked_up_once(slow: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """It would build its table every time. A block's type is that of its elements; pointers have
    names of their own.
    """
    known: dict[str, Any] = {}

    @wraps(slow)
    def find(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = slow(dtype)
        return known[name]

    return find


def _found_once(interpreter: Any) -> Callable[..., None]:
    """Which members of a module are to be replaced does not change: looked for when nothing is
    replaced yet.
    """
    names: dict[Any, list[str]] = {}
    is_builtin = interpreter.tl.core.is_builtin

    def patch(package: Any, builder: Any, *scope: Any) -> None:
        if package not in names:
            names[package] = [
                name for name, member in inspect.getmembers(package) if is_builtin(member)
            ]
        for name in names[package]:
            member = getattr(package, name)
            if not is_builtin(member):  # a call around this one has replaced them all
                return
            interpreter._patch_attr(package, name, member, builder, *scope)

    return patch


def _by_halves(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Neighbours with each other, then what came of them, as a GPU does it, and in numpy each time."""

    @wraps(slow)
    def reduce(self: Any, inputs: tuple[Any, ...]) -> Any:
        axis, shape = self.axis, inputs[0].handle.data.shape
        if axis is None or axis < 0 or self.keep_dims or shape[axis] & (shape[axis] - 1):
            return slow(self, inputs)
        parts, every_other = [one.handle.data for one in inputs], (slice(None),) * axis
        while parts[0].shape[axis] > 1:
            sides = [
                self.to_tensor(part[(*every_other, slice(first, None, 2))], one.dtype)
                for first in (0, 1)
                for part, one in zip(parts, inputs, strict=True)
            ]
            found = self.combine_fn.fn(*sides)
            parts = [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]
        return [
            self.to_tensor(part.squeeze(axis), one.dtype)
            for part, one in zip(parts, inputs, strict=True)
        ]

    return reduce
