"""`quire quantize`: a model's small form as a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from quire.errors import InvalidRequestError
from quire.frontend.progress import ModelBars

if TYPE_CHECKING:
    from quire.checkpoints.checkpoint import Checkpoint


def quantize(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="A folder, a .gguf file of plain numbers or a Hugging Face id (org/name).",
        ),
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to write.")],
    to: Annotated[
        str,
        Option(
            metavar="int8|int4|fp8",
            help="int8, fp8: a scale per output; int4: a scale per 32 numbers.",
        ),
    ],
    force: Annotated[
        bool, Option("--force", help="Replace OUT if an earlier quire quantize wrote it.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print folder and sizes as JSON.")] = False,
) -> None:
    """Write a model with quantised weights, a half or a quarter of its size.

    The layout is compressed-tensors', which other engines read, too.

    Quire answers from it as from the original loaded with --quantization, bit for bit; it loads
    sooner.

    \b
    quire quantize Qwen/Qwen3-0.6B qwen3-int8 --to int8
    quire quantize ./my-model ./my-model-int4 --to int4
    quire run "Hello!" --model ./my-model-int4
    """
    from quire.checkpoints.sources import resolve
    from quire.config import format_bytes
    from quire.models.weight_plan import QUANTIZED
    from quire.tools.quantize import quantize_model

    if to not in QUANTIZED:
        raise InvalidRequestError("--to", f"must be one of {', '.join(QUANTIZED)}, not {to!r}")
    with ModelBars(model) as bars:
        source = resolve(model, progress=bars("download"))
        written = quantize_model(source.path, out, to, force, bars("quantize"), _write_tokenizer)
    if as_json:
        sizes = {"bytes_before": written.before, "bytes": written.after}
        found = {"path": str(out), "to": to, **sizes, "left_plain": list(written.plain)}
        print(json.dumps(found, ensure_ascii=False))
        return
    plain = (
        f"; {len(written.plain)} small or uneven matrices stay as they were"
        if written.plain
        else ""
    )
    print(
        f"{out}: {format_bytes(written.before)} of weights became {format_bytes(written.after)} ({to}{plain})"
    )


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """A GGUF file's tokenizer, as files of their own; the bytes that are a teaching model's tokens."""
    from quire.frontend.gguf_tokenizer import read_gguf_tokenizer
    from quire.frontend.hf_tokenizer import write_hf_tokenizer
    from quire.frontend.tokenizer import byte_backend

    if checkpoint.kind == "npy":
        byte_backend().save(str(folder / "tokenizer.json"))
    else:
        write_hf_tokenizer(read_gguf_tokenizer(checkpoint.metadata), folder)
