"""`--help` in groups: a command's own options first, then those that many commands share. Click's
types have no names here: some versions of typer bring a click of their own.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from quire.config import EngineConfig
from quire.field_checks import parameters
from quire.sampling_params import SamplingParams

_SHARED = {
    "Sampling options": frozenset(parameters(SamplingParams)) | {"json_schema"},
    "Engine options": frozenset(parameters(EngineConfig)),
}


class WholeSentences(TyperGroup):
    """A group of commands whose help says a whole sentence about each, however narrow the terminal
    is: click would cut it.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(limit=1000)) for name, one in commands if one]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class GroupedCommand(TyperCommand):
    """A command whose help names its groups of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(self._group_of(param), []).append(record)
        for title in ("Arguments", "Options", *_SHARED):
            if title in groups:
                with formatter.section(title):
                    formatter.write_dl(groups[title])

    @staticmethod
    def _group_of(param: Any) -> str:
        if param.param_type_name == "argument":
            return "Arguments"
        shared = (title for title, names in _SHARED.items() if param.name in names)
        return next(shared, "Options")
