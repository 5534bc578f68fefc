"""`quire models` and `quire pull`: the models on this machine, and how one gets there."""

from __future__ import annotations

from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument

from quire.frontend.progress import ModelBars


def models() -> None:
    """List the models on this machine: name, format, size, and where they are."""
    from quire.checkpoints.download import ALIASES
    from quire.checkpoints.sources import list_models
    from quire.config import format_bytes

    found = list_models()
    table = Table("MODEL", "FORMAT", "SIZE", "SOURCE", "PATH", box=None, pad_edge=False)
    for model in found:
        size = format_bytes(model.num_bytes)
        table.add_row(model.name, model.format, size, model.source, str(model.path), style=None)
    console = Console(highlight=False, soft_wrap=True)
    if found:
        console.print(table)
    missing = [alias for alias in ALIASES if alias not in {model.name for model in found}]
    if missing:
        print(f"Not here yet: {', '.join(missing)}. Fetch with: quire pull {missing[0]}")


def pull(
    model: Annotated[
        str, Argument(metavar="MODEL", help="An alias (smollm2) or a Hugging Face id (org/name).")
    ],
) -> None:
    """Fetch a model, so that it runs without network later.

    \b
    quire pull smollm2
    quire pull Qwen/Qwen3-0.6B
    """
    from quire.checkpoints.sources import resolve

    with ModelBars(model) as bars:
        source = resolve(model, progress=bars("download"))
    print(f"{model}: {source.path} ({source.origin})")
