"""Bars for a report, drawn by matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.benchmark.measure import Spread
from quire.errors import InvalidRequestError, QuireError

_FORMATS = (".svg", ".png")


def check_format(path: Path) -> None:
    """Before anything is measured."""
    if path.suffix not in _FORMATS:
        raise InvalidRequestError("--plot", f"must be svg or png, not {path.suffix.removeprefix('.')!r}")


def plot_bars(path: Path, title: str, bars: Sequence[tuple[str, Spread]]) -> None:
    """Medians as bars on a logarithmic scale, from the lowest to the highest repeat as whiskers."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
    except ImportError:
        raise QuireError("plots need matplotlib: pip install 'quire[plot]'") from None
    names = [name for name, _ in bars]
    medians = [spread.median for _, spread in bars]
    below = [spread.median - spread.low for _, spread in bars]
    above = [spread.high - spread.median for _, spread in bars]
    with matplotlib.rc_context({"svg.hashsalt": "quire", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 0.6 + 0.45 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        drawn = axes.barh(names, medians, xerr=[below, above], color="#4878a8", ecolor="#333333", capsize=3)
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
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
