"""Packs a C++ function's arguments, by names. Both sides have a list of them, which are compared
when a library is loaded: `functions.py` here, the struct's `QUIRE_ARGUMENTS` there.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from typing import Any, NamedTuple, ParamSpec, Protocol

from torch import Tensor

from quire.backends.cpu.functions import Address
from quire.errors import DeviceError

P = ParamSpec("P")
Recorded = list[tuple[int, bytes]]
"""Addresses of functions, and the arguments they were called with."""

_TYPES = {"P": "a pointer", "q": "an int64_t", "i": "an int", "f": "a float"}
"""By the letters of Python's `struct`."""


class Recorder(Protocol):
    recorded: Recorded | None

    def note(self, function: int, arguments: bytes) -> None:
        """Asked only while there is a list."""


class _Kind(NamedTuple):
    """What a declared argument may be in C++, and how its number is found."""

    letters: str
    packed: str


_CALL = """_packed = _pack({})
if _recorder.recorded is not None:
  _recorder.note(_address, _packed)
_function(_packed)"""
"""What a function does; names of arguments don't begin with an underscore."""

_KINDS: dict[object, _Kind] = {
    Tensor: _Kind("P", "{0}.data_ptr()"),
    Tensor | None: _Kind("P", "0 if {0} is None else {0}.data_ptr()"),
    Address: _Kind("P", "{0}"),
    int: _Kind("qi", "{0}"),
    bool: _Kind("qi", "{0}"),
    float: _Kind("f", "{0}"),
}


def packer(declared: Callable[P, None]) -> Callable[P, bytes]:
    """A function that makes a struct of the declared arguments, whose integers are int64_t. Of the
    library that reads it, `check_packer` must be asked.
    """
    made: Callable[P, bytes] = _written(declared, "_pack", "return _pack({})")(
        _own_layout(declared).pack
    )
    return made


def check_packer(library: ctypes.CDLL, declared: Callable[..., None]) -> None:
    name = declared.__name__
    if _checked_layout(library, name, declared).format != _own_layout(declared).format:
        raise DeviceError(f"{name} of the compiled CPU kernels has an integer that is no int64_t.")


def caller(
    library: ctypes.CDLL, name: str, declared: Callable[P, None], recorder: Recorder
) -> Callable[P, None]:
    """The C++ function `quire_{name}` as a Python one, whose calls the recorder gets while it has a
    list for them.
    """
    layout = _checked_layout(library, name, declared)
    function = exported(library, f"quire_{name}")
    function.argtypes, function.restype = [ctypes.c_char_p], None
    address = ctypes.cast(function, ctypes.c_void_p).value
    make = _written(declared, "_pack, _function, _address, _recorder", _CALL)
    made: Callable[P, None] = make(layout.pack, function, address, recorder)
    return made


def exported(library: ctypes.CDLL, symbol: str) -> Any:
    try:
        return library[symbol]
    except AttributeError as error:
        raise DeviceError(
            f"The compiled CPU kernels have no {symbol}: delete them, they are built anew."
        ) from error


def exported_text(library: ctypes.CDLL, symbol: str) -> str:
    """What a function without arguments says."""
    function = exported(library, symbol)
    function.argtypes, function.restype = [], ctypes.c_char_p
    text: bytes = function()
    return text.decode()


def check_names(library: ctypes.CDLL, symbol: str, names: Sequence[str]) -> None:
    """Names whose positions are numbers must be those of the library."""
    theirs = exported_text(library, symbol).upper().split(", ")
    if theirs != list(names):
        raise DeviceError(
            f"{symbol} of the compiled CPU kernels has {theirs}, functions.py has {list(names)}."
        )


def _checked_layout(library: ctypes.CDLL, name: str, declared: Callable[..., None]) -> Struct:
    """The struct that the library says it reads, if its fields are the declared arguments."""

    def differs(what: str) -> DeviceError:
        return DeviceError(
            f"quire_{name} of the compiled CPU kernels is not what functions.py declares: {what}."
        )

    declaration = _kinds(declared)
    names, places, size = exported_text(library, f"quire_{name}_arguments").split(";")
    letters = ""
    for field, place in zip(names.split(", "), places.split(), strict=True):
        letter, offset = place[0], int(place[1:])
        argument = next(iter(list(declaration)[len(letters) :]), None)
        if argument != field:
            raise differs(f"argument {len(letters)} is {argument}, and {field} in the library")
        if letter not in declaration[argument].letters:
            expected = " or ".join(_TYPES[one] for one in declaration[argument].letters)
            raise differs(f"argument {argument} is {expected}, and {_TYPES[letter]} in the library")
        letters += letter
        if Struct(letters).size - Struct(letter).size != offset:
            raise differs(f"QUIRE_ARGUMENTS leaves out a field before {field}")
    if len(letters) < len(declaration):
        raise differs(f"argument {list(declaration)[len(letters)]} is not in the library")
    if Struct(f"{letters}0P").size != int(size):
        raise differs("QUIRE_ARGUMENTS leaves out the last field")
    return Struct(letters)


def _own_layout(declared: Callable[..., None]) -> Struct:
    return Struct("".join(kind.letters[0] for kind in _kinds(declared).values()))


@cache
def _kinds(declared: Callable[..., None]) -> dict[str, _Kind]:
    parameters = inspect.signature(declared, eval_str=True).parameters
    return {name: _KINDS[parameter.annotation] for name, parameter in parameters.items()}


@cache
def _written(declared: Callable[..., None], given: str, body: str) -> Callable[..., Any]:
    """A function that is given some values and makes one with the declared arguments, whose numbers
    go into the body.

    It is written and compiled here: a loop that asks of every argument what it is would take longer
    than many of the C++ functions do.
    """
    kinds = _kinds(declared)
    numbers = ", ".join(kind.packed.format(name) for name, kind in kinds.items())
    lines = body.format(numbers).splitlines()
    name = declared.__name__  # in tracebacks, and where arguments are missing
    source = [
        f"def make({given}):",
        f"  def {name}(*, {', '.join(kinds)}):",
        *(f"    {line}" for line in lines),
    ]
    scope: dict[str, Any] = {}
    exec("\n".join([*source, f"  return {name}"]), scope)  # noqa: S102  (of names in functions.py only)
    make: Callable[..., Any] = scope["make"]
    return make
