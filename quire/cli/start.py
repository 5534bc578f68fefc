"""From the command line to an engine, as quickly as this process can."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from quire.cli.terminal import say
from quire.errors import QuireError
from quire.process.gc_pauses import no_collections

if TYPE_CHECKING:
    from quire.llm import LLM


def check_can_chat(model: str) -> None:
    """Says that a model has no chat template before its weights are loaded, which may take minutes."""
    from quire.checkpoints.sources import resolve
    from quire.frontend.hf_tokenizer import read_chat_templates
    from quire.frontend.progress import ModelBars
    from quire.models.load import open_checkpoint

    with ModelBars(model) as bars:
        path = resolve(model, progress=bars("download")).path
    if path.is_dir():
        found = bool(read_chat_templates(path))
    else:
        checkpoint = open_checkpoint(path)
        found = "tokenizer.chat_template" in checkpoint.metadata
        checkpoint.close()
    if not found:
        raise QuireError(
            f"{model} has no chat template, so it can't chat. Continue text with: quire run --raw"
        )


def open_llm(model: str, **options: Any) -> LLM:
    """Imports the engine and loads a model."""
    with no_collections():
        from quire.llm import LLM

        return LLM(model, **options)


def say_started(llm: LLM, began: float, verbose: bool) -> None:
    """One line about what was loaded, that fits on a terminal; with `-v` everything."""
    seconds = f"({time.monotonic() - began:.1f} s)"
    if verbose:
        say(f"{llm.description} {seconds}")
        return
    from quire.config import format_bytes

    info = llm.info
    name = llm.description.partition(":")[0]
    parts = [
        f"{name} on {info.device}",
        f"{info.num_parameters / 1e6:,.0f}M parameters",
        f"{info.dtype}, {format_bytes(info.weight_bytes)} ({', '.join(info.weight_formats)})",
    ]
    # What makes it slow must not hide behind -v.
    parts += [part for part in llm.description.split("; ") if "slowly" in part]
    say(f"{', '.join(parts)} {seconds}")
