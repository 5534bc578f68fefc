"""Tool calls in a model's text: formats, incremental parsers, grammars that force them, prompts for models whose
template does not know them. `plan.ToolSupport` is the way in."""

from quire.frontend.tool_calls.deltas import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Delta,
    ParsedAnswer,
    ParsedCall,
    ToolCallParser,
    collect,
    parse,
)
from quire.frontend.tool_calls.plan import ToolPlan, ToolSupport, detect_format

__all__ = [
    "ArgumentsDelta",
    "CallStart",
    "ContentDelta",
    "Delta",
    "ParsedAnswer",
    "ParsedCall",
    "ToolCallParser",
    "ToolPlan",
    "ToolSupport",
    "collect",
    "detect_format",
    "parse",
]
