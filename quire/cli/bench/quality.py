"""`quire bench quality`: what a weight format costs in quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

import quire.cli.bench.options as shared
from quire.cli import options
from quire.cli.option_groups import with_groups

_FORMS = "auto|none|int8|int4|fp8|bfloat16|float32"


@with_groups
def quality(
    model: options.ModelByPlace = options.DEFAULT_MODEL,
    quantization: Annotated[
        list[str] | None,
        Option(
            metavar=_FORMS,
            help="The weights to measure; auto (the default): as they would run. Repeat.",
        ),
    ] = None,
    against: Annotated[
        str | None, Option(metavar="M", help="Compare with another model; default: the same.")
    ] = None,
    against_quantization: Annotated[
        str, Option(metavar=_FORMS, help="The weights to compare with.")
    ] = "float32",
    text: Annotated[
        Path | None, Option(metavar="FILE", help="The text to read; default: one of our own.")
    ] = None,
    window: Annotated[
        int, Option(metavar="N", min=2, help="How many tokens of it are read at a time.")
    ] = 512,
    device: options.Device = "auto",
    markdown: shared.MarkdownFile = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Read a text with weights in some format and in full precision, and measure how far they are
    apart.

    \b
    quire bench quality smollm2
    quire bench quality Qwen/Qwen3-0.6B --quantization int8 --quantization int4
    quire bench quality small.gguf --against org/name --text novel.txt
    """
    from quire.tools.bench.quality import OWN_TEXT, measure_quality, read_text

    forms = quantization or ["auto"]
    report = measure_quality(
        model,
        forms,
        against or model,
        against_quantization,
        read_text(text or OWN_TEXT),
        window,
        device,
    )
    shared.deliver(report, markdown, json_file)
