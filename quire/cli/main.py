"""`quire`: where every command starts and every error ends."""

from __future__ import annotations

import os
import sys

import typer

from quire.cli import bench
from quire.cli.batch import batch
from quire.cli.chat import chat
from quire.cli.explain import explain
from quire.cli.grouped_help import GroupedCommand, WholeSentences
from quire.cli.inspect import inspect
from quire.cli.models import models, pull
from quire.cli.plan import plan
from quire.cli.quantize import quantize
from quire.cli.replay import replay
from quire.cli.run import run
from quire.cli.serve import serve
from quire.cli.verify import verify
from quire.errors import QuireError
from quire.process.gc_pauses import full_collections_put_off
from quire.process.preload import load_torch_libraries

app = typer.Typer(
    name="quire",
    cls=WholeSentences,
    help="Quire runs open language models: exact, fast, and small enough to read.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    run,
    chat,
    serve,
    batch,
    inspect,
    pull,
    models,
    quantize,
    verify,
    explain,
    plan,
    replay,
):
    app.command(cls=GroupedCommand)(command)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    if show:
        from quire import __version__

        typer.echo(f"quire {__version__}")
        raise typer.Exit()


def main() -> None:
    """Runs the command line. A QuireError is a message, not a stack trace."""
    try:
        if sys.argv[1:2] in (["run"], ["chat"]):
            load_torch_libraries()  # while the command is read
        # From the start: torch brings more than a hundred thousand objects, and none of them is
        # garbage.
        with full_collections_put_off():
            app(prog_name="quire")
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has enough. Nothing more can be written, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    main()
