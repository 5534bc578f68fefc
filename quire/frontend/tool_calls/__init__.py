"""Tool calls in a model's text: formats, incremental parsers, grammars that force them, prompts for
models whose template does not know them. `plan.ToolSupport` is the way in.
"""

from quire.frontend.tool_calls.parser import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallParser,
)
from quire.frontend.tool_calls.plan import ToolPlan, ToolSupport

__all__ = [
    "ArgumentsDelta",
    "CallStart",
    "ContentDelta",
    "Delta",
    "ReasoningDelta",
    "ToolCallParser",
    "ToolPlan",
    "ToolSupport",
]
