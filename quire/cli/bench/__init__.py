"""`quire bench`: one line for each benchmark."""

from __future__ import annotations

import typer

from quire.cli.bench.ladder import ladder
from quire.cli.bench.offline import compare, latency, throughput
from quire.cli.bench.serve import serve

app = typer.Typer(help="Measure engines, techniques and servers.", no_args_is_help=True, rich_markup_mode=None)
for command in (ladder, throughput, latency, compare, serve):
    app.command()(command)
