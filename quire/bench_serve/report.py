"""Figures of a run, in the fields and words of `vllm bench serve`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.bench_serve.measuring import Load, Result
from quire.errors import InvalidRequestError

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_GOODPUT = ("ttft", "tpot", "e2el")
_WIDTH = 50


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]`: what a request must keep to count as good, in milliseconds."""
    limits = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in _GOODPUT or not value > 0:
            raise InvalidRequestError("--goodput", f"must be {'|'.join(_GOODPUT)}:MILLISECONDS, not {pair!r}")
        limits[name] = value
    return limits


def summarize(
    results: Sequence[Result],
    duration: float,
    *,
    goodput: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """The figures, by the names they have in vLLM's result files. Times are of requests that succeeded."""
    done = [result for result in results if result.is_success]
    total_input = sum(result.prompt_tokens for result in done)
    total_output = sum(result.output_tokens for result in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(_is_good(result, goodput) for result in done) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": _peak_rate(done),
        "max_concurrent_requests": _peak_concurrency(results),
    }
    samples = {
        "ttft": [result.ttft for result in done],
        "tpot": [result.tpot for result in done if result.tpot is not None],
        "itl": [gap for result in done for gap in result.itls],
        "e2el": [result.latency for result in done],
    }
    for name, seconds in samples.items():
        values = sorted(1000 * value for value in seconds or [0.0])
        figures[f"mean_{name}_ms"] = statistics.fmean(values)
        figures[f"median_{name}_ms"] = percentile_of(values, 50)
        figures[f"std_{name}_ms"] = statistics.pstdev(values)
        for percentile in percentiles:
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


def table(
    figures: Mapping[str, Any],
    load: Load,
    shown: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = (99.0,),
) -> str:
    """The figures for reading."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]

    def add(name: str, value: float) -> None:
        lines.append(f"{name + ':':<40} {value if isinstance(value, int) else format(value, '.2f'):<10}".rstrip())

    add("Successful requests", figures["completed"])
    add("Failed requests", figures["failed"])
    if load.max_concurrency is not None:
        add("Maximum request concurrency", load.max_concurrency)
    if not math.isinf(load.request_rate):
        add("Request rate configured (RPS)", load.request_rate)
    add("Benchmark duration (s)", figures["duration"])
    add("Total input tokens", figures["total_input_tokens"])
    add("Total generated tokens", figures["total_output_tokens"])
    add("Request throughput (req/s)", figures["request_throughput"])
    if figures["request_goodput"] is not None:
        add("Request goodput (req/s)", figures["request_goodput"])
    add("Output token throughput (tok/s)", figures["output_throughput"])
    add("Peak output token throughput (tok/s)", figures["max_output_tokens_per_s"])
    add("Peak concurrent requests", figures["max_concurrent_requests"])
    add("Total token throughput (tok/s)", figures["total_token_throughput"])
    for name in shown:
        lines.append(f"{METRICS[name]:-^{_WIDTH}}")
        add(f"Mean {name.upper()} (ms)", figures[f"mean_{name}_ms"])
        add(f"Median {name.upper()} (ms)", figures[f"median_{name}_ms"])
        for percentile in percentiles:
            add(f"P{percentile:g} {name.upper()} (ms)", figures[f"p{percentile:g}_{name}_ms"])
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def percentile_of(ordered: Sequence[float], percentile: float) -> float:
    """Between two values, on the line from one to the other."""
    place = (len(ordered) - 1) * percentile / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _is_good(result: Result, limits: Mapping[str, float]) -> bool:
    seconds = {"ttft": result.ttft, "tpot": result.tpot or 0.0, "e2el": result.latency}
    return all(1000 * seconds[name] <= limit for name, limit in limits.items())


def _peak_rate(results: Sequence[Result]) -> float:
    """Most tokens in any second of the run; a piece counts for its share of its answer's tokens."""
    if not results:
        return 0.0
    first = min(result.start for result in results)
    seconds: dict[int, float] = {}
    for result in results:
        for chunk in result.chunks:
            second = int(chunk - first)
            seconds[second] = seconds.get(second, 0.0) + result.output_tokens / len(result.chunks)
    return max(seconds.values())


def _peak_concurrency(results: Sequence[Result]) -> int:
    changes = sorted([(result.start, 1) for result in results] + [(result.end, -1) for result in results])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
