"""`quire bench`: one line for each benchmark."""

from __future__ import annotations

import typer

from quire.cli.bench_serve import serve

app = typer.Typer(help="Measure an engine or a server.", no_args_is_help=True, rich_markup_mode=None)
app.callback()(lambda: None)  # with one command alone, typer would leave its name out
app.command("serve")(serve)
