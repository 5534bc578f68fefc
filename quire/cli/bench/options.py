"""Options the benchmarks share, and what becomes of their reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from quire.cli.terminal import say

if TYPE_CHECKING:
    from quire.tools.bench.report import Report

Requests = Annotated[int, Option("--requests", metavar="N", min=1, help="How many requests.")]
PromptTokens = Annotated[str, Option(metavar="N|LOW-HIGH", help="How long prompts are.")]
NewTokens = Annotated[
    str, Option(metavar="N|LOW-HIGH", help="How many tokens are generated for each.")
]
Repeats = Annotated[int, Option(metavar="N", min=1, help="How often everything is measured.")]
MaxNumSeqs = Annotated[int, Option(metavar="N", min=1, help="How many requests run at once.")]
MarkdownFile = Annotated[
    Path | None, Option("--markdown", metavar="FILE", help="Write the report here, too.")
]
JsonFile = Annotated[
    Path | None, Option("--json", metavar="FILE", help="Write the raw figures here.")
]


def deliver(report: Report, markdown: Path | None, json_file: Path | None) -> None:
    """Prints a report and writes the files that were asked for."""
    report.print()
    report.write(markdown, json_file)
    for path in (markdown, json_file):
        if path is not None:
            say(f"wrote {path}")
