"""Figures of a run, in the fields and words of `vllm bench serve`."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from quire.errors import InvalidRequestError
from quire.tools.bench.report import Report, Row, Table
from quire.tools.bench.serve.load import Load, Result
from quire.tools.bench.spread import percentile_of

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_GOODPUT = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Which figures are computed beside the usual ones, and which are shown."""

    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits a good request keeps, in milliseconds; of the times between its tokens (itl), 99 in
    100.
    """
    shown: Sequence[str] = tuple(METRICS)
    percentiles: Sequence[float] = (99.0,)

    @classmethod
    def parse(cls, goodput: Iterable[str], shown: str, percentiles: str) -> Metrics:
        """From `["ttft:500", "tpot:50"]`, "ttft,e2el" and "50,99"."""
        names = [name.strip() for name in shown.split(",")]
        for name in names:
            if name not in METRICS:
                raise InvalidRequestError(
                    "--percentile-metrics", f"has {', '.join(METRICS)}, not {name!r}"
                )
        values = [_number(part) for part in percentiles.split(",")]
        if not all(0 <= value <= 100 for value in values):
            message = f"must be numbers from 0 to 100 like 50,99, not {percentiles!r}"
            raise InvalidRequestError("--metric-percentiles", message)
        return cls(parse_goodput(goodput), names, values)


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]`: what a request must keep to count as good, in milliseconds."""
    limits = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        limits[name] = _number(text)
        if name not in _GOODPUT or not limits[name] > 0:
            raise InvalidRequestError(
                "--goodput", f"must be {'|'.join(_GOODPUT)}:MILLISECONDS, not {pair!r}"
            )
    return limits


def serving_report(
    facts: Mapping[str, str],
    load: Load,
    dataset: str,
    results: Sequence[Result],
    duration: float,
    metrics: Metrics,
    is_detailed: bool,
) -> Report:
    """All of a run; the JSON has vLLM's fields."""
    figures = summarize(results, duration, metrics)
    about = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": load.backend,
        "base_url": facts["server"],
        "model_id": load.model,
        "dataset_name": dataset,
        "num_prompts": len(results),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    table = Table(
        "Serving Benchmark Result", "", ("what", "measured"), tuple(rows(figures, load, metrics))
    )
    more = details(results) if is_detailed else {}
    return Report(table.title, facts, (table,), {**about, **figures, **more})


@dataclass(frozen=True, slots=True)
class RateResult:
    """A run at one rate, among several."""

    rate: float
    results: Sequence[Result]
    duration: float

    def good_share(self, metrics: Metrics) -> float:
        """Of all that were sent; refused ones are not good."""
        good = sum(one.is_success and _is_good(one, metrics.goodput) for one in self.results)
        return good / len(self.results)


def rates_report(
    facts: Mapping[str, str],
    load: Load,
    dataset: str,
    runs: Sequence[RateResult],
    metrics: Metrics,
) -> Report:
    """Requests within targets, by rate; the JSON has a run's figures for each."""
    columns = ("rate (req/s)", "within targets", "failed", "output tok/s", "P99 TTFT", "P99 ITL")
    rows = []
    figures = []
    for run in runs:
        one = summarize(run.results, run.duration, metrics)
        share = run.good_share(metrics)
        times = samples(run.results)
        figures.append({"request_rate": run.rate, "good_share": share, **one})
        rows.append(
            (
                f"{run.rate:g}",
                f"{share:.0%}",
                one["failed"],
                f"{one['output_throughput']:.1f}",
                *(f"{percentile_of(times[name], 99):.0f} ms" for name in ("ttft", "itl")),
            )
        )
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in metrics.goodput.items())
    table = Table("Requests within targets", f"targets: {limits}", columns, tuple(rows))
    about = {"model_id": load.model, "dataset_name": dataset, "goodput": dict(metrics.goodput)}
    return Report(table.title, facts, (table,), {**about, "runs": figures})


def samples(results: Iterable[Result]) -> dict[str, list[float]]:
    """Milliseconds of each metric in rising order, of requests that succeeded; a single 0 where
    there are none.
    """
    done = [result for result in results if result.is_success]
    seconds = {
        "ttft": [result.ttft for result in done],
        "tpot": [result.tpot for result in done if result.tpot is not None],
        "itl": [gap for result in done for gap in result.itls],
        "e2el": [result.latency for result in done],
    }
    return {
        name: sorted(1000 * value for value in values or [0.0]) for name, values in seconds.items()
    }


def summarize(results: Sequence[Result], duration: float, metrics: Metrics) -> dict[str, Any]:
    """The figures, by the names they have in vLLM's result files. Times are of requests that
    succeeded.
    """
    done = [result for result in results if result.is_success]
    total_input = sum(result.prompt_tokens for result in done)
    total_output = sum(result.output_tokens for result in done)
    num_good = sum(_is_good(result, metrics.goodput) for result in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration,
        "request_goodput": num_good / duration if metrics.goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": _peak_rate(done),
        "max_concurrent_requests": _peak_concurrency(results),
    }
    for name, values in samples(done).items():
        figures[f"mean_{name}_ms"] = statistics.fmean(values)
        figures[f"median_{name}_ms"] = percentile_of(values, 50)
        figures[f"std_{name}_ms"] = statistics.pstdev(values)
        for percentile in metrics.percentiles:
            figures[f"p{percentile:g}_{name}_ms"] = percentile_of(values, percentile)
    return figures


def details(results: Sequence[Result]) -> dict[str, Any]:
    """What each request did, under vLLM's names; start times count from the first request."""
    first = min(result.start for result in results)
    return {
        "input_lens": [result.prompt_tokens for result in results],
        "output_lens": [result.output_tokens for result in results],
        "ttfts": [result.ttft if result.chunks else 0.0 for result in results],
        "itls": [result.itls for result in results],
        "start_times": [result.start - first for result in results],
        "errors": [result.error or "" for result in results],
    }


def rows(figures: Mapping[str, Any], load: Load, metrics: Metrics) -> Iterable[Row]:
    """The figures for reading."""
    named = {
        "Successful requests": figures["completed"],
        "Failed requests": figures["failed"],
        "Maximum request concurrency": load.max_concurrency,
        "Request rate configured (RPS)": None
        if math.isinf(load.request_rate)
        else load.request_rate,
        "Benchmark duration (s)": figures["duration"],
        "Total input tokens": figures["total_input_tokens"],
        "Total generated tokens": figures["total_output_tokens"],
        "Request throughput (req/s)": figures["request_throughput"],
        "Request goodput (req/s)": figures["request_goodput"],
        "Output token throughput (tok/s)": figures["output_throughput"],
        "Peak output token throughput (tok/s)": figures["max_output_tokens_per_s"],
        "Peak concurrent requests": figures["max_concurrent_requests"],
        "Total token throughput (tok/s)": figures["total_token_throughput"],
    }
    for name in metrics.shown:
        named[METRICS[name]] = ""
        for word in ("mean", "median", *(f"p{percentile:g}" for percentile in metrics.percentiles)):
            named[f"{word.capitalize()} {name.upper()} (ms)"] = figures[f"{word}_{name}_ms"]
    for name, value in named.items():
        if value is not None:
            shown = f"{value:.2f}" if isinstance(value, float) else value
            yield (f"{name}:" if shown != "" else name, shown)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_good(result: Result, limits: Mapping[str, float]) -> bool:
    seconds = {"ttft": result.ttft, "tpot": result.tpot or 0.0, "e2el": result.latency}
    if "itl" in limits:
        seconds["itl"] = percentile_of(sorted(result.itls) or [0.0], 99)
    return all(1000 * seconds[name] <= limit for name, limit in limits.items())


def _peak_rate(results: Sequence[Result]) -> float:
    """Most tokens in any second of the run; a piece counts for its share of its answer's tokens."""
    first = min((result.start for result in results), default=0.0)
    seconds: defaultdict[int, float] = defaultdict(float)
    for result in results:
        for chunk in result.chunks:
            seconds[int(chunk - first)] += result.output_tokens / len(result.chunks)
    return max(seconds.values(), default=0.0)


def _peak_concurrency(results: Sequence[Result]) -> int:
    changes = sorted(
        [(result.start, 1) for result in results] + [(result.end, -1) for result in results]
    )
    return max(accumulate(change for _, change in changes), default=0)
