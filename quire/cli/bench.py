"""`quire bench`: one line for each benchmark."""

from __future__ import annotations

import typer

from quire.cli.bench_compare import compare
from quire.cli.bench_ladder import ladder
from quire.cli.bench_serve import serve
from quire.cli.bench_throughput import latency, throughput

app = typer.Typer(help="Measure engines, techniques and servers.", no_args_is_help=True, rich_markup_mode=None)
app.command("ladder")(ladder)
app.command("throughput")(throughput)
app.command("latency")(latency)
app.command("compare")(compare)
app.command("serve")(serve)
