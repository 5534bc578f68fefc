"""`quire models`: what is on this machine."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def models() -> None:
    """List the models on this machine: name, format, size, and where they are."""
    from quire.config import format_bytes
    from quire.models.download import ALIASES
    from quire.models.sources import list_models

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
