"""`quire bench ladder`: what each technique buys on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from quire.cli import options
from quire.cli.bench.options import deliver
from quire.cli.option_groups import with_groups
from quire.cli.terminal import say
from quire.errors import EngineError, QuireError


@with_groups
def ladder(
    model: options.ModelByPlace = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    quick: Annotated[
        bool, Option("--quick", help="Smaller workloads and two repeats, for a first look.")
    ] = False,
    output: Annotated[
        Path, Option(metavar="FOLDER", help="Where results.md, results.json and the plot go.")
    ] = Path("ladder-results"),
    plot: Annotated[str, Option(metavar="svg|png", help="The plot's format.")] = "svg",
) -> None:
    """Climb from the naive loop to the full engine and measure what each rung buys.

    All rungs answer the same requests and must give the same tokens; with quantised weights, other
    numbers, those of the first rung's loop with the same weights. docs/ladder/ has a chapter on
    each.

    \b
    quire bench ladder --quick
    quire bench ladder --output ladder-results --plot png
    quire bench ladder Qwen/Qwen3-0.6B --device cuda
    """
    from quire.tools.bench.ladder.climb import climb
    from quire.tools.bench.ladder.engines import LadderEngines
    from quire.tools.bench.ladder.settings import FULL, QUICK
    from quire.tools.bench.plot import check_format, plot_bars

    path = output / f"ladder.{plot}"
    check_format(path)
    settings = QUICK if quick else FULL
    with LadderEngines(model, device, dtype, settings.max_model_len) as engines:
        found = climb(engines, settings)
    deliver(found.report, output / "results.md", output / "results.json")
    try:
        plot_bars(path, "Output tokens per second, rung by rung", found.bars)
        say(f"wrote {path}")
    except QuireError as error:
        say(f"no plot: {error}")
    if found.differing and dtype == "float32":
        raise EngineError(f"tokens are not those they must be on: {', '.join(found.differing)}")
