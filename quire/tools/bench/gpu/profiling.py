"""Where a step's time goes: GPU time by kernel, how busy the GPU is, and the CPU's part in each
step.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from quire.engine import EngineCore, Request
from quire.engine.core import Pending
from quire.step import StepResult
from quire.tools.bench.random_engine import Machine

GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
"""What the profiler's trace calls work of the GPU."""


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """What the GPU did between the first and the last kernel of a trace. All times in microseconds."""

    span: float
    busy: float
    """How long at least one kernel ran (with dependent launches, neighbours overlap)."""
    by_name: dict[str, tuple[int, float]]
    """Calls and summed time of each kernel."""


def gpu_times(events: Iterable[dict[str, Any]]) -> GpuTimes | None:
    """Adds up a trace's events (as in its `traceEvents`); None if there is no GPU work among them."""
    work = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in GPU_KINDS)
    if not work:
        return None
    by_name: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    busy, reached = 0.0, work[0][0]
    for start, duration, name in work:
        calls, total = by_name[name]
        by_name[name] = (calls + 1, total + duration)
        end = start + duration
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return GpuTimes(reached - work[0][0], busy, dict(by_name))


class StepClock:
    """Times the parts of an engine's steps on the CPU, while it is attached."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.seconds: dict[str, float] = dict.fromkeys(
            ("schedule", "submit", "wait", "commit"), 0.0
        )
        """`wait` is from asking for a step's result until it is there, made into Python values."""

    def __enter__(self) -> StepClock:
        scheduler, runner = self._core.scheduler, self._core.runner
        submit = self._timed("submit", runner.submit)
        # On the objects, not their classes: deleting them uncovers the methods again.
        scheduler.schedule = self._timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
        scheduler.commit = self._timed("commit", scheduler.commit)  # type: ignore[method-assign]
        runner.submit = lambda step: _TimedPending(submit(step), self)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._core.scheduler.schedule, self._core.scheduler.commit, self._core.runner.submit

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return timed


class _TimedPending:
    """A submitted step whose wait is timed."""

    def __init__(self, pending: Pending, clock: StepClock) -> None:
        self.result: Callable[[], StepResult] = clock._timed("wait", pending.result)


def profile(machine: Machine, requests: Sequence[Request], skip: int, steps: int) -> str:
    """Runs the requests until `steps` steps after the first `skip` were watched; returns the
    tables.

    The profiler slows the CPU down, so the CPU's parts are timed in as many steps of their own,
    after those.
    """
    core = machine.core
    for request in requests:
        core.add_request(request, time.perf_counter())
    _advance(core, skip)
    tables = []
    if machine.engine.decoder.device.type == "cuda":
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            _advance(core, steps)
            torch.cuda.synchronize()
        tables.append(_gpu_table(_events(trace), steps))
    with StepClock(core) as clock:
        began = time.perf_counter()
        _advance(core, steps)
        seconds = time.perf_counter() - began
    tables.append(_cpu_table(clock, steps, seconds))
    core.abort([request.request_id for request in requests], time.perf_counter())
    while core.has_work:
        core.step(time.perf_counter())
    return "\n\n".join(tables)


def _advance(core: EngineCore, steps: int) -> None:
    for done in range(steps):
        if not core.has_work:
            raise RuntimeError(
                f"the requests ended {steps - done} steps too early to be profiled: ask for fewer steps"
            )
        core.step(time.perf_counter())


def _events(trace: torch.profiler.profile) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _gpu_table(events: Sequence[dict[str, Any]], steps: int, most: int = 25) -> str:
    times = gpu_times(events)
    if times is None:
        return "The profiler saw no GPU work."
    lines = [
        f"GPU, {steps} steps: {times.span / steps / 1e3:.3f} ms a step, busy {times.busy / times.span:.1%}",
        f"{'us/step':>9} {'share':>6} {'calls/step':>10} {'us/call':>9}  kernel",
    ]
    whole = sum(total for _, total in times.by_name.values())
    ordered = sorted(times.by_name.items(), key=lambda item: -item[1][1])
    for name, (calls, total) in ordered[:most]:
        lines.append(
            f"{total / steps:9.1f} {total / whole:6.1%} {calls / steps:10.1f} {total / calls:9.2f}  {name[:90]}"
        )
    if len(ordered) > most:
        rest = sum(total for _, (_, total) in ordered[most:])
        lines.append(
            f"{rest / steps:9.1f} {rest / whole:6.1%} {'':>10} {'':>9}  {len(ordered) - most} more kernels"
        )
    return "\n".join(lines)


def _cpu_table(clock: StepClock, steps: int, seconds: float) -> str:
    lines = [f"CPU, {steps} steps: {1e3 * seconds / steps:.3f} ms a step, of which"]
    lines += [f"{1e6 * spent / steps:9.1f} us  {part}" for part, spent in clock.seconds.items()]
    rest = seconds - sum(clock.seconds.values())
    lines.append(f"{1e6 * rest / steps:9.1f} us  everything else (the loop, the step log)")
    return "\n".join(lines)
