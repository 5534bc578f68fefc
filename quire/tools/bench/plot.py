"""Pictures of reports, drawn by matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequestError, QuireError
from quire.tools.bench.serve.figures import samples
from quire.tools.bench.serve.load import Result
from quire.tools.bench.spread import Spread, percentile_of


def check_format(path: Path) -> None:
    """Before anything is measured."""
    if path.suffix not in (".svg", ".png"):
        raise InvalidRequestError(
            "--plot", f"must be svg or png, not {path.suffix.removeprefix('.')!r}"
        )


def check_plotting() -> None:
    """Before a long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise QuireError("plots need matplotlib: pip install 'quire[plot]'") from None


def plot_bars(path: Path, title: str, bars: Sequence[tuple[str, Spread]]) -> None:
    """Medians as bars on a logarithmic scale, from the lowest to the highest repeat as whiskers."""
    check_plotting()
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    medians = [spread.median for _, spread in bars]
    below = [spread.median - spread.low for _, spread in bars]
    above = [spread.high - spread.median for _, spread in bars]
    figure = Figure(figsize=(8, 0.6 + 0.45 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name, _ in bars]
    drawn = axes.barh(
        names, medians, xerr=[below, above], color="#4878a8", ecolor="#333333", capsize=3
    )
    axes.bar_label(drawn, labels=[f" {median:,.1f}" for median in medians], padding=6)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel(f"{bars[0][1].unit}, logarithmic")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_rates(path: Path, title: str, shares: Sequence[tuple[float, float]]) -> None:
    """The share of requests within targets, by the rate of requests."""
    check_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([rate for rate, _ in shares], [share for _, share in shares], marker="o")
    axes.set(title=title, xlabel="requests a second", ylabel="within targets", ylim=(0, 1.05))
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_requests(path: Path, title: str, results: Sequence[Result]) -> None:
    """How the latencies of requests are spread, and what happened when."""
    check_plotting()
    from matplotlib.figure import Figure

    done = sorted((result for result in results if result.is_success), key=lambda one: one.start)
    figure = Figure(figsize=(12, 7), layout="constrained")
    figure.suptitle(title)
    *spreads, timeline = figure.subplots(2, 2).flat
    values = samples(done)
    for axis, name in zip(spreads, ("ttft", "itl", "e2el"), strict=True):
        ordered = values[name]
        axis.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        for percentile, style in ((50, ":"), (99, "--")):
            axis.axvline(
                percentile_of(ordered, percentile), linestyle=style, color="grey", linewidth=1
            )
        axis.set(
            title=f"{name.upper()}: share of all below (dotted: median, dashed: P99)",
            xlabel="ms",
            ylim=(0, 1.02),
        )
    for row, result in enumerate(done):
        start, token, end = (
            moment - done[0].start for moment in (result.start, result.chunks[0], result.end)
        )
        timeline.plot([start, token], [row, row], color="tab:orange", linewidth=1)
        timeline.plot([token, end], [row, row], color="tab:blue", linewidth=1)
    timeline.set(title="requests: waiting (orange), answering (blue)", xlabel="s", ylabel="request")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """By the file's name; the same picture is the same file, byte by byte."""
    import matplotlib

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "quire", "svg.fonttype": "none"}):
            figure.savefig(
                path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None
            )
    except (OSError, ValueError) as error:
        raise QuireError(f"--plot: {path} can't be written: {error}") from None
