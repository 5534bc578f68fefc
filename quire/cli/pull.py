"""`quire pull`: fetches a model."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.frontend.progress import ModelBars


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An alias (smollm2) or a Hugging Face id (org/name).")],
) -> None:
    """Fetch a model, so that it runs without network later.

    \b
    quire pull smollm2
    quire pull Qwen/Qwen3-0.6B
    """
    from quire.models.sources import resolve

    with ModelBars(model) as bars:
        source = resolve(model, progress=bars("download"))
    print(f"{model}: {source.path} ({source.origin})")
