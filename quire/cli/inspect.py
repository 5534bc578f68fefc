"""`quire inspect`: what is in a model, where two models part, and where a NaN begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Exit, Option

from quire.cli import options
from quire.cli.models import print_table
from quire.cli.option_groups import with_groups
from quire.errors import InvalidRequestError
from quire.frontend.progress import ModelBars

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models.weight_plan import ModelFiles
    from quire.tools.inspect.model_facts import ModelFacts

_TEMPLATE_LINES = 8


@with_groups
def inspect(
    model: options.ModelByPlace = options.DEFAULT_MODEL,
    all_tensors: Annotated[
        bool, Option("--all", help="Every tensor, not one line for those alike in all layers.")
    ] = (False),
    against: Annotated[
        str | None,
        Option(
            metavar="FOLDER",
            help="Another model: name the first layer and tensor in which the two differ.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        Option(metavar="T", help="How far apart values may be, as a part of the tensor's largest."),
    ] = 1e-4,
    trace: Annotated[
        str | None,
        Option(
            metavar="TEXT", help="Run a text through the layers: sizes, and where a NaN begins."
        ),
    ] = None,
    values: Annotated[
        int,
        Option(metavar="N", help="With --trace: also the first N values of the last token."),
    ] = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    as_json: Annotated[bool, Option("--json", help="Print the facts as one JSON object.")] = False,
) -> None:
    """Show a model's settings, tensors, tokenizer, chat template, and what it takes here. Nothing
    is loaded for that.

    \b
    quire inspect smollm2
    quire inspect Qwen/Qwen3-0.6B --all --quantization int8
    quire inspect mine --against theirs              # the first tensor that differs; exit code 1 if one does
    quire inspect mine --trace "Hello, world!"       # what each layer gives; exit code 1 if it is no number
    quire inspect mine --trace "Hello!" --values 4   # with the first values of each tensor
    """
    from quire.checkpoints.sources import resolve
    from quire.config import EngineConfig
    from quire.tools.inspect.model_facts import look_at

    if not tolerance >= 0:
        raise InvalidRequestError("--tolerance", f"must be at least 0, not {tolerance}")
    if values < 0 or (values and trace is None):
        raise InvalidRequestError("--values", "is a number of values that --trace TEXT shows")
    config = EngineConfig(device=device, dtype=dtype, quantization=quantization)
    with ModelBars(model) as bars:
        source = resolve(model, progress=bars("download"))
    facts, files, tokenizer = look_at(source, config)
    try:
        if against is not None:
            _compare(source.path, files, against, tolerance)
        elif trace is not None:
            _trace(files, tokenizer.encode(trace), config, values)
        elif as_json:
            print(json.dumps(facts.as_dict(), ensure_ascii=False))
        else:
            _show(facts, all_tensors)
    finally:
        files.checkpoint.close()


def _show(facts: ModelFacts, all_tensors: bool) -> None:
    from quire.config import format_bytes
    from quire.tools.inspect.model_facts import grouped

    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(facts.source)
    for title, part in (
        ("Model", facts.spec),
        ("Tokenizer", facts.tokenizer),
        ("Memory here", facts.memory),
    ):
        console.print(f"\n{title}", style="bold")
        for name, value in part.items():
            shown = (
                f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
            )
            console.print(f"  {name.replace('_', ' '):18} {shown}")
    console.print("\nChat template", style="bold")
    if not facts.templates:
        console.print("  none: a base model, for quire run --raw")
    for name, text in facts.templates.items():
        lines = text.splitlines()
        console.print(f"  {name}: {len(text):,} characters")
        console.print("\n".join(f"    {line[:110]}" for line in lines[:_TEMPLATE_LINES]))
        if len(lines) > _TEMPLATE_LINES:
            console.print(f"    … {len(lines) - _TEMPLATE_LINES} more lines")
    total = sum(one.num_bytes for one in facts.tensors)
    console.print(f"\nTensors: {len(facts.tensors)}, {format_bytes(total)}", style="bold")
    print_table(
        [
            {
                "name": one.name,
                "shape": " x ".join(map(str, one.shape)),
                "format": one.format,
                "bytes": one.num_bytes,
                "times": one.count,
            }
            for one in (facts.tensors if all_tensors else grouped(facts.tensors))
        ]
    )


def _compare(path: Path, files: ModelFiles, against: str, tolerance: float) -> None:
    from quire.checkpoints.sources import resolve
    from quire.models.load import open_model
    from quire.tools.inspect.comparison import (
        first_stage_difference,
        first_weight_difference,
        spec_differences,
    )
    from quire.tools.inspect.model_facts import golden_tokens

    source = resolve(against)
    other = open_model(source.path)
    try:
        settings = spec_differences(files.spec, other.spec)
        for line in settings:
            print(f"setting {line}")
        weight = first_weight_difference(files, other, tolerance)
        if weight is not None:
            print(f"weight {weight}")
        stage = None
        if weight is None or weight.first:
            tokens = golden_tokens(source) or list(
                range(min(16, files.spec.vocab_size, other.spec.vocab_size))
            )
            stage = first_stage_difference(files, other, tokens, tolerance)
            print("all layers give the same" if stage is None else f"stage {stage}")
    finally:
        other.checkpoint.close()
    if settings or weight is not None or stage is not None:
        raise Exit(1)
    print(f"{path} and {source.path} are the same model within {tolerance:g}")


def _trace(files: ModelFiles, token_ids: list[int], config: EngineConfig, num_values: int) -> None:
    from quire.backends.select import pick_device
    from quire.models.load import load_planned
    from quire.runner.worker import choose_weights
    from quire.tools.inspect.activations import trace

    decoder = load_planned(choose_weights(files, config, pick_device(config.device)))
    rows: list[dict[str, Any]] = []
    began = None
    for stage in trace(decoder, token_ids):
        row = {
            "stage": stage.name,
            "largest": f"{stage.largest:.4g}",
            "mean": f"{float(stage.values.abs().nanmean()):.4g}",
            "not_numbers": stage.num_bad or "",
        }
        if num_values:
            first = stage.values[-1, :num_values].tolist()
            row["first_values"] = " ".join(f"{value:.6g}" for value in first)
        rows.append(row)
        began = began or (stage if stage.num_bad else None)
    print_table(rows)
    if began is None:
        print(f"all values of {len(token_ids)} tokens are numbers")
        return
    place = (~began.values.isfinite()).nonzero()[0].tolist()
    print(
        f"the first NaN or infinity comes from {began.name}, at token {place[0]}, value {place[1]}"
    )
    raise Exit(1)
