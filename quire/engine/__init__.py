"""The engine: requests, blocks, the scheduler and its loop. Pure Python: no tensors, no clock, no
chance.
"""

from quire.engine.config import SchedulerConfig as SchedulerConfig
from quire.engine.core import EngineCore as EngineCore
from quire.engine.request import Request as Request
from quire.engine.request import make_requests as make_requests
from quire.engine.scheduler import Scheduler as Scheduler
