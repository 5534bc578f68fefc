"""Torch's libraries, on their way into memory before torch is imported."""

from __future__ import annotations

import ctypes
import os
import threading
from importlib.util import find_spec
from pathlib import Path


def load_torch_libraries() -> None:
    """Begins to load torch's libraries, hundreds of megabytes, in a thread; importing torch then
    finds them there.

    An import of them keeps Python to itself; calling the linker, as here, lets it go on meanwhile.
    Where this can't be done, nothing happens.
    """
    found = find_spec("torch")
    if found is None or found.origin is None:
        return
    library = Path(found.origin).parent / "lib" / "libtorch_python.so"
    if not library.exists():
        return

    def load() -> None:
        ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_NOW | os.RTLD_LOCAL)

    # Not a daemon: a program that ends at once waits for it, or libraries would be torn down while
    # they are built up.
    threading.Thread(target=load, name="torch's libraries").start()
