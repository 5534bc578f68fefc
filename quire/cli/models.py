"""`quire models` and `quire pull`: the models on this machine, those that could be, and how one gets
there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from typer import Argument, Option

from quire.frontend.progress import ModelBars

_FITS = {
    "fits": "yes",
    "int8": "with --quantization int8",
    "int4": "with --quantization int4",
    "no": "no",
}


def models(
    available: Annotated[
        bool, Option("--available", help="List what `quire pull` knows by a short name.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per model.")] = False,
) -> None:
    """List the models on this machine: name, format, size, and where they are.

    \b
    quire models
    quire models --available
    quire models --json
    """
    rows, note = _list_available() if available else _list_here()
    if as_json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
        return
    if rows:
        print_table(rows)
    if note:
        print(note)


def _list_here() -> tuple[list[dict[str, Any]], str]:
    from quire.checkpoints.download import ALIASES
    from quire.checkpoints.sources import list_models

    found = list_models()
    rows = [
        {
            "model": model.name,
            "format": model.format,
            "bytes": model.num_bytes,
            "source": model.source,
            "path": str(model.path),
        }
        for model in found
    ]
    missing = [alias for alias in ALIASES if alias not in {model.name for model in found}]
    more = "`quire models --available` lists others."
    if not missing:
        return rows, more
    return rows, (
        f"Not here yet: {', '.join(missing)}. Fetch with: quire pull {missing[0]}. {more}"
    )


def _list_available() -> tuple[list[dict[str, Any]], str]:
    from quire.backends.select import pick_device
    from quire.checkpoints.catalogue import CATALOGUE

    device = pick_device("auto")
    memory = device.free_memory()
    rows = [
        {
            "name": entry.name,
            "model": entry.repo,
            "parameters": f"{entry.billions:g}B",
            "bytes": entry.num_bytes,
            "format": entry.format,
            "fits_here": _FITS[entry.fit(memory)],
            "licence": entry.licence + (" (gated)" if entry.is_gated else ""),
        }
        for entry in CATALOGUE.values()
    ]
    from quire.config import format_bytes

    return rows, (
        f"Fits here: in the {format_bytes(memory)} that are free on this {device.kind}. "
        "Gated models need a Hugging Face token (HF_TOKEN).\n"
        "Fetch one with: quire pull NAME; any other model by its Hugging Face id."
    )


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Every value whole, on a terminal and in a pipe."""
    head = [name.upper().replace("_", " ").replace("BYTES", "SIZE") for name in rows[0]]
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _cells(row: dict[str, Any]) -> list[str]:
    from quire.config import format_bytes

    return [format_bytes(value) if name == "bytes" else str(value) for name, value in row.items()]


def pull(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="A short name (`quire models --available`) or a Hugging Face id (org/name).",
        ),
    ],
    as_json: Annotated[bool, Option("--json", help="Print name and path as JSON.")] = False,
) -> None:
    """Fetch a model, so that it runs without network later.

    \b
    quire pull smollm2
    quire pull qwen3-0.6b
    quire pull Qwen/Qwen3-0.6B
    """
    from quire.checkpoints.sources import resolve

    with ModelBars(model) as bars:
        source = resolve(model, progress=bars("download"))
    if as_json:
        found = {"model": model, "path": str(source.path), "source": source.origin}
        print(json.dumps(found, ensure_ascii=False))
    else:
        print(f"{model}: {source.path} ({source.origin})")
