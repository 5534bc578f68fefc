"""`quire bench`: one line for each benchmark."""

from __future__ import annotations

import typer

from quire.cli.bench.compare import compare
from quire.cli.bench.ladder import ladder
from quire.cli.bench.offline import latency, throughput
from quire.cli.bench.quality import quality
from quire.cli.bench.serve import serve
from quire.cli.grouped_help import WholeSentences

app = typer.Typer(
    help="Measure engines, techniques and servers.",
    cls=WholeSentences,
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (ladder, throughput, latency, compare, quality, serve):
    app.command()(command)
