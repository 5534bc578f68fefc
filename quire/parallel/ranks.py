"""Rank 0's side of a group: starts the other ranks and is one itself, in the process that asked for
the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from quire.checkpoints.sources import ModelSource
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.load import WeightReader
from quire.models.load import open_model
from quire.parallel.division import Division
from quire.parallel.group import Group, GroupError
from quire.parallel.messages import Task
from quire.parallel.processes import RankProcesses
from quire.parallel.runner import ParallelRunner
from quire.parallel.share import RankShare, rank_config, rank_device
from quire.process.granted import granted_cores
from quire.process.temporary_folders import temporary_folder
from quire.runner.memory import CachePlan
from quire.runner.runner import Runner

logger = logging.getLogger(__name__)

START_SECONDS = 1800.0
"""Within which all ranks must have loaded their part."""
STEP_SECONDS = 60.0
"""Longer no rank waits for another in a step: then the slow one hangs."""
_MEET_SECONDS = 120.0


class Ranks:
    """A group of processes that compute one model's steps together, this one included."""

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        self.device, is_shared = rank_device(config.device, 0, size)
        cores = granted_cores(Path("/"))
        if self.device.kind == "cpu" and size > cores:
            logger.warning(
                "tensor_parallel_size: %d ranks share %d %s and wait for each other; at most %d is quicker",
                size,
                cores,
                "core" if cores == 1 else "cores",
                cores,
            )
        self.config = rank_config(config, self.device, is_shared)
        self._resources = contextlib.ExitStack()
        self._num_threads = torch.get_num_threads()
        threads = (
            self._num_threads
            if "OMP_NUM_THREADS" in os.environ
            else max(1, self._num_threads // size)
        )
        self._group: Group | None = None
        _check_division(source, size)
        folder = self._resources.enter_context(temporary_folder("quire-ranks-"))
        tasks = [
            Task(
                rank,
                source,
                replace(config, step_log=None),
                str(folder),
                threads,
                START_SECONDS,
                STEP_SECONDS,
            )
            for rank in range(1, size)
        ]
        self._processes = RankProcesses(tasks, partial(_abort, weakref.ref(self)))
        # Also where nobody closes the engine: nothing is left behind when this process ends.
        self._finalizer = weakref.finalize(self, _end, self._processes, self._resources)
        try:
            self.device.make_current()
            torch.set_num_threads(threads)
            self._processes.wait_until_up(_MEET_SECONDS)
            self._group = Group.meet(folder, 0, size, self.device, is_shared, _MEET_SECONDS)
        except BaseException as error:
            raise self.fail(error) from error
        self._group.seconds = START_SECONDS
        self.share = RankShare(self._group)
        where = (
            f"{size} GPUs" if self.device.is_gpu and not is_shared else f"one {self.device.kind}"
        )
        self.description = (
            f"this is rank 0 of {size} on {where}, which gather with {self._group.name}"
        )

    def agree(self, plan: CachePlan) -> CachePlan:
        """The cache that fits on every rank; all of them have loaded their part then."""
        assert self._group is not None
        plan = self.share.agree(plan)
        self._group.seconds = STEP_SECONDS
        if self._group.has_met:
            self._resources.close()
        return plan

    def runner(self, runner: Runner, weights: WeightReader) -> ParallelRunner:
        return ParallelRunner(runner, weights, self._processes, self.close)

    def fail(self, error: BaseException) -> BaseException:
        """Ends the group; what to raise for an error that came up before its first step."""
        found = error
        if isinstance(error, GroupError):
            found = GroupError(self._processes.explain(error))
        elif (
            isinstance(error, Exception)
            and not isinstance(error, QuireError)
            and self._processes.problem is not None
        ):
            found = GroupError(self._processes.problem)
        self.close()
        return found

    def close(self, is_orderly: bool = False) -> None:
        """Ends the other ranks; this process has its threads back."""
        if self._finalizer.detach() is None:
            return
        if self._group is not None:
            self._group.close()
        _end(self._processes, self._resources, is_orderly)
        torch.set_num_threads(self._num_threads)


def _end(
    processes: RankProcesses, resources: contextlib.ExitStack, is_orderly: bool = False
) -> None:
    processes.close(is_orderly)
    if processes.are_own:
        resources.close()


def _check_division(source: ModelSource, size: int) -> None:
    """Says what can't be divided before processes are started for it."""
    files = open_model(source.path)
    files.checkpoint.close()
    Division(files.spec, 0, size)


def _abort(ranks: weakref.ref[Ranks]) -> None:
    """Ends the gathers of a group that is broken. (Whoever listens to ranks keeps no engine alive.)"""
    if (found := ranks()) is not None and found._group is not None:
        found._group.abort()


def start_ranks(source: ModelSource, config: EngineConfig) -> Ranks:
    """Starts the processes, each of which loads its part, and waits until all have found each
    other.
    """
    return Ranks(source, config)
