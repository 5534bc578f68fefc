"""Options the benchmarks share, and what becomes of their reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.terminal import say
from quire.errors import InvalidRequestError

if TYPE_CHECKING:
    from quire.benchmark.report import Report

Requests = Annotated[int, typer.Option("--requests", metavar="N", min=1, help="How many requests.")]
PromptTokens = Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="How long prompts are.")]
NewTokens = Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="How many tokens are generated for each.")]
Repeats = Annotated[int, typer.Option(metavar="N", min=1, help="How often everything is measured.")]
MaxNumSeqs = Annotated[int, typer.Option(metavar="N", min=1, help="How many requests run at once.")]
Kernels = Annotated[str, typer.Option(metavar="auto|reference|...", help="Which kernels; auto: the fastest here.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the report here, too.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the raw figures here.")]


def deliver(report: Report, markdown: Path | None, json_file: Path | None) -> None:
    """Prints a report and writes the files that were asked for."""
    report.print()
    try:
        report.write(markdown, json_file)
    except OSError as error:
        raise InvalidRequestError("--markdown/--json", f"the report can't be written: {error}") from None
    for path in (markdown, json_file):
        if path is not None:
            say(f"wrote {path}")
