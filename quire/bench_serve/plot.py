"""A picture of a run: how its latencies are spread, and what happened when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.bench_serve.measuring import Result
from quire.bench_serve.report import percentile_of
from quire.errors import QuireError


def check_plotting() -> None:
    """Before a long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise QuireError("--plot needs matplotlib: pip install 'quire[plot]'") from None


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Writes a PNG, PDF or SVG, by the file's name."""
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [result for result in results if result.is_success]
    if not done:
        raise QuireError("--plot: no request succeeded, so there is nothing to draw")
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    samples = {
        "TTFT": [result.ttft for result in done],
        "ITL": [gap for result in done for gap in result.itls],
        "E2EL": [result.latency for result in done],
    }
    for axis, (name, seconds) in zip(axes.flat, samples.items(), strict=False):
        values = sorted(1000 * value for value in seconds or [0.0])
        axis.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post")
        for percentile, style in ((50, ":"), (99, "--")):
            axis.axvline(percentile_of(values, percentile), linestyle=style, color="grey", linewidth=1)
        axis.set(title=f"{name}: share of all below (dotted: median, dashed: P99)", xlabel="ms", ylim=(0, 1.02))
    _draw_timeline(axes[1][1], done)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise QuireError(f"--plot: {path} can't be written: {error}") from None


def _draw_timeline(axis: object, done: Sequence[Result]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    first = min(result.start for result in done)
    for row, result in enumerate(sorted(done, key=lambda one: one.start)):
        start, token, end = (moment - first for moment in (result.start, result.chunks[0], result.end))
        axis.plot([start, token], [row, row], color="tab:orange", linewidth=1)
        axis.plot([token, end], [row, row], color="tab:blue", linewidth=1)
    axis.set(title="requests: waiting (orange), answering (blue)", xlabel="s", ylabel="request")
