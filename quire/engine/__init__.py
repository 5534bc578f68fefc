"""The engine: requests, blocks, the scheduler and its loop. Pure Python: no tensors, no clock, no chance."""

from quire.engine.config import SchedulerConfig
from quire.engine.core import EngineCore, Pending, Runner
from quire.engine.request import Request, RequestStatus, make_requests
from quire.engine.scheduler import Scheduler
from quire.step import RequestMetrics, RequestUpdate, Step, StepResult

__all__ = [
    "EngineCore",
    "Pending",
    "Request",
    "RequestMetrics",
    "RequestStatus",
    "RequestUpdate",
    "Runner",
    "Scheduler",
    "SchedulerConfig",
    "Step",
    "StepResult",
    "make_requests",
]
