"""A whole run of `quire bench serve`: measure, print, write, draw."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from quire.bench_serve.http_client import HttpClient
from quire.bench_serve.measuring import Load, Result, find_model, measure
from quire.bench_serve.plot import check_plotting, draw
from quire.bench_serve.report import METRICS, details, summarize, table
from quire.bench_serve.workloads import Job
from quire.errors import InvalidRequestError, QuireError


@dataclass(frozen=True, slots=True)
class Output:
    """What is told of a run, and where."""

    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits a good request keeps, in milliseconds."""
    shown: Sequence[str] = tuple(METRICS)
    percentiles: Sequence[float] = (99.0,)
    result_file: Path | None = None
    save_detailed: bool = False
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.save_detailed and self.result_file is None:
            raise InvalidRequestError("--save-detailed", "needs --result-file")
        for name in self.shown:
            if name not in METRICS:
                raise InvalidRequestError("--percentile-metrics", f"has {', '.join(METRICS)}, not {name!r}")
        if self.plot is not None:
            check_plotting()

    def write(self, load: Load, base_url: str, dataset: str, results: Sequence[Result], duration: float) -> None:
        figures = summarize(results, duration, goodput=self.goodput, percentiles=self.percentiles)
        print(table(figures, load, self.shown, self.percentiles))
        if self.result_file is not None:
            about = {
                "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
                "backend": load.backend,
                "base_url": base_url,
                "model_id": load.model,
                "dataset_name": dataset,
                "num_prompts": len(results),
                "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
                "burstiness": load.burstiness,
                "max_concurrency": load.max_concurrency,
            }
            more = details(results) if self.save_detailed else {}
            try:
                self.result_file.write_text(json.dumps({**about, **figures, **more}, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise InvalidRequestError("--result-file", f"can't be written: {error}") from None
        if self.plot is not None and figures["completed"]:
            draw(results, f"{load.model} at {base_url}", self.plot)


def run(
    base_url: str,
    api_key: str | None,
    load: Load,
    jobs: Sequence[Job],
    output: Output,
    dataset: str,
    num_warmups: int = 0,
) -> None:
    """Measures, and tells. Raises QuireError if no request succeeded."""
    load, results, duration = asyncio.run(_measure(base_url, api_key, load, jobs, num_warmups))
    output.write(load, base_url, dataset, results, duration)
    if not any(result.is_success for result in results):
        raise QuireError(f"no request succeeded; the first failed so: {results[0].error}")


async def _measure(
    base_url: str, api_key: str | None, load: Load, jobs: Sequence[Job], num_warmups: int
) -> tuple[Load, list[Result], float]:
    async with HttpClient(base_url, api_key) as client:
        if load.model is None:
            load = replace(load, model=await find_model(client))
        if num_warmups:
            await measure(client, [jobs[i % len(jobs)] for i in range(num_warmups)], load)
        with Progress(transient=True, console=Console(stderr=True)) as bar:
            task = bar.add_task("requests", total=len(jobs))
            results, duration = await measure(client, jobs, load, lambda _: bar.advance(task))
    return load, results, duration
