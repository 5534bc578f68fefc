"""How many threads torch computes with."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from quire.process.granted import granted_cores


def use_own_cores() -> None:
    """Sets torch to one thread per core that this process really has: torch counts the cores it may
    run on, but not how much of their time a container is granted. A number set by the user
    (OMP_NUM_THREADS) stays.
    """
    cores = granted_cores(Path("/"))
    if cores < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
