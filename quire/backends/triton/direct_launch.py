"""Launches of kernels that were launched in the same form before, in a tenth of the host's time.

Triton finds out anew at each launch which compiled form of a kernel its arguments need: it asks a
function for every argument, makes text of the answers, and calls hooks that nobody has set. Here a
form is found by a key of what Triton distinguishes, and its launcher is called with addresses. A
form's first launch goes Triton's way, and so does all that this knows nothing about: another
version of Triton, another kind of argument, or a time when somebody else has taken launches over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelInterface

from quire.backends.triton.launch import HAS_GLUON, INTERPRETED

KNOWS_LAUNCHERS = not INTERPRETED and triton.__version__.startswith("3.6.")
"""Whether this is the Triton whose launchers `direct_form` knows."""

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")
_MOST_FORMS = 4096
"""Keys of one kernel: numbers are in them as they are, so that one which always changes would fill
the memory.
"""
_TENSOR, _DESCRIPTOR, _NUMBER = "tensor", "descriptor", "number"


class _Absent:
    """Stands for an option that was not given; None is another value to Triton."""


_ABSENT = _Absent()
_ordinary = KernelInterface.__getitem__
_runtime: Any = triton.knobs.runtime if hasattr(triton, "knobs") else None
_before_launch = getattr(_runtime, "launch_enter_hook", None)
_after_launch = getattr(_runtime, "launch_exit_hook", None)


def is_watched() -> bool:
    """Whether somebody (a profiler) wants to be told of launches."""
    return (
        _runtime.launch_enter_hook is not _before_launch
        or _runtime.launch_exit_hook is not _after_launch
        or bool(_before_launch.calls or _after_launch.calls)
    )


class DirectLaunches:
    """What a kernel of Triton's has before its own class."""

    params: list[Any]
    pre_run_hooks: list[Any]
    run: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._launch: Callable[..., None] = self._by_kinds
        self._variants: dict[tuple[object, ...], Callable[..., None]] = {}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        # whoever compiles or counts kernels puts something else there
        if KernelInterface.__getitem__ is not _ordinary or self.pre_run_hooks or is_watched():
            ordinary: Callable[..., Any] = KernelInterface.__getitem__(self, grid)
            return ordinary
        return partial(self._launch, grid)

    def _by_kinds(self, grid: Any, /, **arguments: Any) -> None:
        """Launches by the function for such arguments, and tries it first from now on."""
        kinds = _kinds_of(self.params, grid, arguments)
        if kinds is None:
            self.run(grid=grid, warmup=False, **arguments)
            return
        if kinds not in self._variants:
            self._variants[kinds] = _variant(self, kinds)
        self._launch = self._variants[kinds]
        self._launch(grid, **arguments)

    def _launch_slowly(
        self,
        kinds: tuple[object, ...],
        forms: dict[tuple[object, ...], Any],
        key: tuple[object, ...] | None,
        grid: Any,
        arguments: Mapping[str, Any],
    ) -> None:
        """What the function for arguments of these kinds has not launched yet, or can't: then there
        is no key.
        """
        arguments = {name: value for name, value in arguments.items() if value is not _ABSENT}
        if _kinds_of(self.params, grid, arguments) != kinds:
            self._by_kinds(grid, **arguments)
            return
        compiled = self.run(grid=grid, warmup=False, **arguments)
        form = direct_form(compiled)
        if form is not None and key is not None:
            if len(forms) >= _MOST_FORMS:
                forms.clear()
            forms[key] = form


def direct_form(kernel: Any) -> tuple[object, ...] | None:
    """What launches a compiled kernel: its launcher in C, and what this takes between the stream and
    the kernel's arguments. None for kernels that need memory for each launch.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    run = None if kernel is None else kernel.run
    if (
        not isinstance(run, CudaLauncher)
        or run.global_scratch_size > 0
        or run.profile_scratch_size > 0
    ):
        return None
    is_cooperative, is_early = run.launch_cooperative_grid, run.launch_pdl
    return run.launch, kernel.function, is_cooperative, is_early, kernel.packed_metadata


def _kinds_of(
    parameters: list[Any], grid: Any, arguments: Mapping[str, Any]
) -> tuple[object, ...] | None:
    """How long the grid is, and what each argument is that is not a constant of the kernel's; None if
    this is nothing that can be launched directly.
    """
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3:
        return None
    names = {one.name for one in parameters}
    if any(name.startswith("_") for name in names) or arguments.keys() - names - set(_OPTIONS):
        return None
    kinds: list[object] = [len(grid)]
    for one in parameters:
        if one.is_constexpr:
            continue
        value = arguments.get(one.name, one.default)
        if isinstance(value, Tensor):
            kinds.append(_TENSOR)
        elif isinstance(value, int | float) or value is None:
            kinds.append(_NUMBER)
        elif all(hasattr(value, name) for name in ("base", "block_shape", "layout")):
            kinds.append(_DESCRIPTOR)
        else:
            return None
        if one.annotation_type:  # Triton asks less of such an argument; we have none
            return None
    return tuple(kinds)


def _variant(kernel: Any, kinds: tuple[Any, ...]) -> Callable[..., None]:
    """The function that launches the kernel with arguments of these kinds. It is written out, as
    Triton does for what binds arguments: a loop over them would take several times as long. All
    names but those of arguments and options begin with an underscore.
    """
    size, *of_arguments = kinds
    left = iter(of_arguments)
    key, aligned, read, passed = ["_device"], [], [], []
    for one in kernel.params:
        name, kind = one.name, None if one.is_constexpr else next(left)
        passed.append(name)
        if kind is None:
            key.append(name)
        elif kind == _TENSOR:
            address = passed[-1] = f"_address_of_{name}"
            read.append(f"{address} = {name}.data_ptr()")
            key.append(f"{name}.dtype")
            if not (one.do_not_specialize or one.do_not_specialize_on_alignment):
                aligned.append(address)
        elif kind == _DESCRIPTOR:
            key += [f"{name}.base.dtype", f"tuple({name}.block_shape)", f"{name}.layout"]
        elif one.do_not_specialize:
            key.append(f"{name}.__class__")
            key.append(f"{name} is None or -0x80000000 <= {name} <= 0x7fffffff")
            key.append(f"{name} is not None and {name} > 0x7fffffffffffffff")
        else:
            key += [f"{name}.__class__", name]  # True and 1.0 are equal to 1, and of other types
    if aligned:
        each = ", ".join(f"{address} & 15 == 0" for address in aligned)
        key.append(f"({' | '.join(aligned)}) & 15 and ({each},)")
    sizes = ["_x", "_y", "_z"][:size]
    defaults = {one.name: one.default for one in kernel.params if one.has_default}
    defaults |= dict.fromkeys(_OPTIONS, _ABSENT)
    names = [*(one.name for one in kernel.params), *_OPTIONS]
    parameters = [f"{name}=_defaults[{name!r}]" if name in defaults else name for name in names]
    given = f"{{{', '.join(f'{name!r}: {name}' for name in names)}, **_others}}"
    source = f"""
def _launch(_grid, /, *, {", ".join(parameters)}, **_others):
    try:
        {", ".join(sizes)}, = _grid
        {"; ".join(read) or "pass"}
        _device = _get_device()
        _key = {", ".join([*key, *_OPTIONS])}
        _form = _forms.get(_key)
    except (AttributeError, TypeError, ValueError):
        _key = _form = None
    if _form is None or _others:
        return _launch_slowly(_kinds, _forms, _key, _grid, {given})
    _run, _function, _is_cooperative, _is_early, _metadata = _form
    _run({", ".join(sizes + ["1"] * (3 - len(sizes)))}, _get_stream(_device), _function,
         _is_cooperative, _is_early, None, None, _metadata, None, None, None, {", ".join(passed)})
"""
    driver = triton.runtime.driver.active
    get_device = driver.get_current_device
    if get_device is torch.cuda.current_device:
        get_device = (
            torch._C._cuda_getDevice
        )  # the same, without a look at whether CUDA was started
    space: dict[str, Any] = {
        "_forms": {},
        "_kinds": kinds,
        "_defaults": defaults,
        "_get_device": get_device,
        "_get_stream": driver.get_current_stream,
        "_launch_slowly": kernel._launch_slowly,
    }
    exec(source, space)  # noqa: S102  (names from a kernel's own source)
    launch: Callable[..., None] = space["_launch"]
    return launch


class DirectKernel(DirectLaunches, JITFunction):  # type: ignore[misc]
    """A kernel of Triton's."""


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit` for kernels that the host launches."""
    if not KNOWS_LAUNCHERS:
        return triton.jit(function, **options)
    return partial(jit, **options) if function is None else DirectKernel(function, **options)


if HAS_GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon._runtime import GluonJITFunction

    class DirectGluonKernel(DirectLaunches, GluonJITFunction):  # type: ignore[misc]
        """A kernel of Gluon's."""

    def gluon_jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """`gluon.jit` for kernels that the host launches."""
        if not KNOWS_LAUNCHERS:
            return gluon.jit(function, **options)
        return (
            partial(gluon_jit, **options)
            if function is None
            else DirectGluonKernel(function, **options)
        )
