"""Kernels that no card has run yet: refused, unless the environment variable names them."""

from __future__ import annotations

import os

VARIABLE = "QUIRE_UNTRIED_KERNELS"
"""Names of kernels that are used nevertheless, separated by commas."""


def is_on(name: str) -> bool:
    """Whether the variable names these kernels."""
    return name in os.environ.get(VARIABLE, "").replace(" ", "").split(",")
