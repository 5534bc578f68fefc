"""Makes Triton's interpreter quicker, with the same numbers: most of what its kernels take here is
looking up types, looking for functions to replace at every call, making the shapes of numbers anew,
asking by five operations whether an integer overflowed, and reductions that go number by number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np


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
    core = interpreter.tl.core
    core.block_type.__init__ = _shape_made_once(core)
    core.tensor.__init__ = _sizes_made_once(core)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _replaced_once(interpreter)
    semantic = interpreter.TritonSemantic
    semantic.binary_op_type_checking_impl = _none_for_equal_types(
        semantic.binary_op_type_checking_impl, core
    )
    semantic.broadcast_impl_value = _none_for_equal_shapes(semantic.broadcast_impl_value)
    if hasattr(semantic, "binary_op_sanitize_overflow_impl"):
        semantic.binary_op_sanitize_overflow_impl = _compared_at_once(
            semantic.binary_op_sanitize_overflow_impl
        )


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


def _replaced_once(interpreter: Any) -> Callable[[Any], Any]:
    """A function that a kernel calls finds everything replaced for the kernel already."""
    slow, core = interpreter._patch_lang, interpreter.tl.core
    needed: dict[Any, set[str]] = {}
    replaced: set[str] = set()

    def replace(function: Any) -> Any:
        if function not in needed:
            languages = (interpreter.tl, core)
            modules = function.__globals__.values()
            needed[function] = {
                one.__name__ for one in languages if any(module is one for module in modules)
            }
        added = needed[function] - replaced
        if needed[function] and not added:
            return interpreter._LangPatchScope()
        scope = slow(function)
        restore = scope.restore

        def end() -> None:  # only kernels put back what was replaced, functions leave it to them
            replaced.clear()
            restore()

        scope.restore = end
        replaced.update(added)
        return scope

    return replace


def _none_for_equal_types(slow: Callable[..., Any], core: Any) -> Callable[..., Any]:
    """Two tensors of the same type have that of the result, unless they are divided."""

    @wraps(slow)
    def convert(self: Any, left: Any, right: Any, *pointers: bool, **more: bool) -> Any:
        if isinstance(left, core.tensor) and isinstance(right, core.tensor):
            kind = left.type.scalar
            is_divided = len(pointers) > 2 or more.get("div_or_mod", False)
            if not is_divided and not kind.is_ptr() and kind == right.type.scalar:
                return self.broadcast_impl_value(left, right)
        return slow(self, left, right, *pointers, **more)

    return convert


def _shape_made_once(core: Any) -> Callable[..., None]:
    """Of a block's type: its shape is checked, counted and written out where it is new."""
    slow = core.block_type.__init__
    known: dict[Any, tuple[Any, int, str]] = {}

    @wraps(slow)
    def make(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = (element_ty.name, *sizes)
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
            return
        slow(self, element_ty, shape)
        known[key] = self.shape, self.numel, self.name

    return make


def _sizes_made_once(core: Any) -> Callable[..., None]:
    """Of a tensor, whose shape is that of its type, in other words."""
    slow = core.tensor.__init__
    known: dict[Any, tuple[Any, Any]] = {}

    @wraps(slow)
    def make(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape.values,) if type.is_block() else ()
        if key in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[key]
            return
        slow(self, handle, type)
        known[key] = self.shape, self.numel

    return make


def _none_for_equal_shapes(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is to be broadcast then."""

    @wraps(slow)
    def broadcast(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block():
            if left.type.shape.values == right.type.shape.values:
                return left, right
        elif not left.type.is_block() and not right.type.is_block():
            return left, right
        return slow(self, left, right)

    return broadcast


def _compared_at_once(slow: Callable[..., None]) -> Callable[..., None]:
    """Whether an integer overflows. Where one does, the interpreter says so itself."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    @wraps(slow)
    def check(self: Any, left: Any, right: Any, operation: Any) -> None:
        kind, compute = left.type.scalar, operations.get(operation.__name__)
        if kind.int_bitwidth < 64 and compute is not None:
            numbers = (one.handle.data.astype(np.int64) for one in (left, right))
            found = compute(*numbers)
            if found.max() <= kind.get_int_max_value() and found.min() >= kind.get_int_min_value():
                return
        slow(self, left, right, operation)

    return check


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
