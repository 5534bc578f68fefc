"""Kernels that no card has run yet: an engine uses them only where a variable names them, so that
who has a card can test and time them. Without it nothing changes.
"""

from __future__ import annotations

import os

from quire.errors import DeviceError

VARIABLE = "QUIRE_UNTRIED_KERNELS"
NAMES = ("recurrent", "latent", "adapters", "experts")
"""Layers with a state (docs/recurrent.md), latent attention (docs/latent.md), adapters
(docs/adapters.md), experts in integers with scales (docs/performance.md, attempt 55) and shared
experts among the others (attempt 57).
"""


def is_on(name: str) -> bool:
    """Whether the variable, names with commas between them, has this one."""
    wanted = [one.strip() for one in os.environ.get(VARIABLE, "").split(",") if one.strip()]
    if unknown := [one for one in wanted if one not in NAMES]:
        raise DeviceError(
            f"{VARIABLE} names {', '.join(unknown)}, but there are only: {', '.join(NAMES)}"
        )
    return name in wanted
